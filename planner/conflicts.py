"""Which options of `plan` leave others unread.

An option that nothing would read, because other options leave out every part of the run that reads it, is refused
together with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsekv.plans.errors import UsageError

_MACHINE = ("backend", "device", "dtype", "device_map")
# The parts of a run and the options that only they read: such an option counts as long as one of them takes place.
READERS: Mapping[str, tuple[str, ...]] = {
    "density target": ("target_density", "levels"),
    "speedup target": ("target_speedup",),
    "search": ("preset", "tile", "row_stride", "refine_rounds"),
    "prefill": ("families",),
    "calibration": ("prompts", "samples", *_MACHINE),
    "task calibration": ("tasks", "seed"),
    "decode": ("decode_budget", "decode_sink", "decode_recent", "offload", "filter_layers"),
    "loss bound": ("decode_loss",),
    "divergence bound": ("decode_kl",),
    "device cost": (*_MACHINE, "host"),
    "verification": (
        *("tasks", "seed", "verify_samples", "verify_lengths"),
        *("max_accuracy_drop", "max_kl", "max_decode_kl", "min_agreement", "min_exact"),
        *("batch", "prefill_chunk", *_MACHINE),
    ),
}


@dataclass(frozen=True, slots=True)
class Switch:
    """An option that leaves parts out: with any value, or with `value`."""

    name: str
    leaves_out: tuple[str, ...]
    value: str | None = None

    def is_on(self, given: Mapping[str, object]) -> bool:
        """Whether the options given say so."""
        return self.name in given and self.value in (None, given[self.name])


_DECODE = ("decode", "loss bound", "divergence bound")
SWITCHES = (
    Switch("profile", ("search", "calibration", "task calibration")),
    Switch("prompts", ("task calibration",)),
    Switch("cost", ("device cost",)),
    Switch("host", _DECODE, "vllm"),
    Switch("preset", ("density target", "speedup target"), "minference"),
    Switch("target_speedup", ("density target",)),
    Switch("only", _DECODE, "prefill"),
    Switch("only", ("prefill", "search", "density target", "speedup target"), "decode"),
    Switch("filter_layers", ("loss bound", "divergence bound")),
    Switch("decode_loss", ("divergence bound",)),
    Switch("no_verify", ("verification",)),
)

# What is read besides where a host cuts prompts: chunks of that many tokens are timed.
_CHUNKED = {"device cost": (*READERS["device cost"], "prefill_chunk")}

_NO_FLAG = (
    *("levels", "row_stride", "refine_rounds", "verify_lengths"),
    *("decode_sink", "decode_recent"),
)


def check_used(given: Mapping[str, object]) -> None:
    """Refuses an option that nothing would read.

    Args:
        given: the options that were asked for, by name, and their values; not those left at their defaults.

    Raises:
        UsageError: naming the option, and those that leave out whatever would read it.
    """
    readers = {**READERS, **(_CHUNKED if given.get("host") == "vllm" else {})}
    for name in given:
        on = [switch for switch in SWITCHES if switch.is_on(given) and switch.name != name]
        parts = [part for part, read in readers.items() if name in read]
        against = [next((switch for switch in on if part in switch.leaves_out), None) for part in parts]
        if against and None not in against:
            others = dict.fromkeys(flag_of(switch.name, switch.value) for switch in against if switch)
            raise UsageError(
                f"expected no {flag_of(name)} beside {' and '.join(others)}, found it: nothing would read it; "
                "leave one of them out"
            )


def flag_of(name: str, value: object = None) -> str:
    """The flag of an option, as messages show it."""
    flag = name if name in _NO_FLAG else f"--{name.replace('_', '-')}"
    return flag if value is None else f"{flag} {value}"

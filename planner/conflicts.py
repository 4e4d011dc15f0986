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
    "decode": ("filter_rule", "decode_budget", "decode_sink", "decode_recent", "offload"),
    "given layers": ("filter_layers",),
    "loss bound": ("decode_selectors", "decode_loss"),
    "divergence bound": ("decode_selectors", "decode_kl"),
    "device cost": (*_MACHINE, "host"),
    "verification": (
        *("tasks", "seed", "verify_samples", "verify_lengths"),
        *("max_accuracy_drop", "max_kl", "max_decode_kl", "min_agreement", "min_exact"),
        *("batch", "prefill_chunk", *_MACHINE),
    ),
}


@dataclass(frozen=True, slots=True)
class Switch:
    """An option that leaves parts out: with any value, or with one of `values`."""

    name: str
    leaves_out: tuple[str, ...]
    because: str
    values: tuple[str, ...] = ()

    def is_on(self, given: Mapping[str, object]) -> bool:
        """Whether the options given say so."""
        return self.name in given and (not self.values or given[self.name] in self.values)


_BOUNDS = ("loss bound", "divergence bound")
SWITCHES = (
    Switch("profile", ("search", "calibration", "task calibration"), "a profile brings what it was made with"),
    Switch("prompts", ("task calibration",), "own prompts take the place of tasks"),
    Switch("cost", ("device cost",), "the device was measured already"),
    Switch("host", ("decode", *_BOUNDS, "given layers"), "decode is not planned for vLLM yet", ("vllm",)),
    Switch("preset", ("density target", "speedup target"), "the preset has a target of its own", ("minference",)),
    Switch("target_speedup", ("density target",), "each is a target"),
    Switch("only", ("decode", *_BOUNDS, "given layers"), "only prefill is planned", ("prefill",)),
    Switch("only", ("prefill", "search", "density target", "speedup target"), "only decode is planned", ("decode",)),
    Switch("filter_rule", ("given layers",), "this rule finds the layers itself", ("dp", "omnikv")),
    Switch("filter_rule", _BOUNDS, "this rule has no bound on what is lost", ("omnikv", "fixed")),
    Switch("filter_layers", _BOUNDS, "layers that are given have no bound on what is lost"),
    Switch("decode_loss", ("divergence bound",), "each is a bound on what is lost"),
    Switch("no_verify", ("verification",), "nothing is verified"),
)

# What is read besides where a host cuts prompts: chunks of that many tokens are timed.
_CHUNKED = {"device cost": (*READERS["device cost"], "prefill_chunk")}

_NO_FLAG = (
    *("levels", "row_stride", "refine_rounds", "verify_lengths"),
    *("decode_sink", "decode_recent", "decode_selectors"),
)


def check_used(given: Mapping[str, object]) -> None:
    """Refuses an option that nothing would read.

    Args:
        given: the options that were asked for, by name, and their values; not those left at their defaults.

    Raises:
        UsageError: naming the option, and those that leave out whatever would read it.
    """
    on = [switch for switch in SWITCHES if switch.is_on(given)]
    readers = {**READERS, **(_CHUNKED if given.get("host") == "vllm" else {})}
    for name in given:
        others = [switch for switch in on if switch.name != name]
        parts = [part for part, read in readers.items() if name in read]
        against = [next((switch for switch in others if part in switch.leaves_out), None) for part in parts]
        if against and None not in against:
            raise UsageError(_refusal(name, list(dict.fromkeys(switch for switch in against if switch)), given))


def _refusal(name: str, against: list[Switch], given: Mapping[str, object]) -> str:
    others = [flag_of(switch.name, given[switch.name] if switch.values else None) for switch in against]
    reasons = "; ".join(dict.fromkeys(switch.because for switch in against))
    if len(others) == 1:
        return f"expected {flag_of(name)} or {others[0]}, found both: {reasons}; leave one out"
    listed = f"{', '.join(others[:-1])} and {others[-1]}"
    return f"expected no {flag_of(name)} beside {listed}, found it: nothing would read it ({reasons}); leave one out"


def flag_of(name: str, value: object = None) -> str:
    """The flag of an option, as messages show it."""
    flag = name if name in _NO_FLAG else f"--{name.replace('_', '-')}"
    return flag if value is None else f"{flag} {value}"

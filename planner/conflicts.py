"""Options that would be dropped without a word: which parts of a planning run read an option, which option leaves a
part out.

An option all of whose readers are left out by other options is refused together with them. Names are those of the
flags; most fields of `PlanOptions` are called the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any

from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    from sparsekv.planner.options import PlanOptions
    from sparsekv.planner.profile_data import Profile

# What reads an option: as long as one of them takes place, the option counts. Options that always count are not here.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "target_density": ("density target",),
    "target_speedup": ("speedup target",),
    "levels": ("density target",),
    "preset": ("search",),
    "tile": ("search",),
    "row_stride": ("search",),
    "families": ("prefill",),
    "prompts": ("calibration",),
    "samples": ("calibration",),
    "tasks": ("task calibration", "verification"),
    "seed": ("task calibration", "verification"),
    "filter_rule": ("decode",),
    "filter_layers": ("given layers",),
    "decode_budget": ("decode",),
    "decode_loss": ("loss bound",),
    "offload": ("decode",),
    "max_accuracy_drop": ("verification",),
    "max_kl": ("verification",),
    "verify_samples": ("verification",),
    "verify_lengths": ("verification",),
    "batch": ("verification",),
    "prefill_chunk": ("verification",),
    "backend": ("calibration", "device cost", "verification"),
    "device": ("calibration", "device cost", "verification"),
    "dtype": ("calibration", "device cost", "verification"),
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


SWITCHES = (
    Switch("profile", ("search", "calibration", "task calibration"), "a profile brings what it was made with"),
    Switch("prompts", ("task calibration",), "own prompts take the place of tasks"),
    Switch("cost", ("device cost",), "the device was measured already"),
    Switch("preset", ("density target", "speedup target"), "the preset has a target of its own", ("minference",)),
    Switch("target_speedup", ("density target",), "each is a target"),
    Switch("only", ("decode", "loss bound", "given layers"), "only prefill is planned", ("prefill",)),
    Switch("only", ("prefill", "search", "density target", "speedup target"), "only decode is planned", ("decode",)),
    Switch("filter_rule", ("given layers",), "this rule finds the layers itself", ("dp", "omnikv")),
    Switch("filter_rule", ("loss bound",), "this rule has no bound on what is lost", ("omnikv", "fixed")),
    Switch("filter_layers", ("loss bound",), "layers that are given have no bound on what is lost"),
    Switch("no_verify", ("verification",), "nothing is verified"),
)

_NO_FLAG = ("levels", "row_stride", "verify_lengths")


def check_used(given: Mapping[str, object]) -> None:
    """Refuses an option that nothing would read.

    Args:
        given: the options that were asked for, by name, and their values; not those left at their defaults.

    Raises:
        UsageError: naming the option, and those that leave out whatever would read it.
    """
    on = [switch for switch in SWITCHES if switch.is_on(given)]
    for name in given:
        against = [_against(name, part, on) for part in READ_BY.get(name, ())]
        if against and None not in against:
            raise UsageError(_refusal(name, list(dict.fromkeys(switch for switch in against if switch)), given))


def check_options(options: PlanOptions) -> None:
    """`check_used`, as far as fields tell what was asked for. A phase that is left out, or a verification that is,
    contradicts nothing here: programs build their options in parts.

    Raises:
        UsageError: a field would be dropped.
    """
    check_used(_asked(options))


def check_profile(options: PlanOptions, profile: Profile) -> None:
    """Refuses options that contradict a profile which was made earlier, or ask for what is not in it.

    Raises:
        UsageError: naming the option.
    """
    asked = _asked(options)
    facts: dict[str, Any] = {"tile": profile.tile, "preset": profile.preset, "samples": profile.samples, "prompts": ()}
    for name, found in facts.items():
        if name in asked and asked[name] != found:
            raise UsageError(
                f"expected {_flag(name)} as in the profile ({found or 'none'}), found {asked[name]!r:.80}; leave it "
                "out, or profile again (leave --profile out)"
            )
    targets = [_flag(name) for name in ("target_density", "target_speedup") if name in asked]
    if profile.preset and targets:
        raise UsageError(
            f"expected no {targets[0]} beside --profile of a search with --preset {profile.preset}, which has a target "
            "of its own; leave it out, or profile again without the preset"
        )
    _check_parts(options, profile)


def _check_parts(options: PlanOptions, profile: Profile) -> None:
    held = {
        "prefill": any(entry.layers for entry in profile.lengths),
        "decode": any(entry.reuse for entry in profile.lengths),
    }
    missing = [phase for phase in options.phases if not held[phase]]
    if missing:
        usable = [phase for phase in options.phases if held[phase]]
        advice = f"add --only {usable[0]}, or profile again" if usable else "profile again"
        raise UsageError(
            f"expected a profile of {' and '.join(options.phases)}, found none of {missing[0]}; {advice} "
            "(leave --profile out)"
        )
    searched = {candidate.family for entry in profile.lengths for candidate in entry.candidates}
    unknown = [family for family in options.families if family not in searched]
    if "families" in _asked(options) and "prefill" in options.phases and unknown:
        raise UsageError(
            f"expected --families among those of the profile ({', '.join(sorted(searched))}), found "
            f"{', '.join(unknown)}; leave them out, or profile again (leave --profile out)"
        )


def _asked(options: PlanOptions) -> dict[str, object]:
    """The fields that differ from their defaults, as far as that tells what was asked for."""
    if options.is_settled:
        return {}
    values = {field.name: (getattr(options, field.name), _default(field)) for field in fields(options)}
    unread = ("phases", "gate", *(["verify_samples"] if options.verify_samples == 0 else []))
    return {name: value for name, (value, default) in values.items() if value != default and name not in unread}


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _against(name: str, part: str, on: list[Switch]) -> Switch | None:
    return next((switch for switch in on if switch.name != name and part in switch.leaves_out), None)


def _refusal(name: str, against: list[Switch], given: Mapping[str, object]) -> str:
    others = [_flag(switch.name, given[switch.name] if switch.values else None) for switch in against]
    reasons = "; ".join(dict.fromkeys(switch.because for switch in against))
    if len(others) == 1:
        return f"expected {_flag(name)} or {others[0]}, found both: {reasons}; leave one out"
    listed = f"{', '.join(others[:-1])} and {others[-1]}"
    return f"expected no {_flag(name)} beside {listed}, found it: nothing would read it ({reasons}); leave one out"


def _flag(name: str, value: object = None) -> str:
    flag = name if name in _NO_FLAG else f"--{name.replace('_', '-')}"
    return flag if value is None else f"{flag} {value}"

"""`sparsekv plan`: profile a model and compile its plan."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, OwnMethods, Subject, settings_of
from sparsekv.cli.output import emit_json, emit_verdict, tell
from sparsekv.cli.plan_files import PlanFiles, outcomes_beside, own_prompts
from sparsekv.planner.flags import Flag, Key, Unread
from sparsekv.planner.options import DecodeSearch, Hardware, PlanOptions, Search
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import GateError
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import to_data

if TYPE_CHECKING:
    from sparsekv.planner.job import Job
    from sparsekv.planner.plan import PlanResult
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.planner.progress import Progress

_HOW_SPARSE = "all sparse choices lost more than --loss or missed the test: a larger --loss leaves more of it sparse"
_PROFILED = ("preset", "calibration_samples", "prompts_file")
_MACHINE = (*Hardware.model_fields, "device_map")


class PlanFlags(PlanFiles, PlanOptions, OwnMethods, Output):
    group: ClassVar = "Verification"
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(_PROFILED, "a profile brings what it was made with", ("profile",)),
        Unread(("verify", "require_verified"), "nothing is verified", ("no_verify",)),
        Unread(("require_verified",), "nothing is verified", (("verify", "none"),)),
        Unread(_MACHINE, "no model runs", ("profile", "no_verify"), without=("retain",)),
        Unread(DecodeSearch.model_fields, "only prefill is planned", (("phases", ("prefill",)),)),
        Unread((*Search.model_fields, "target_density"), "only decode is planned", (("phases", ("decode",)),)),
    )
    no_verify: Annotated[bool, Flag("As --verify none: leave the plan unverified.")] = False
    require_verified: Annotated[bool, Key("Exit 1 where the plan that is written is not verified.", "true")] = False

    @property
    def needs_model(self) -> bool:
        return not self.profile or self.verifies or self.retain is not None

    @property
    def verifies(self) -> bool:
        return not self.no_verify and self.verify != "none"

    @property
    def options(self) -> PlanOptions:
        given = {name: getattr(self, name) for name in self.model_fields_set & set(PlanOptions.model_fields)}
        given |= {"prompts": own_prompts(self.prompts_file)} if self.prompts_file else {}
        given |= {"verify": "none"} if self.no_verify else {}
        return PlanOptions(**given | {"backend": settings_of(self).backend})


def plan(flags: PlanFlags) -> None:
    """Profile a model, choose what each head computes, verify it on held-out prompts, and write the plan.

    A plan that loses too much is replaced by a denser one, at last by a dense one. Its status says whether it passed
    its test.
    """
    started = time.monotonic()
    resolve_model(flags.model)  # before the files: where there is no model, a plan finds no folder of it either
    flags.check_files()
    wanted, subject = flags.options, Subject(flags.model)
    profile = _profile(flags, wanted)
    if flags.needs_model:
        subject = subject.checked(flags, wanted.lengths)
    flags.register_methods()
    # Imports torch and transformers, which takes seconds: what is wrong with the call was said by now.
    from sparsekv.planner.plan import compile_plan
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.records import only_run

    progress = BarProgress()
    with nullcontext() if flags.profile else only_run(flags.resume), flags.telling_what_is_saved():
        job = _job(flags, wanted, subject, profile, progress)
        result = compile_plan(
            job,
            profile_out=flags.profile_out,
            resume=flags.resume,
            outcomes=outcomes_beside(flags.file),
            progress=progress,
        )
        write_plan(result.plan, flags.file)
        outcomes_beside(flags.file).unlink(missing_ok=True)
        if not flags.profile:
            flags.resume.unlink(missing_ok=True)
    _tell(result, flags, time.monotonic() - started)


def _profile(flags: PlanFlags, wanted: PlanOptions) -> Profile | None:
    from sparsekv.planner.profile.profile_data import Profile, for_profile
    from sparsekv.planner.records import read_measured

    if flags.profile is None:
        return None
    profile = read_measured(Profile, flags.profile)
    for_profile(wanted, profile)
    return profile


def _job(flags: PlanFlags, wanted: PlanOptions, subject: Subject, profile: Profile | None, progress: Progress) -> Job:
    from sparsekv.planner.job import check_plannable, job_of, job_of_profile

    if profile and not flags.needs_model:
        return job_of_profile(flags.model, wanted, profile)
    longest = max(wanted.lengths, default=0)
    loaded = subject.load(flags, lambda info, kind: check_plannable(info, wanted, kind, profile), longest)
    return job_of(loaded, wanted, profile, progress)


def _tell(result: PlanResult, flags: PlanFlags, seconds: float) -> None:
    from sparsekv.plans.brief import next_command, verdict

    plan, out, remarks = result.plan, flags.file, list(result.remarks)
    is_unproven = flags.verifies and plan.status != "verified"  # the first remark says why
    reason = remarks.pop(0) if is_unproven else ""
    for remark in (*([reason] if reason and not plan.quality and not plan.is_dense else ()), *remarks):
        tell(remark)
    if flags.as_json:
        tell(reason or f"{out}: {plan.status_text}")
    else:
        lines = verdict(plan, str(out), model=flags.model)
        emit_verdict((f"{out}, written in {seconds:.0f} s: {plan.status_text}", *lines[1:]), plan.status)
    facts = _facts(result, out, seconds)
    if flags.require_verified and is_unproven:
        further = f"go on with `{next_command(plan, str(out), flags.model)}`"
        raise GateError(
            f"expected a verified plan, found {plan.status}: {reason}. {out} is written; "
            f"{_HOW_SPARSE if plan.is_dense else further}"
        ).with_facts(**facts)
    if flags.as_json:
        emit_json(facts)


def _facts(result: PlanResult, out: Path, seconds: float) -> dict[str, Any]:
    quality = result.plan.quality
    return {
        "path": str(out),
        "status": result.plan.status,
        "prefill_density": result.prefill_density,
        "predicted_speedup": result.predicted_speedup,
        "filter_layers": list(result.filter_layers),
        "quality": None if quality is None else to_data(quality),
        "seconds": round(seconds, 3),
    }


app = commands.app(
    plan,
    "sparsekv plan Qwen/Qwen2.5-Coder-0.5B-Instruct -o plan.yaml --lengths 8k,16k,32k",
    "sparsekv plan ./my-model --profile-out model.profile --loss 0.005",
)

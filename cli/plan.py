"""`sparsekv plan`: profile a model and compile its plan."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, settings_of
from sparsekv.cli.output import emit, emit_json, quality_table, tell
from sparsekv.cli.plan_files import PlanFiles
from sparsekv.planner.flags import MOST, Flag
from sparsekv.planner.options import HELD_OUT, DecodeSearch, Gate, Hardware, PlanOptions, Search
from sparsekv.plans.aliases import resolve_model

if TYPE_CHECKING:
    from sparsekv.planner.job import Job
    from sparsekv.planner.plan import PlanResult
    from sparsekv.planner.progress import Progress


class PlanFlags(PlanFiles, PlanOptions, Output):
    """What `plan` is asked to do."""

    model: Annotated[str, Flag("Alias, hub id or folder.", metavar="MODEL", is_argument=True)]
    no_verify: Annotated[bool, Flag("Leave the plan unverified.")] = False
    verify_samples: Annotated[int | None, Field(ge=1, le=MOST), Flag(HELD_OUT, metavar="N")] = None

    @property
    def needs_model(self) -> bool:
        """Whether anything is left to be measured."""
        return not (self.profile and self.cost and self.no_verify)

    @property
    def options(self) -> PlanOptions:
        """How to plan."""
        from sparsekv.cli.prompts import own_prompts

        given = {name: getattr(self, name) for name in self.model_fields_set & set(PlanOptions.model_fields)}
        given |= {"prompts": own_prompts(self.prompts_file)} if self.prompts_file else {}
        given |= {"verify_samples": 0} if self.no_verify else {}
        return PlanOptions(**given | {"backend": settings_of(self).backend})

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.profile:
            own = ("preset", "tile", "samples", "prompts_file")
            self.refuse(own, "a profile brings what it was made with", "profile")
        if self.cost:
            self.refuse(("host",), "the device was measured already", "cost")
        if self.no_verify:
            chunk = () if self.host == "vllm" and not self.cost else ("prefill_chunk",)
            unread = (*Gate.model_fields, "verify_samples", "batch", *chunk)
            self.refuse(unread, "nothing is verified", "no_verify")
        if self.no_verify and self.profile:
            self.refuse(("tasks", "seed"), "no prompts are drawn", "profile", "no_verify")
        if self.no_verify and self.prompts_file:
            self.refuse(("tasks", "seed"), "no tasks are drawn from", "prompts_file", "no_verify")
        if not self.needs_model:
            machine = (*Hardware.model_fields, "device_map")
            self.refuse(machine, "no model runs", "profile", "cost", "no_verify")
        if self.phases == ("prefill",):
            self.refuse(DecodeSearch.model_fields, "only prefill is planned", "phases")
        if self.phases == ("decode",):
            prefill = (*Search.model_fields, "target_density", "target_speedup")
            self.refuse(prefill, "only decode is planned", "phases")
        return self


def plan(flags: PlanFlags) -> None:
    """Profile a model, choose what each head computes, verify it on held-out prompts, and write the plan."""
    started = time.monotonic()  # loading counts
    resolve_model(flags.model)  # before the files: where there is no model, a plan finds no folder of it either
    flags.check_files()
    wanted = flags.options
    # Imports torch, which takes seconds: what is wrong with the options was said by now.
    from sparsekv.planner.plan import compile_plan
    from sparsekv.planner.profile.resume import only_run
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.files import write_plan

    progress = BarProgress()
    with nullcontext() if flags.profile else only_run(flags.resume), flags.telling_what_is_saved():
        result = compile_plan(
            _job(flags, wanted, progress),
            profile_out=flags.profile_out,
            cost_out=flags.cost_out,
            resume=flags.resume,
            progress=progress,
        )
        write_plan(result.plan, flags.out)
        if not flags.profile:
            flags.resume.unlink(missing_ok=True)
    _tell(result, flags.out, flags.as_json, time.monotonic() - started)


def _job(flags: PlanFlags, wanted: PlanOptions, progress: Progress) -> Job:
    """The files that were measured before, and the model where they leave anything to it."""
    from sparsekv.planner.cost.device_cost import DeviceCost
    from sparsekv.planner.data_files import read_measured
    from sparsekv.planner.job import check_plannable, job_of, job_of_files, narrowed
    from sparsekv.planner.profile.profile_data import Profile

    profile = read_measured(Profile, flags.profile) if flags.profile else None
    cost = read_measured(DeviceCost, flags.cost) if flags.cost else None
    if profile and cost and flags.no_verify:
        return job_of_files(flags.model, wanted, profile, cost)
    narrowed(wanted, profile, cost)  # says what is not in the files before a model is looked for
    loaded = Subject(flags.model).load(
        flags, lambda info, hardware: check_plannable(info, wanted, hardware, profile, cost)
    )
    return job_of(loaded, wanted, profile, cost, progress)


def _tell(result: PlanResult, out: Path, as_json: bool, seconds: float) -> None:
    from sparsekv.plans.schema import to_data
    from sparsekv.plans.show import verdict

    quality, remarks = result.plan.quality, list(result.remarks)
    unproven = quality is not None and result.plan.status != "verified"  # the first remark says why
    if as_json:
        emit_json(
            {
                "path": str(out),
                "status": result.plan.status,
                "prefill_density": result.prefill_density,
                "predicted_speedup": result.predicted_speedup,
                "filter_layers": list(result.filter_layers),
                "quality": None if quality is None else to_data(quality),
                "seconds": round(seconds, 3),
            }
        )
    else:
        if quality is not None:
            emit(quality_table(quality) + "\n")
        lines = verdict(result.plan, str(out), remarks.pop(0) if unproven else "")
        emit("\n".join((f"{out}: written in {seconds:.0f} s", *lines)))
    for remark in remarks:
        tell(remark)


app = commands.app(commands.command(plan))

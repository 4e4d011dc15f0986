"""From a model to a plan: profile, refine, decode trials, prices, allocate, filter layers, verify, result.

A plan that misses its test is followed by the next denser one, on fresh prompts: planned for half of what it lost where
it missed. A length that missed in all three goes dense, so that a plan always comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from transformers import PreTrainedTokenizerBase

from sparsekv.kernels.backends import choose_backend
from sparsekv.kernels.tiles import has_triton
from sparsekv.planner.allocate import allocate
from sparsekv.planner.decode_search import measure_trials
from sparsekv.planner.eviction_search import search_eviction
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.fixed_test import RUNGS, level_of_run
from sparsekv.planner.job import Job, head_shape, job_of
from sparsekv.planner.measure_prices import measure_prices
from sparsekv.planner.options import PlanArguments, PlanOptions, Settled, lengths_up_to
from sparsekv.planner.predict import predict
from sparsekv.planner.prices import Prices, shipped_prices
from sparsekv.planner.profile.calibration import mix_of
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.progress import Progress
from sparsekv.planner.records import digest_of, versions, write_measured
from sparsekv.planner.refine import refine
from sparsekv.planner.sharing_search import SharingSearch
from sparsekv.planner.verify import AnyModel, VerifyRun, loaded_from, verify
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import INDEXED, ModelInfo
from sparsekv.plans.phases import Eviction
from sparsekv.plans.schema import NOTHING_SPARSE, Plan, Prediction, Provenance, Target
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.describe import config_of
from sparsekv.runtime.model_config import device_name, has_soft_cap
from sparsekv.runtime.plan_checks import warn_of_spinning

_USED_UP = "earlier plans saw all {} prompts that were set aside; give more --prompts"


def plan_model(
    model: AnyModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[PlanArguments],
) -> Plan:
    """Profiles a model, chooses what each head computes, and verifies that on held-out prompts.

    Args:
        model: an alias, hub id, folder or GGUF file, a `LoadedModel`, or a Hugging Face model together with its
            tokenizer.
        progress: where to report the stages, which take minutes; `sparsekv.planner.progress.BarProgress()` shows them
            on standard error, None nowhere.
        **options: see [PlanOptions](#planoptions).

    Returns:
        The plan; write it with `write_plan`. Its status says whether it passed its test on held-out prompts; lengths at
        which every plan missed it are dense.

    Raises:
        GateError: the model gives numbers that are not finite.
        SparseKVError: of the other kinds, for what cannot be planned.
    """
    asked = PlanOptions(**cast(dict[str, Any], options))
    loaded = loaded_from(model, tokenizer, asked)
    warn_of_spinning(loaded.model.device)
    return compile_plan(job_of(loaded, asked, progress=progress), progress=progress).plan


def compile_plan(
    job: Job,
    *,
    profile_out: Path | None = None,
    resume: Path | None = None,
    outcomes: Path | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Profiles, measures, chooses and verifies, as far as the job leaves it to be done.

    Args:
        profile_out: where to write the profile.
        resume: a file for what is profiled, from which an interrupted run goes on; the caller removes it once the
            plan is written.
        outcomes: the same of a test under way.
        progress: where to report.

    Raises:
        GateError: the model gives numbers that are not finite.
        UsageError, PromptError, BackendError: prompts do not fit, or the profile does not reach the targets.
    """
    progress = progress or Progress()
    if job.model.model_type in INDEXED:
        if profile_out is not None:
            raise UsageError("expected no --profile-out for a model with indexers, found one; leave it out")
        return _sharing(job, progress, outcomes)
    measured = job.profile or _profiled(job, progress, resume)
    if profile_out is not None:
        write_measured(job.given or measured, profile_out)
    cost = _prices(job, measured, progress)
    kv_cache, told = search_eviction(job, progress) if job.options.retain is not None else ((), ())
    compiled = partial(compile_once, job.model, measured=measured, cost=cost, progress=progress, kv_cache=kv_cache)
    result = _verified(job, compiled, progress, outcomes)
    remarks = (
        *result.remarks,
        *told,
        *denser_remarks(result.options),
        *plan_remarks(result.plan, result.options, measured),
        *job.remarks,
    )
    return replace(result, plan=_with_device(result.plan, job, measured), remarks=remarks)


def _sharing(job: Job, progress: Progress, outcomes: Path | None) -> PlanResult:
    """The plan of a model with indexers, of which nothing is made faster but by fewer of them."""
    with SharingSearch.on(job, progress) as search:
        result = _verified(job, search.plan, progress, outcomes)
    return replace(result, remarks=(*result.remarks, *denser_remarks(result.options), *job.remarks))


def _profiled(job: Job, progress: Progress, resume: Path | None) -> Profile:
    """Everything that needs the model: what candidates do, what whole plans do, what decode segments do."""
    measured = profile(job, progress, resume)
    return measure_trials(job, refine(job, measured, progress), progress)


def _prices(job: Job, measured: Profile, progress: Progress) -> Prices:
    options, shape = job.options, head_shape(job.model)
    if job.loaded is None or job.loaded.model.device.type != "cuda" or not has_triton():
        return shipped_prices(shape)
    model = job.loaded.model
    return measure_prices(
        shape,
        options.lengths,
        device=model.device,
        dtype=model.dtype,
        tile=measured.tile,
        families=options.families,
        backend=_backend(job, measured),
        float8=options.kv_dtype == "fp8",
        progress=progress,
    )


def _backend(job: Job, measured: Profile) -> str:
    model, head_dim = job.subject.model, head_shape(job.model).head_dim
    capped = has_soft_cap(config_of(model))
    return choose_backend(model.device, model.dtype, head_dim, job.options.backend, measured.tile, capped).name


def _with_device(plan: Plan, job: Job, measured: Profile) -> Plan:
    """The plan with the device that the model was on, which may be another than that of an earlier profile."""
    if job.loaded is None:
        return plan
    here = {"device": device_name(job.loaded.model.device), "backend": _backend(job, measured)}
    return plan.model_copy(update={"targets": tuple(one.model_copy(update=here) for one in plan.targets)})


def _verified(
    job: Job, compiled: Callable[[Settled], Plan], progress: Progress, outcomes: Path | None = None
) -> PlanResult:
    """The first plan that passes its test, or has nothing sparse; one plan, unverified, where nothing is verified.

    A length that missed three times is dense. The last run, behind those of `RUNGS`, counts as the second on one plan.
    What layers keep was asked for in bytes and stays: only the phases that are planned are made denser.
    """
    used, levels = job.options, (*((1, level) for level in RUNGS), (2, level_of_run(2)))
    plan = compiled(used)
    if job.kit is None:
        return PlanResult(plan, used)
    lost: dict[int, list[str]] = defaultdict(list)
    said: tuple[str, ...] = ()
    for attempt, (number, level) in enumerate(levels):
        held_out = job.held_out and job.held_out.part(attempt)
        if plan.is_dense or (job.held_out and not held_out):
            said = (NOTHING_SPARSE if plan.is_dense else _USED_UP.format(job.held_out.count if job.held_out else 0),)
            break
        run = VerifyRun("full" if used.verify == "full" else "small", number, level, outcomes)
        last = verify(job.subject, plan, used, run, progress, job.kit, held_out=held_out)
        plan, said = last.recorded(plan), last.reasons
        for length in last.quality.missed:
            lost[length].append(last.test.worst_at(length))
        stricter = _after(used, last.quality.missed, attempt + 1)
        if stricter == used:
            break
        progress.say(f"the plan missed its test ({last.reasons[0]}); the next one is denser")
        used, plan = stricter, compiled(stricter)
    if plan.is_dense:
        said = (NOTHING_SPARSE,)
    if job.held_out:
        origin = plan.provenance.model_copy(update={"prompts": job.held_out.digest})
        plan = plan.model_copy(update={"provenance": origin})
    return PlanResult(plan, used, (*said, *dense_remarks(used, lost)))


def _after(used: Settled, missed: Collection[int], attempts: int) -> Settled:
    """Options of the plan behind one that missed at some lengths; the same where none follows."""
    if not missed or attempts > len(RUNGS):
        return used
    often = {length for length in missed if used.missed_at(length) == len(RUNGS) - 1}
    return used.dense_at(often).denser({*missed} - often)


def compile_once(
    model: ModelInfo, options: Settled, measured: Profile, cost: Prices, progress: Progress | None = None,
    kv_cache: tuple[Eviction, ...] = (),
) -> Plan:  # fmt: skip
    """One plan from what was measured, unverified: what its heads and layers compute, and what that is predicted to
    cost.

    Args:
        model: what the plan is for, as the profile has it.
        options: settled for the profile.
        kv_cache: what layers keep of a prompt.

    Raises:
        UsageError: the profile does not reach the targets.
    """
    say = progress.say if progress else None
    prefill = allocate(measured, cost, options, say) if "prefill" in options.phases else None
    decode = choose_filter_layers(measured, options) if "decode" in options.phases else None
    stored = None if options.kv_dtype == "auto" else options.kv_dtype
    target = Target(device=measured.device, backend=measured.backend, dtype=measured.dtype, kv_dtype=stored)
    return Plan(
        status="unverified",
        model=model,
        targets=(target,),
        prefill=prefill,
        decode=decode,
        kv_cache=kv_cache or None,
        cost=predict(measured, cost, prefill, decode),
        provenance=_provenance(options, measured, cost),
    )


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan and what is worth telling about it.

    Attributes:
        plan: the plan; its status says whether it passed its test.
        options: of this plan, which may be denser than what was asked for.
        remarks: first what keeps the plan from being verified, then lengths that are dense or denser after a test that
            was missed, heads that run dense, and what could not be predicted.
    """

    plan: Plan
    options: Settled
    remarks: tuple[str, ...] = ()

    @property
    def prefill_density(self) -> float | None:
        """Predicted share of tiles at the longest profiled length; None where prefill is not planned."""
        estimates = [entry.prefill for entry in self._lengths if entry.prefill]
        return estimates[-1].density if estimates else None

    @property
    def predicted_speedup(self) -> float | None:
        """Predicted ratio of dense to sparse attention time, of prefill if planned, at the longest profiled length."""
        estimates = [entry.decode for entry in self._lengths] + [entry.prefill for entry in self._lengths]
        gains = [estimate.gain for estimate in estimates if estimate]
        return gains[-1] if gains else None

    @property
    def filter_layers(self) -> tuple[int, ...]:
        decode = self.plan.decode
        return tuple(segment.filter for segment in decode.lengths[-1].segments) if decode else ()

    @property
    def _lengths(self) -> tuple[Prediction, ...]:
        return self.plan.cost.lengths if self.plan.cost else ()


def _provenance(options: Settled, measured: Profile, cost: Prices) -> Provenance:
    settings: dict[str, Any] = {
        "loss": options.loss,
        "target_density": list(options.target_density) or None,
        "missed": {str(length): times for length, times in options.missed.items()} or None,
        "dense": list(options.dense) or None,
        "decode_budget": options.decode_budget.model_dump(exclude_none=True) if options.retain is None else None,
        "filter_rule": ("fixed" if options.filter_layers else "trials") if options.retain is None else None,
        "retain": options.retain,
    }
    return Provenance(
        versions=versions(),
        preset=measured.preset,
        seed=options.seed,
        calibration=measured.calibration,
        mix=mix_of(measured.tasks, measured.samples),
        profile=digest_of(measured),
        device_cost=digest_of(cost),
        settings={name: value for name, value in settings.items() if value is not None},
    )


def denser_remarks(options: Settled) -> Iterator[str]:
    """A line for each length at which a plan is denser than what was asked for."""
    for length, times in sorted(options.missed.items()):
        if length not in options.dense:
            plans = "a plan" if times == 1 else f"{times} plans"
            yield f"{format_length(length)} is planned for a smaller loss: {plans} missed the test there"


def dense_remarks(options: Settled, lost: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """A line for each length that is dense, with what each plan lost there."""
    for length in options.dense:
        losses = lost.get(length, ())
        yield f"{format_length(length)} is dense: {len(losses)} plans lost too much there ({', then '.join(losses)})"


def plan_remarks(plan: Plan, options: Settled, profile: Profile) -> Iterator[str]:
    """A line for each thing to change about a plan; `options` are those it was compiled with, settled."""
    decode = plan.decode
    if decode and options.offload and decode.offload is None and decode.sparse_layers:
        yield "nothing is offloaded: every sparse layer chooses for itself, and so reads all keys in each step"
    longest, context = profile.lengths[-1].length, profile.model.context_length
    if longest < context:
        wanted = ",".join(map(format_length, lengths_up_to(context, [entry.length for entry in profile.lengths])))
        yield f"contexts above {format_length(longest)} were not profiled; --lengths {wanted} plans them"

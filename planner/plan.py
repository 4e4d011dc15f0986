"""From a model to a plan: profile, refine, decode trials, cost, allocate, filter layers, verify, result.

A plan that misses its gate is tightened and tried again: a larger budget for prefill, allocated anew; for
decode what was tried and diverged less, or, where nothing was tried, first a smaller loss (fewer layers attend to
chosen tokens), then a larger budget.

`compile_files` compiles from a profile and a device cost alone: for another budget, or for another GPU. It needs
neither the weights of the model nor its device. The architecture is checked against the model's config; the weights
cannot be, so the plan carries the fingerprint of the weights that were profiled, and applying it to others warns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsekv.planner.allocate import allocate, check_profiled, with_reached_densities
from sparsekv.planner.cost.device_cost import DeviceCost, HeadShape
from sparsekv.planner.cost.measure import PrefillHost, measure_cost
from sparsekv.planner.cost.predict import predict
from sparsekv.planner.cost.remarks import plan_remarks
from sparsekv.planner.data_files import check_model, digest_of, versions, write_measured
from sparsekv.planner.decode_search import measure_decode, tries_decode
from sparsekv.planner.filter_layers import (
    check_budget,
    check_filters,
    check_trials,
    choose_filter_layers,
    takes_trials,
)
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.calibration import mix_of
from sparsekv.planner.profile.mix import with_tasks
from sparsekv.planner.profile.profile_data import Profile, for_profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.progress import Progress, Stages
from sparsekv.planner.refine import refine, refines
from sparsekv.planner.settled import Settled, settle
from sparsekv.planner.settled import held_out_samples as held_out
from sparsekv.planner.tasks import Split, prepare
from sparsekv.planner.verify import (
    Verification,
    after_a_missed_gate,
    held_out_samples,
    tightened,
    tightened_remarks,
    verify,
)
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, Prediction, Provenance, Target
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel, load_config, load_model
from sparsekv.runtime.model_config import describe_config
from sparsekv.runtime.vllm.engine_facts import check_installed

MOST_ATTEMPTS = 6
_NO_WEIGHTS = "the weights of {name} were not read: the plan is for those that were profiled, and warns on others"
_NO_CONFIG = "{name} cannot be reached and was not checked: the plan is for the model of that name that was profiled"


def plan_model(model: Any, tokenizer: Any = None, **options: Any) -> Plan:
    """Plans a model: `sparsekv.plan_model`.

    Args:
        model: an alias, hub id or folder, a `LoadedModel`, or a Hugging Face model together with its tokenizer.
        **options: fields of `PlanOptions`.

    Returns:
        The plan, verified on held-out prompts; write it with `sparsekv.plans.files.write_plan`.

    Raises:
        GateError: no plan met the gate.
        SparseKVError: of the other kinds, for what cannot be planned.
    """
    asked = PlanOptions(**options)
    return compile_plan(_loaded(model, tokenizer, asked), asked).plan


def compile_plan(
    loaded: LoadedModel,
    options: PlanOptions,
    *,
    profile_in: Profile | None = None,
    cost_in: DeviceCost | None = None,
    profile_out: Path | None = None,
    cost_out: Path | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Profiles, measures, chooses and verifies.

    Args:
        profile_in: an earlier profile, instead of profiling.
        cost_in: an earlier device cost, instead of measuring.
        profile_out, cost_out: where to write the two.
        resume: a file for what is profiled, from which an interrupted run goes on; the caller removes it once the
            plan is written.
        progress: where to report; the stages that will run are numbered.

    Raises:
        GateError: no plan met the gate.
        PlanMismatchError: the profile is of another model.
        UsageError, PromptError, BackendError, UnsupportedError: what was asked for cannot be done.
    """
    started = time.monotonic()
    options, own, host = for_host(options, cost_in), profile_in, None
    if options.host == "vllm" and cost_in is None:
        host = _vllm_host(options, loaded.model.device)
    options = _in_chunks(options, host or cost_in)
    if profile_in is not None:
        check_model(profile_in, loaded.info)
        options, own = for_profile(options, profile_in)  # of the lengths that are asked for
    asked = settle(options, loaded.info.context_length, loaded.model.device.type)
    _check(loaded.info, asked, own, cost_in)
    if asked.verify_samples or not (own or asked.prompts):
        asked = with_tasks(loaded, asked, own.tasks if own else (), progress)
        asked = asked.but(verify_samples=held_out(options, asked.tasks, loaded.model.device.type))
    kit = None
    if asked.verify_samples:
        kit = prepare(loaded.tokenizer, Split.EVALUATION)
        held_out_samples(asked).check_fit(kit)
    stages = Stages(progress, _stages(loaded.info, asked, own, cost_in))
    measured = own or _profiled(loaded, asked, stages, resume)
    asked = with_reached_densities(asked, measured)
    if profile_out is not None:
        write_measured(profile_in or measured, profile_out)
    cost = cost_in or measure_cost(
        _head_shape(loaded.info),
        asked.lengths,
        device=loaded.model.device,
        dtype=loaded.model.dtype,
        tile=measured.tile,
        families=asked.families,
        backend=asked.backend,
        offload=asked.offload and "decode" in asked.phases,
        host=host,
        progress=stages,
    )
    if cost_out is not None:
        write_measured(cost, cost_out)
    used, attempts, verdict = asked, 0, None
    plan = compile_once(loaded.info, used, measured, cost, stages)
    while kit is not None:
        anywhere = plan.model_copy(update={"targets": ()})  # the warning of another host or device is not for here
        verdict, attempts = verify(loaded, anywhere, used, stages, kit), attempts + 1
        if verdict.passed:
            plan = verdict.recorded(plan)
            break
        used = _tightened(used, measured, verdict, attempts)
        stages.say(
            f"the plan missed its gate in {'; '.join(verdict.reasons)}; a stricter one is tried, "
            f"{attempts + 1} of at most {MOST_ATTEMPTS}"
        )
        plan = compile_once(loaded.info, used, measured, cost, stages)
    remarks = (
        *(verdict.reasons if verdict else ()),
        *tightened_remarks(asked, used, measured),
        *plan_remarks(plan, used, measured, cost),
    )
    return PlanResult(plan, time.monotonic() - started, attempts, remarks)


def _stages(
    model: ModelInfo, options: Settled, profile_in: Profile | None, cost_in: DeviceCost | None
) -> tuple[str, ...]:
    """Those that will run, in order, of options that are settled."""
    runs = {
        "profile": profile_in is None,
        "refine": profile_in is None and refines(options),
        "decode trials": profile_in is None and tries_decode(model, options),
        "cost": cost_in is None,
        "allocate": "prefill" in options.phases,
        "filter layers": "decode" in options.phases,
        "evaluate": bool(options.verify_samples),
    }
    return tuple(name for name, is_needed in runs.items() if is_needed)


def for_host(options: PlanOptions, cost: DeviceCost | None) -> PlanOptions:
    """The options for the host that a device cost was measured for, where there is one. vLLM runs decode dense: only
    prefill is planned for it.

    Raises:
        UsageError: decode alone is to be planned for vLLM, or something is asked of decode there.
    """
    asked = options if cost is None else options.but(host=cost.host)
    if asked.host != "vllm":
        return asked
    return asked.but(phases=("prefill",))


def _vllm_host(options: PlanOptions, device: torch.device) -> PrefillHost:
    from sparsekv.planner.cost.vllm_host import VllmHost

    return VllmHost(options.prefill_chunk, device)


def _in_chunks(options: PlanOptions, measured: PrefillHost | DeviceCost | None) -> PlanOptions:
    """Verification cuts prompts as what was measured does: what a plan keeps depends on the cuts."""
    if measured is None or options.prefill_chunk is not None:
        return options
    return options.but(prefill_chunk=measured.chunk)


def _profiled(loaded: LoadedModel, options: Settled, stages: Progress, resume: Path | None) -> Profile:
    """Everything that needs the model: what candidates do, what whole plans do, what decode segments do."""
    kit = None if options.prompts else prepare(loaded.tokenizer, Split.CALIBRATION)
    measured = refine(loaded, profile(loaded, options, stages, resume, kit), options, stages, kit)
    return measure_decode(loaded, measured, options, stages, kit=kit)


def check_plannable(
    model: ModelInfo, options: PlanOptions, device_type: str, profile_in: Profile | None, cost_in: DeviceCost | None
) -> None:
    """Finds out what `compile_plan` refuses of a model from its description alone, before its weights are read.

    Raises:
        PlanMismatchError, UsageError: see `compile_plan`.
    """
    options, own = for_host(options, cost_in), profile_in
    if options.host == "vllm" and cost_in is None:
        check_installed()
    if profile_in is not None:
        check_model(profile_in, model, weights=False)
        options, own = for_profile(options, profile_in)
    _check(model, settle(options, model.context_length, device_type), own, cost_in)


def compile_files(
    name: str,
    options: PlanOptions,
    measured: Profile,
    cost: DeviceCost,
    *,
    profile_out: Path | None = None,
    cost_out: Path | None = None,
) -> PlanResult:
    """Compiles a plan and leaves it unverified: verifying would run the model.

    Args:
        name: the model: an alias, hub id or folder.
        options: what to plan, with `verify_samples` 0.
        profile_out, cost_out: where to write the two again.

    Raises:
        PlanMismatchError: the profile is of another architecture.
        UsageError, GateError: the profile does not reach what was asked for, or there is no such model.
    """
    started = time.monotonic()
    if options.verify_samples != 0:
        raise UsageError("expected no verification without the model's weights, found some; leave it out, or load it")
    told = _checked(name, measured)
    asked, own = for_profile(for_host(options, cost), measured)
    settled = settle(asked, measured.model.context_length, "cpu" if cost.backend == "cpu" else "cuda")
    _check(measured.model, settled, own, cost)
    settled = with_reached_densities(settled, own)
    plan = compile_once(measured.model, settled, own, cost)
    if profile_out is not None:
        write_measured(measured, profile_out)
    if cost_out is not None:
        write_measured(cost, cost_out)
    return PlanResult(plan, time.monotonic() - started, 0, (*plan_remarks(plan, settled, own, cost), told))


def compile_once(
    model: ModelInfo, options: Settled, measured: Profile, cost: DeviceCost, progress: Progress | None = None
) -> Plan:
    """One plan from what was measured, unverified: what its heads and layers compute, and what that is predicted to
    cost.

    Args:
        model: what the plan is for, as the profile has it.
        options: settled for the profile.

    Raises:
        UsageError, GateError: the profile does not reach the targets.
    """
    stages = progress or Progress()
    prefill = decode = None
    if "prefill" in options.phases:
        with stages.stage("allocate", total=1) as step:
            prefill = allocate(measured, cost, options, stages.say)
            step.advance()
    if "decode" in options.phases:
        with stages.stage("filter layers", total=1) as step:
            decode = choose_filter_layers(measured, cost, options)
            step.advance()
    return Plan(
        status="unverified",
        model=model,
        targets=(Target(device=cost.device, host=cost.host, backend=cost.backend, dtype=cost.dtype, chunk=cost.chunk),),
        prefill=prefill,
        decode=decode,
        cost=predict(measured, cost, prefill, decode),
        provenance=_provenance(options, measured, cost),
    )


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan and what is worth telling about it.

    Attributes:
        plan: the plan; verified unless that was left out, or the gate had nothing to hold against it.
        seconds: of the whole run.
        attempts: plans that were verified, the last one included.
        remarks: what to know about the verification, what was given up to meet the gate, heads that run dense, and
            what could not be predicted.
    """

    plan: Plan
    seconds: float
    attempts: int
    remarks: tuple[str, ...]

    @property
    def prefill_density(self) -> float | None:
        """Predicted share of tiles at the longest profiled length; None where prefill is not planned."""
        estimates = [entry.prefill for entry in self._lengths if entry.prefill]
        return estimates[-1].density if estimates else None

    @property
    def predicted_speedup(self) -> float | None:
        """Predicted ratio of dense to sparse attention time, of prefill if planned, at the longest profiled length."""
        for phase in ("prefill", "decode"):
            estimates = [getattr(entry, phase) for entry in self._lengths if getattr(entry, phase)]
            if estimates:
                return float(estimates[-1].dense_us / max(estimates[-1].sparse_us, 1e-9))
        return None

    @property
    def filter_layers(self) -> tuple[int, ...]:
        """The filter layers of the longest bucket."""
        decode = self.plan.decode
        return tuple(segment.filter for segment in decode.lengths[-1].segments) if decode else ()

    @property
    def _lengths(self) -> tuple[Prediction, ...]:
        return self.plan.cost.lengths if self.plan.cost else ()


def _check(model: ModelInfo, asked: Settled, own: Profile | None, cost: DeviceCost | None) -> None:
    """What can be found out before anything is measured.

    Args:
        asked: settled.
        own, cost: the profile and the device cost where they are given.

    Raises:
        UsageError: the model has nothing to plan, or lacks a layer, or what is given does not go with the options.
    """
    if not model.full_layers:
        windows = ", ".join(sorted({str(group.window) for group in model.attention}))
        raise UsageError(
            f"expected a model with layers of full attention, found that each layer of {model.id} attends to "
            f"a window of {windows:.200} tokens: there is nothing to make sparse; run it without a plan"
        )
    if "decode" in asked.phases:
        check_filters(model, asked)
        if own is not None:
            check_budget(own, asked)
            check_trials(own, asked)
    if "prefill" in asked.phases and own is not None and asked.target_speedup is None:
        check_profiled(own, asked)
    if cost is not None:
        check_cost(cost, model, asked)


def check_cost(cost: DeviceCost, model: ModelInfo, options: Settled) -> None:
    """Refuses prices that are not of this model's heads and these tiles, or lack a family of the plan.

    Raises:
        UsageError: naming what differs.
    """
    expected, found = (_head_shape(model), options.tile), (cost.shape, cost.tile)
    if expected != found:
        raise UsageError(
            f"expected a device cost measured for {expected[0]!r} and {expected[1]!r}, found {found[0]!r} and "
            f"{found[1]!r}; measure again (leave --cost out)"
        )
    missing = [family for family in options.families if family not in cost.index]
    if missing and "prefill" in options.phases:
        raise UsageError(
            f"expected a device cost with prices of {', '.join(options.families)}, found none of {', '.join(missing)}; "
            f"measure again with the same --families (leave --cost out), or leave {missing[0]} out of --families"
        )


def _tightened(options: Settled, measured: Profile, verdict: Verification, attempts: int) -> Settled:
    stricter = tightened(options, measured, verdict.missed)
    if stricter is None or attempts == MOST_ATTEMPTS:
        raise GateError(
            f"expected a plan that keeps the accuracy of dense, found none in {attempts} attempts; the last one missed "
            f"it in {'; '.join(verdict.reasons)}. {after_a_missed_gate(options, set(verdict.missed))}"
        )
    return stricter


def _head_shape(model: ModelInfo) -> HeadShape:
    group = model.group_of(model.full_layers[0])
    return HeadShape(heads=group.heads, kv_heads=group.kv_heads, head_dim=group.head_dim)


def _provenance(options: Settled, measured: Profile, cost: DeviceCost) -> Provenance:
    by_trials, by_loss = takes_trials(measured, options), not options.filter_layers
    settings: dict[str, Any] = {
        "target_density": list(options.target_density),
        "target_speedup": options.target_speedup,
        "crossover": options.crossover,
        "decode_budget": options.decode_budget.model_dump(exclude_none=True),
        "decode_loss": options.loss_bound if by_loss and not by_trials else None,
        "decode_kl": options.decode_bound if by_trials else None,
        "filter_rule": "dp" if by_loss else "fixed",
        "max_accuracy_drop": options.gate.max_accuracy_drop,
        "max_kl": {phase: options.gate.kl_bound(phase) for phase in ("prefill", "decode", "both")},
        "min_agreement": options.gate.min_agreement,
        "min_exact": options.gate.min_exact,
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


def _loaded(model: Any, tokenizer: Any, options: PlanOptions) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str | Path):
        return load_model(model, device=options.device, dtype=options.dtype, device_map=options.device_map)
    if tokenizer is None:
        raise UsageError("expected the tokenizer of a model that is loaded already, found none; pass tokenizer=")
    return LoadedModel(model, tokenizer, describe_model(model))


def _checked(name: str, measured: Profile) -> str:
    """Compares the model of that name with the profile's, as far as can be told; a remark on how far that is."""
    source = resolve_model(name)
    try:
        config = load_config(source)
    except UsageError:
        if source.path_or_id != measured.model.id:
            raise
        return _NO_CONFIG.format(name=name)
    check_model(measured, describe_config(config, source.path_or_id), weights=False)
    return _NO_WEIGHTS.format(name=name)

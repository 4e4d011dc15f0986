"""A plan to be made: the model, options with nothing left open, the samples, and what was measured before.

A job is made at one of two doors, where everything is checked that can be found out before anything is measured. With
a model, `job_of`; from a profile alone, for another budget, `job_of_profile`, which needs neither the weights of the
model nor its device. The architecture is checked against the model's config; the
weights cannot be, so the plan carries the fingerprint of the weights that were profiled, and applying it to others
warns. A model is calibrated and verified on the tasks that say something about it, found out here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch

from sparsekv.kernels.methods import EvictionScore, PrefillRule, method_of
from sparsekv.planner.evaluation import EvalSamples
from sparsekv.planner.evaluation.batches import batches, prompt_step
from sparsekv.planner.evaluation.given import HeldOut
from sparsekv.planner.evaluation.predictions import answered, prefill
from sparsekv.planner.filter_layers import check_filters
from sparsekv.planner.options import KNOWN_FAMILIES, DecodeSearch, PlanOptions, Search, Settled, set_aside, settle
from sparsekv.planner.prices import HeadShape
from sparsekv.planner.profile.calibration import Calibration, CalibrationPrompt, held_out
from sparsekv.planner.profile.profile_data import Profile, check_model, for_profile
from sparsekv.planner.progress import Progress
from sparsekv.planner.tasks import HARD_TASKS, QUOTE_TASKS, RETRIEVAL_TASKS, TASKS, Kit, Split, prepare
from sparsekv.planner.verify_cells import tasks_tested
from sparsekv.plans.aliases import ALIASES, resolve_model
from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError
from sparsekv.plans.model import INDEXED, ModelInfo
from sparsekv.plans.patterns import PATTERNS
from sparsekv.plans.phases import RECENT
from sparsekv.runtime.hf.dequantise import is_dequantised
from sparsekv.runtime.hf.describe import takes_one_piece
from sparsekv.runtime.hf.load import LoadedModel, load_config
from sparsekv.runtime.model_config import describe_config, quantisation_of

_NO_WEIGHTS = "the weights of {name} were not read: the plan is for those that were profiled, and warns on others"
_NO_CONFIG = "{name} cannot be reached and was not checked: the plan is for the model of that name that was profiled"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The input of every stage of planning, beside the results of earlier stages.

    Attributes:
        loaded: the model itself, with nothing applied to it; None where a profile is all there is.
        kit: what held-out samples are drawn from; None where nothing is verified.
        held_out: the caller's prompts that were set aside, to verify on in their place.
        given: an earlier profile, whole; `profile` is that of the lengths that are planned.
    """

    model: ModelInfo
    options: Settled
    loaded: LoadedModel | None = None
    calibration: Calibration | None = None
    kit: Kit | None = None
    given: Profile | None = None
    profile: Profile | None = None
    remarks: tuple[str, ...] = ()
    held_out: HeldOut | None = None

    @property
    def subject(self) -> LoadedModel:
        assert self.loaded is not None, "a job from a profile verifies nothing"
        return self.loaded

    @property
    def prompts(self) -> dict[int, tuple[CalibrationPrompt, ...]]:
        samples_at = self.options.samples_at
        return {length: self.calibration_prompts(length, samples_at(length)) for length in self.options.lengths}

    @property
    def step(self) -> int | None:
        """Most tokens of a calibration prompt at once, as in the test of the plan; a preset has whole ones."""
        options = self.options
        cuts = options.retain is None and not options.offload and options.preset is None
        return prompt_step(self.model.model_type, cuts, options.prefill_chunk)

    def calibration_prompts(self, length: int, samples: int) -> tuple[CalibrationPrompt, ...]:
        assert self.calibration is not None, "a job from a profile has no prompts"
        return self.calibration.prompts(length, samples)


def job_of(
    loaded: LoadedModel, options: PlanOptions, profile: Profile | None = None, progress: Progress | None = None
) -> Job:
    _check_sharing(loaded.info, options)
    if profile is not None:
        check_model(profile, loaded.info)
    else:
        _check_gradients(loaded, options)
    asked, own = for_profile(options, profile) if profile else (options, None)
    verifies = asked.verify != "none"
    calibrated, aside = set_aside(asked.prompts) if verifies else (asked.prompts, ())
    if aside:
        asked = asked.but(prompts=calibrated)
    settled = settle(asked, loaded.info.context_length, loaded.model.device.type)
    _check(loaded.info, settled, own)
    held_out = HeldOut.of(loaded.tokenizer, calibrated, aside, settled) if aside else None
    if verifies or not settled.prompts:  # behind a profile, too: eviction is tried out, and buckets timed, on prompts
        settled = with_tasks(loaded, settled, own.tasks if own else (), progress)
    kit = prepare(loaded.tokenizer, Split.VERIFICATION) if verifies else None
    if kit is not None:
        tasks = tasks_tested(loaded.info.model_type, evicts=settled.retain is not None)
        EvalSamples(tasks, settled.lengths).check_fit(kit)
    texts = tuple(prompt.text for prompt in settled.prompts)
    calibration = Calibration(loaded.tokenizer, texts, settled.tasks, settled.seed)
    return Job(loaded.info, settled, loaded, calibration, kit, profile, own, held_out=held_out)


def job_of_profile(name: str, options: PlanOptions, profile: Profile) -> Job:
    """A job without its model, which leaves the plan unverified."""
    if options.retain is not None:
        raise UsageError("expected a model to try --retain on, found a profile alone; leave it out, or load it")
    if options.verify != "none":
        raise UsageError("expected no verification without the model's weights, found some; leave it out, or load it")
    remark = _checked(name, profile)
    asked, own = for_profile(options, profile)
    settled = settle(asked, profile.model.context_length, "cpu" if profile.backend == "cpu" else "cuda")
    _check(profile.model, settled, own)
    return Job(profile.model, settled, given=profile, profile=own, remarks=(remark,))


def check_plannable(model: ModelInfo, options: PlanOptions, device_type: str, profile: Profile | None) -> None:
    """Refuses a model as `job_of` does, by its description alone, before its weights are read."""
    _check_sharing(model, options)
    if profile is not None:
        check_model(profile, model, weights=False)
    asked, own = for_profile(options, profile) if profile else (options, None)
    _check(model, settle(asked, model.context_length, device_type), own)


def head_shape(model: ModelInfo) -> HeadShape:
    group = model.group_of(model.full_layers[0])
    return HeadShape(heads=group.heads, kv_heads=group.kv_heads, head_dim=group.head_dim)


def _check_sharing(model: ModelInfo, options: PlanOptions) -> None:
    """Refuses options that say what heads, layers and caches of a model without indexers do."""
    names = {*Search.model_fields, *DecodeSearch.model_fields, "target_density", "phases", "kv_dtype"}
    given = [options.flag_of(name) for name in sorted(names) if options.is_given(name)]
    if model.model_type in INDEXED and given:
        raise UsageError(
            f"expected index sharing alone to be planned for {model.model_type!r}, found "
            f"{', '.join(given)}; leave it out"
        )


def _check_gradients(loaded: LoadedModel, options: PlanOptions) -> None:
    """Refuses layers that a caller loaded quantised, through which gradients do not go."""
    quantisation = quantisation_of(loaded.model.config)
    if is_dequantised(quantisation) and "prefill" in options.phases:
        raise UsageError(
            f"expected weights that gradients go through, found a model loaded with those of "
            f"{quantisation['quant_method']}; give its folder or hub id in place of the model: it is dequantised then"
        )


def _check(model: ModelInfo, options: Settled, profile: Profile | None) -> None:
    """Refuses a model or options that cannot be planned, before anything is measured."""
    if not model.full_layers:
        windows = ", ".join(sorted({str(group.window) for group in model.attention}))
        raise UsageError(
            f"expected a model with layers of full attention, found that each layer of {model.id} attends to "
            f"a window of {windows:.200} tokens: there is nothing to make sparse; run it without a plan"
        )
    alone = options.phases == ("prefill",) and options.retain is None and not options.prefill_chunk
    if takes_one_piece(model.model_type) and not alone:
        raise UnsupportedError(
            f"expected prefill alone, of whole prompts, for {model.model_type!r}: in transformers its layers with a "
            "recurrent state begin every pass of several tokens without one, by which trials of decode and prompts in "
            "chunks are measured; plan with --only prefill (phases=('prefill',)), without --prefill-chunk"
        )
    if "decode" in options.phases:
        check_filters(model, options)
    if profile is None:
        for name in (name for name in options.families if name not in PATTERNS):
            method_of(PrefillRule, name, KNOWN_FAMILIES)
    if options.score is not None:
        _check_score(method_of(EvictionScore, options.score))


def _check_score(score: EvictionScore) -> None:
    if score.needs_statistics or score.shares_budget or (score.keeps_observed and score.observe > RECENT):
        raise UsageError(
            f"expected an eviction score without statistics of queries, budgets that heads share or more than {RECENT} "
            f"observed tokens that stay, found {score.name}; `sparsekv compare --phase eviction` alone runs it"
        )


def _checked(name: str, profile: Profile) -> str:
    """Compares the model of that name with the profile's, as far as can be told; a remark on how far that is."""
    try:
        source = resolve_model(name)
        config = load_config(source)
    except UsageError:
        if profile.model.id not in (name, ALIASES.get(name.lower())):
            raise
        return _NO_CONFIG.format(name=name)
    check_model(profile, describe_config(config, source.path_or_id), weights=False)
    return _NO_WEIGHTS.format(name=name)


# A task that is not solved at this length is not solved at longer ones.
_LENGTH = 2048
# Characters of text for so many tokens: enough for every tokenizer, and quick to encode.
_CHARACTERS_PER_TOKEN = 16
_SAMPLES = {"cpu": 2, "cuda": 4}
# Retrieval tasks that are taken at most: on a CPU every task is half a minute of verification at 8K tokens.
_MOST_RETRIEVAL = {"cpu": 2}


def with_tasks(
    loaded: LoadedModel, options: Settled, profiled: tuple[str, ...] = (), progress: Progress | None = None
) -> Settled:
    """The options with their tasks; where none were asked for, quotations, what the model solves, and plain text.

    Args:
        profiled: the tasks that an earlier profile of the model was made with; then nothing is run.
    """
    if options.tasks or profiled:
        return options.but(tasks=options.tasks or profiled)
    length, samples = min(_LENGTH, *options.lengths), _SAMPLES.get(loaded.model.device.type, _SAMPLES["cpu"])
    (progress or Progress()).say("trying out which tasks the model can answer ...")
    kit = prepare(loaded.tokenizer, Split.CALIBRATION, characters=_CHARACTERS_PER_TOKEN * length)
    retrieval = tuple(dict.fromkeys((*HARD_TASKS, *RETRIEVAL_TASKS)))
    most = _MOST_RETRIEVAL.get(loaded.model.device.type, len(retrieval))
    solved = solved_tasks(loaded, kit, retrieval, length, samples, options.seed, most)
    chosen = {*QUOTE_TASKS, *solved, "perplexity"}
    return options.but(tasks=tuple(name for name in TASKS if name in chosen))


def solved_tasks(
    loaded: LoadedModel,
    kit: Kit,
    tasks: tuple[str, ...],
    length: int,
    samples: int,
    seed: int = 0,
    most: int | None = None,
) -> tuple[str, ...]:
    """The tasks of which the unmodified model's greedy answers are right at least half of the time.

    Args:
        tasks: those with right answers; one that does not fit the length is not solved.
        most: later tasks are not tried once so many are solved.
    """
    solved = (task for task in tasks if _is_solved(loaded, kit, task, length, samples, seed))
    return tuple(islice(solved, most))


def _is_solved(loaded: LoadedModel, kit: Kit, task: str, length: int, samples: int, seed: int) -> bool:
    try:
        drawn = list(held_out(kit, task, length, samples, seed))
    except PromptError:
        return False
    right = 0
    for batch in batches(drawn, loaded.model):
        ids_BS = torch.cat([batch.prompt_BS, batch.answer_BA], 1)
        with torch.no_grad():
            logits_BAV = prefill(loaded.model, ids_BS, None, batch.answer_BA.shape[1] + 1).logits_BKV
        right += sum(map(bool, answered(loaded, batch, logits_BAV.argmax(-1))))
        if 2 * right >= samples:
            return True
    return False

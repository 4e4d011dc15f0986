"""`sparsekv compare`: what methods are held to, what is recorded once, and what each method attends to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compared import compare
from planner_profiles import made_up_model, made_up_profile, made_up_reuse
from task_tokenizers import REFERENCE_MODEL
from tiny_plans import decode_plan, drops, every_head, plan_for, segment

from sparsekv.bench import entrants, ruler_suite
from sparsekv.bench.compare import Asked, compare_methods
from sparsekv.bench.compare_file import CompareFile, CompareRun, Held, Sampled, rows, text
from sparsekv.bench.entrants import OURS, Entrants, chosen_methods
from sparsekv.bench.eviction_rules import Evicted, ExpectedAttention, SnapKV, cached_share, observed_prompt
from sparsekv.bench.filter_rules import OmniKV
from sparsekv.bench.published_rules import FlexPrefill, SkipSoftmax, Stem
from sparsekv.bench.selectors import Chosen, Quest, Selecting, TopKByHead
from sparsekv.bench.tile_rules import FlashPrefill, XAttention
from sparsekv.cli.arguments import Subject
from sparsekv.kernels.methods import Layer, PrefillRule, register_file, registry
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.profile.profile_data import LengthProfile
from sparsekv.planner.tasks import Split, prepare
from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.hf.observe import AttentionCall

LENGTH = 1024
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_method.py"
METHODS = {
    "prefill": ("minference", "xattention", "pooled"),
    "decode": ("quest", "omnikv", "page_means"),
    "eviction": ("snapkv", "expected_attention", "key_norm"),
}


@pytest.fixture(scope="module")
def retriever() -> LoadedModel:
    register_file(EXAMPLE)
    return load_model(ModelSource(str(REFERENCE_MODEL)), device="cpu", dtype="float32")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, short_filler: None) -> None:
    tasks = {name: replace(ruler_suite.RULER_SUITE[name], tokens=16) for name in ("niah_single_1",)}
    monkeypatch.setattr(ruler_suite, "SUITES", {"ruler": tasks})
    monkeypatch.setattr(entrants, "_TRIALS", 4)


def plan_of(retriever: LoadedModel, phase: str) -> Plan:
    lines = VerticalSlash(vertical=tokens(64), slash=tokens(96), last_q=64, max_tiles=tokens(512))
    decode = decode_plan(segment(0, tuple(range(1, 7)), 200), segment(7, tuple(range(8, 12)), 200))
    if phase == "eviction":
        return plan_for(retriever.model, None, None, drops(tuple(range(12)), 400, observe=64))
    return plan_for(retriever.model, every_head(retriever.model, lines), decode if phase == "decode" else None)


def entrants_of(retriever: LoadedModel, phase: str) -> Entrants:
    reuse = made_up_reuse(np.random.default_rng(0).uniform(0.5, 1.0, (12, 12)))
    entry = LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=reuse)
    return Entrants(
        loaded=retriever,
        phase=phase,
        names=chosen_methods(phase, METHODS[phase], True),
        plans={OURS: plan_of(retriever, phase)},
        profile=made_up_profile(entry, model=retriever.info),
        tasks=tuple(ruler_suite.SUITES["ruler"].values()),
        tell=lambda line: None,
    )


def file_of(retriever: LoadedModel, phase: str, path: Path | None = None) -> CompareFile:
    asked = {"seed": 0, "samples": 1, "suite": "ruler", "device": "cpu", "backend": "auto"}
    return CompareFile(CompareRun.of(retriever, phase=phase, reference=OURS, **asked), path)


@pytest.mark.parametrize("phase", METHODS)
def test_every_method_is_held_to_the_share_of_the_plan_and_nothing_is_measured_twice(
    phase: str, retriever: LoadedModel, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, asked = file_of(retriever, phase), Asked(lengths=(LENGTH,), samples=1)
    late = replace(asked, deadline=0.0)
    assert not compare_methods(retriever, entrants_of(retriever, phase), late, file)
    assert compare_methods(retriever, entrants_of(retriever, phase), asked, file)
    found = {row.method: row for row in rows(file)}
    assert found.keys() == {"dense", OURS, *METHODS[phase]}
    for name in METHODS[phase]:
        reads_more = name == "omnikv"  # whatever it chooses: few layers follow its filters
        assert found[name].share == pytest.approx(found[OURS].share, abs=0.06) or reads_more, name
        assert found[name].over is not None
        assert (found[name].prefill_seconds is None) == (name in {*METHODS["eviction"], "quest", "page_means"})
    dense = [one for one in file.all(Sampled).values() if one.method == "dense"]
    assert max(one.kl for one in dense) < 1e-6  # of rounding
    assert next(one for one in dense if one.task == "niah_single_1").score == 1.0
    assert "the nearest of" in text(file)
    monkeypatch.setattr(entrants.Entrants, "_fitted", None)
    monkeypatch.setattr(entrants, "searched", None)
    before = dict(file.all(Sampled))
    assert compare_methods(retriever, entrants_of(retriever, phase), asked, file)
    assert file.all(Sampled) == before


def test_minference_is_searched_once_a_length_whatever_it_is_held_to(
    retriever: LoadedModel, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, found = file_of(retriever, "prefill"), plan_of(retriever, "prefill").prefill
    asked: list[int] = []
    monkeypatch.setattr(entrants, "searched", lambda loaded, length, backend: asked.append(length) or found)
    monkeypatch.setattr(Entrants, "_fitted", lambda self, make, target, prompts: make(target))
    methods = replace(
        entrants_of(retriever, "prefill"), names=("minference",), plans={}, profile=None, shares=(0.3, 0.4)
    )
    for _ in "again":
        assert len(methods.at(LENGTH, file)) == 2
    assert asked == [LENGTH]


def test_answers_that_end_before_a_step_tell_nothing_of_what_steps_read(retriever: LoadedModel) -> None:
    file, held = file_of(retriever, "decode"), {"at": "0.4", "length": LENGTH}
    file.add(Held(method=OURS, target=0.4, **held))
    for number, share in enumerate((0.4, None)):
        drawn = {"task": "vt", "number": number, "score": 1.0, "kl": 0.0}
        file.add(Sampled(method="dense", at="1", length=LENGTH, share=1.0, **drawn))
        file.add(Sampled(method=OURS, share=share, **held, **drawn))
    assert {row.method: row.share for row in rows(file)} == {"dense": 1.0, OURS: 0.4}


def test_tasks_weigh_alike_where_a_run_was_stopped(retriever: LoadedModel) -> None:
    file, held = file_of(retriever, "prefill"), {"at": "0.3", "length": LENGTH}
    file.add(Held(method=OURS, target=0.3, **held))
    for task, count, score in (("vt", 2, 0.0), ("cwe", 8, 1.0)):
        for number in range(count):
            drawn = {"length": LENGTH, "task": task, "number": number, "kl": 0.0, "share": 0.3}
            file.add(Sampled(method="dense", at="1", score=1.0, **drawn))
            file.add(Sampled(method=OURS, at="0.3", score=score, **drawn))
    dense, ours = rows(file)
    assert (dense.score, ours.score, ours.samples) == (100.0, 50.0, 4)


def test_a_ratio_of_divergences_is_paired_and_stands_beside_rounding(retriever: LoadedModel) -> None:
    file, held = file_of(retriever, "prefill"), {"at": "0.3", "length": LENGTH}
    file.add(Held(method=OURS, target=0.3, **held), Held(method="minference", target=0.3, **held))
    for number in range(40):
        size = 1.0 + number  # both lose on the same samples
        drawn = {"length": LENGTH, "task": "vt", "number": number, "score": 1.0, "share": 0.3}
        file.add(Sampled(method="dense", at="1", kl=1e-4, **drawn))
        file.add(Sampled(method=OURS, at="0.3", kl=1e-5 * size, **drawn))
        file.add(Sampled(method="minference", at="0.3", kl=1e-4 * size, **drawn))
    *_, other = rows(file)
    assert other.ratio == (pytest.approx(0.1), (pytest.approx(0.1), pytest.approx(0.1)))
    said = text(file)
    for words in (
        "0.1 [0.1, 0.1] of that of MInference, searched (at rounding, which comes to 0.0001)",
        "rounding 0.0001",
    ):
        assert words in said, said
    file.settings = file.settings.model_copy(update={"schema_version": 1})
    assert "1000:6096 in every head" in text(file)


def test_the_command_goes_on_with_its_file_and_ends_in_a_sentence(
    sparsekv, retriever: LoadedModel, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pooled", "page_means", "key_norm"):  # of the example, to be those of its copy
        monkeypatch.delitem(registry(), name)
    write_plan(plan_of(retriever, "prefill"), tmp_path / "plan.yaml")
    (rule := tmp_path / "my_rule.py").write_text(EXAMPLE.read_text())
    call = ("compare", "tiny-retriever", "--plan", tmp_path / "plan.yaml", "--lengths", LENGTH, "--samples", 1)
    call += ("--set", "tasks=niah_single_1", "-o", tmp_path / "c.jsonl")
    done = sparsekv(
        *call, "--methods", f"{rule},half={tmp_path / 'plan.yaml'}", "--set", f"picture={tmp_path / 'c.svg'}"
    )
    assert done.code == 0, done.err
    assert "sparsekv minus it" in done.out
    assert "the nearest of 2 others" in done.out
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
    assert " pooled " in sparsekv(*call, "--methods", rule).out
    rule.write_text(rule.read_text() + "# changed\n")
    assert "code or plan of pooled" in sparsekv(*call, "--methods", rule).err
    assert "found 'poold'; did you mean pooled" in sparsekv(*call, "--methods", "poold").err
    assert "for --phase decode" in sparsekv(*call, "--methods", "minference", "--phase", "decode").err


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--phase decode --methods omnikv,quest --at time", "--phase decode with quest, which no time"),
        ("--phase eviction --methods snapkv --at time", "--phase eviction with snapkv, which no time"),
        ("--phase eviction --methods half=PLAN --at time", "--phase eviction with plans, which no time"),
        ("--phase decode --methods quest,quest=PLAN", "found quest, which is a method's"),
        ("--methods dense=PLAN", "found dense, which is a method's"),
    ],
)
def test_a_comparison_that_would_mean_something_else_is_refused_before_its_model_is_loaded(
    options: str, refused: str, sparsekv, retriever: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(plan_of(retriever, "prefill"), path := tmp_path / "plan.yaml")
    monkeypatch.setattr(Subject, "load", None)
    done = sparsekv("compare", "tiny-retriever", "--plan", path, *options.replace("PLAN", str(path)).split())
    assert refused in done.err


@pytest.mark.parametrize(
    "rule", [FlashPrefill(), FlexPrefill(), SkipSoftmax(), Stem(), XAttention()], ids=lambda rule: rule.name
)
def test_a_rule_that_leaves_nothing_out_is_dense(rule: PrefillRule, loaded: LoadedModel) -> None:
    chosen_methods("prefill", (), False)
    mode = Entrants(loaded=loaded, phase="prefill", names=())._of_rule(rule, 1.0).mode
    samples = [*held_out(prepare(loaded.tokenizer, Split.EVALUATION), "kv_retrieval", LENGTH, 1, 0)]
    found = compare(loaded, {"all": mode}, samples)["all"]
    assert max(found.kl) < 1e-4
    assert found.spent.tiles == found.spent.causal_tiles


# --- decode -----------------------------------------------------------------------------------------------------------


def call_of(length: int) -> AttentionCall:
    draws = torch.Generator().manual_seed(length)
    q_BH1D = torch.randn(2, 4, 1, 16, generator=draws)
    k_BGKD, v_BGKD = (torch.randn(2, 2, length, 16, generator=draws) for _ in "kv")
    return AttentionCall(2, q_BH1D, k_BGKD, v_BGKD, Chunk.uniform(2, length - 1, length), 0.25, None)


def test_exact_top_k_takes_the_keys_with_most_attention() -> None:
    call, recent = call_of(300), TopKByHead.recent
    found = Selecting(TopKByHead(), (4 + 20 + recent) / 300)(call)
    assert found is not None
    scores_BGNS = call.q_BHSD.unflatten(1, (2, 2))[:, :, :, 0] @ call.k_BGKD.mT * call.scale
    best_BGS = scores_BGNS.softmax(-1).amax(2)
    between = slice(4, 300 - recent)
    least_BG = best_BGS[..., between].topk(20).values[..., -1:]
    assert torch.equal(found.seen_BGS[..., between], best_BGS[..., between] >= least_BG)
    assert found.seen_BGS[..., :4].all()
    assert found.seen_BGS[..., -recent:].all()
    assert found.read == 24 + recent
    assert Selecting(TopKByHead(), 1.0)(call) is None


def quest(length: int, share: float, steps: int = 1) -> Chosen:
    """Its choice for the newest of so many keys, which come in as many steps."""
    call, rule = call_of(length), Selecting(Quest(), share)
    for end in range(length - steps + 1, length + 1):
        found = rule(replace(call, k_BGKD=call.k_BGKD[:, :, :end]))
    assert found is not None
    return found


@pytest.mark.parametrize("length", [300, 320])
def test_quest_takes_whole_pages_counts_their_bounds_and_keeps_them_as_keys_come(length: int) -> None:
    found, page = quest(length, 0.3), Quest.page
    pages = math.ceil(length / page)
    assert (found.seen_BGS.sum(-1) + pages == found.read).all()
    assert found.read == pytest.approx(0.3 * length, abs=page)
    whole_BGPX = found.seen_BGS[..., : length // page * page].unflatten(-1, (-1, page))
    assert torch.equal(whole_BGPX.any(-1), whole_BGPX.all(-1))
    assert found.seen_BGS[..., -1].all()
    assert torch.equal(found.seen_BGS, quest(length, 0.3, steps=40).seen_BGS)


def test_quest_bounds_no_score_too_low() -> None:
    """A key that outweighs all others lies in a page that is taken, wherever it is."""
    for position in (0, 100, 299):
        call = call_of(300)
        call.k_BGKD[:, :, position] = 4.0 * call.q_BHSD.unflatten(1, (2, 2))[:, :, 0, 0]
        found = Selecting(Quest(), 0.2)(call)
        assert found is not None
        assert found.seen_BGS[..., position].all()


def test_omnikvs_rule_takes_the_best_servers_and_leaves_a_wait_layer() -> None:
    kept_JI = np.full((32, 32), 0.5)
    for filter_ in (2, 8, 18):
        kept_JI[:, filter_] = 0.9
    entry = LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=made_up_reuse(kept_JI))
    given = made_up_profile(entry, model=made_up_model(layers=32))
    found = [(one.filter, one.layers) for one in OmniKV().segments(given, entry, fraction(0.1))]
    assert found == [(2, tuple(range(4, 8))), (8, tuple(range(10, 18))), (18, tuple(range(20, 32)))]


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_expected_attention_unrotates_queries_and_keeps_what_future_ones_attend_to(retriever: LoadedModel) -> None:
    """Beside the definition: means of queries as they were projected, turned by every future position, one by one."""
    model = retriever.model
    ids_BS = torch.randint(0, 500, (2, 192), generator=torch.Generator().manual_seed(0))
    projected: list[torch.Tensor] = []
    layer = model.model.layers[1].self_attn
    hook = layer.q_proj.register_forward_hook(lambda module, given, out: projected.append(out))
    with torch.no_grad(), observed_prompt(model, ids_BS, with_statistics=True) as (seen, _):
        hook.remove()
        q_BHSD = projected[0].unflatten(-1, (4, 64)).transpose(1, 2)
        k_BGSD, v_BGSD = seen.keys_values(1)
        cos_FD, sin_FD = (part[0] for part in model.model.rotary_emb(q_BHSD, torch.arange(192, 704)[None]))

        def turned(x_D: torch.Tensor) -> torch.Tensor:
            first, second = x_D.chunk(2)
            return (x_D * cos_FD + torch.cat((-second, first)) * sin_FD).mean(0)

        centred_SD = q_BHSD[1, 2, 4:] - q_BHSD[1, 2, 4:].mean(0)
        mean_D = turned(q_BHSD[1, 2, 4:].mean(0))
        spread_SD = torch.stack([turned(x_D) for x_D in centred_SD])
        k_SD = k_BGSD[1, 1, 4:]
        logits_S = k_SD @ mean_D / 8 + ((k_SD @ spread_SD.T) ** 2).mean(1) / 128
        other_SD = torch.stack([turned(x_D) for x_D in q_BHSD[1, 3, 4:] - q_BHSD[1, 3, 4:].mean(0)])
        others_S = k_SD @ turned(q_BHSD[1, 3, 4:].mean(0)) / 8 + ((k_SD @ other_SD.T) ** 2).mean(1) / 128
        weights_S = (logits_S.softmax(0) + others_S.softmax(0)) / 2
        expected_S = (weights_S + 0.02) * v_BGSD[1, 1, 4:].norm(dim=-1)
        facts = Layer(1, Chunk.uniform(2, 191, 192), TileShape(), 1 / 8)
        scores_BGS = ExpectedAttention().scores(q_BHSD, k_BGSD, v_BGSD, facts, seen.seen.statistics(1, 192))
        torch.testing.assert_close(scores_BGS[1, 1, 4:], expected_S, atol=1e-4, rtol=1e-3)


def test_masks_are_attended_to_as_an_evicted_cache_is(retriever: LoadedModel) -> None:
    """What is masked has no influence: its values may be anything."""
    model = retriever.model
    ids_BS = torch.randint(0, 500, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), observed_prompt(model, ids_BS) as (seen, steps):
        masks = seen.by_score(SnapKV(), 0.5)
        assert cached_share(masks, 12) == pytest.approx(0.5, abs=0.01)
        assert all(mask_BGS[..., -64:].all() for mask_BGS in masks.values())
        steps.rule, cache = Evicted(masks), seen.prompts.cache
        one = model(input_ids=ids_BS[:, :1], past_key_values=cache).logits
        for number, layer in enumerate(cache.layers):
            layer.store.truncate((300,))
            _, v_BGSD = layer.store.tensors
            v_BGSD[:, :, :300].masked_fill_(~masks[number][..., None], 1e4)
        torch.testing.assert_close(model(input_ids=ids_BS[:, :1], past_key_values=cache).logits, one)

"""Engines that cannot run a plan are refused when they start, each by name and with a way out."""

from typing import Any

import pytest
from plans_samples import model_info, small_plan

from sparsekv.plans.errors import PlanWarning, UnsupportedError
from sparsekv.plans.model import AttentionGroup
from sparsekv.plans.patterns import AShape, TileShape, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan, Retention
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.vllm.connectors import Connector
from sparsekv.runtime.vllm.engine_facts import EngineFacts, check_engine_layer, check_layers
from sparsekv.runtime.vllm.engine_settings import check_engine

FACTS: dict[str, Any] = {"release": "0.32.0", "device": "cpu"}


def refusal(plan: Plan | None = None, allow_untested: bool = False, **facts: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        check_engine(EngineFacts(**(FACTS | facts)), plan or small_plan(), allow_untested)
    return str(caught.value)


def test_a_plain_engine_is_taken() -> None:
    check_engine(EngineFacts(**FACTS), small_plan(), False)
    check_engine(EngineFacts(**FACTS, dtype="bfloat16", kv_cache_dtype="bfloat16"), small_plan(), False)


@pytest.mark.parametrize(
    ("fact", "named", "way_out"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2", "--kv-cache-dtype auto or fp8"),
        ({"context_parallel": 2}, "context parallelism over 2 ranks", "sizes to 1"),
        ({"connectors": (Connector("HiSparseConnector"),)}, "(HiSparseConnector)", '"allow_untested": true'),
        ({"modalities": ("image",)}, "more than text (image)", """--limit-mm-per-prompt '{"image": 0}'"""),
        ({"modalities": ("image", "video")}, "image, video", "--language-model-only"),
        ({"encoder_decoder": True}, "cross-attention", "only decoders"),
        ({"latent": True}, "MLA", "each head"),
        ({"micro_batches": True}, "micro-batches", "turn them off"),
        ({"fast_prefill": True}, "rows skip some layers", "remove --kv-sharing-fast-prefill"),
        ({"stages": (range(8), range(8, 12))}, "pipeline parallelism over 2 stages", '"allow_untested": true'),
        ({"release": "0.31.0", "missing": ("LLM.ask",)}, "LLM.ask", '"allow_untested": true'),
        ({"release": "0.32.0", "device": "rocm"}, "vLLM 0.32.0 on rocm", "0.32.0 on cpu (all tests of the host"),
    ],
    ids=str,
)
def test_what_the_host_cannot_run_is_refused_by_name(fact: dict[str, Any], named: str, way_out: str) -> None:
    message = refusal(**fact)
    assert named in message
    assert way_out in message
    assert '"dense": true' in message


@pytest.mark.parametrize(
    ("fact", "named"),
    [
        ({"one_group": True}, "--disable-hybrid-kv-cache-manager"),
        ({"micro_batches": True}, "micro-batches (--enable-dbo), where layers 0-1"),
        ({"tensor_parallel": 4}, "4 ranks that share 2 KV heads"),
        ({"speculative": "ngram"}, "speculative decoding (ngram), where layers 0-1"),
        ({"connectors": (Connector("NixlConnector"),)}, "KV connectors (NixlConnector), where layers 0-1"),
    ],
    ids=str,
)
def test_engines_that_cannot_drop_tokens_are_refused_by_name(fact: dict[str, Any], named: str) -> None:
    rule = {"sink": 4, "recent": 128, "generated": 8, "score": "attention_sum", "observe": 64, "heads": "max"}
    plan = small_plan(decode=None, kv_cache=(Retention(layers=(0, 1), keep=tokens(64), **rule),))
    check_engine(EngineFacts(**FACTS), plan, False)
    assert named in refusal(plan, **fact)


def test_everything_that_stands_in_the_way_is_named_at_once() -> None:
    message = refusal(connectors=(Connector("LMCacheConnectorV1"),), context_parallel=2)
    assert "LMCacheConnectorV1" in message
    assert "context parallelism" in message


def test_an_untested_release_that_has_all_that_is_used_runs_with_a_warning() -> None:
    with pytest.warns(PlanWarning, match=r"0\.33\.0"):
        check_engine(EngineFacts(**(FACTS | {"release": "0.33.0"})), small_plan(), False)


def test_an_untested_release_runs_where_it_is_allowed_and_nothing_else_with_it() -> None:
    check_engine(EngineFacts(**(FACTS | {"release": "0.40.0"})), small_plan(), True)
    assert (
        "vLLM"
        not in refusal(allow_untested=True, release="0.40.0", missing=("LLM.ask",), latent=True).partition("found:")[2]
    )


def test_pipeline_stages_that_cut_a_segment_are_refused_and_others_are_not() -> None:
    plan = small_plan()  # layer 2 chooses for layers 4 to 7
    assert "layer 2" in refusal(plan, True, stages=(range(5), range(5, 12)))
    check_engine(EngineFacts(**FACTS, stages=(range(8), range(8, 12))), plan, True)


def test_a_choice_by_several_queries_is_refused_and_a_plan_without_decode_is_not() -> None:
    plan = small_plan()
    buckets = tuple(
        bucket.model_copy(
            update={
                "segments": tuple(s.model_copy(update={"selector": "uniform", "window": 4}) for s in bucket.segments)
            }
        )
        for bucket in plan.decode.lengths
    )
    windows = plan.model_copy(update={"decode": plan.decode.model_copy(update={"lengths": buckets})})
    assert '"decode": false' in refusal(windows)
    check_engine(EngineFacts(**FACTS, micro_batches=True), plan.model_copy(update={"decode": None}), False)


def test_patterns_in_sliding_layers_are_refused_and_dense_sliding_layers_are_not() -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    groups = (
        AttentionGroup(layers=(0,), kind="sliding", window=512, **shape),
        AttentionGroup(layers=(1,), kind="full", **shape),
    )
    model = model_info(attention=groups)

    def plan(layer: int) -> Plan:
        group = HeadGroup(layer=layer, heads=(0,), pattern=AShape(sink=tokens(128), window=tokens(128)))
        prefill = PrefillPlan(tile=TileShape(), lengths=(PrefillBucket(up_to=None, heads=(group,)),))
        return Plan(status="unverified", model=model, prefill=prefill)

    check_layers(plan(1), model)
    with pytest.raises(UnsupportedError, match=r"sliding window \(0\)"):
        check_layers(plan(0), model)


@pytest.mark.parametrize("found", [(8, 2, None), (4, 1, None), (4, 2, 512)], ids=["heads", "kv heads", "window"])
def test_a_layer_that_vllm_runs_otherwise_than_the_models_config_says_is_refused(found: tuple[Any, ...]) -> None:
    layer = LayerProgram(3, heads=4, kv_heads=2, window=None)
    check_engine_layer(layer, 4, 2, None)
    with pytest.raises(UnsupportedError, match="layer 3 with"):
        check_engine_layer(layer, *found)

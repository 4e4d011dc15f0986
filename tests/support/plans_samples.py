"""Plans for tests: one that uses every field of the schema, small ones, and one of a large model."""

from __future__ import annotations

from typing import Any

from sparsekv.plans.model import AttentionGroup, Fingerprint, ModelInfo
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    Eviction,
    HeadGroup,
    IndexSharing,
    Offload,
    PrefillBucket,
    PrefillPlan,
    Segment,
)
from sparsekv.plans.quality import CellScore, Excludes, LengthScore, Quality
from sparsekv.plans.schema import (
    Cost,
    Estimate,
    LayerCounts,
    Plan,
    Prediction,
    Provenance,
    Target,
)

TENTH = DecodeBudget(fraction=0.1, at_most=13108)


def digest_of(letter: str) -> str:
    """A digest that is one hexadecimal digit throughout."""
    return "sha256:" + letter * 64


def model_info(layers: int = 12, heads: int = 4, kv_heads: int = 2, **fields: Any) -> ModelInfo:
    """A model whose layers are all full attention."""
    group = AttentionGroup(layers=tuple(range(layers)), kind="full", heads=heads, kv_heads=kv_heads, head_dim=64)
    given = {
        "id": "example/model",
        "model_type": "llama",
        "context_length": 131072,
        "rope": {"rope_type": "default", "rope_theta": 1000000.0},
        "attention": (group,),
        "fingerprint": Fingerprint(architecture=digest_of("a"), weights=digest_of("b")),
    }
    return ModelInfo(**(given | fields))


def small_plan(**fields: Any) -> Plan:
    """A plan of a 12 x 4 model with both phases, all of it executable."""
    given: dict[str, Any] = {
        "status": "unverified",
        "model": model_info(),
        "prefill": PrefillPlan(
            tile=TileShape(query=64, key=64),
            lengths=(
                PrefillBucket(up_to=2048, dense=True),
                PrefillBucket(
                    up_to=None,
                    heads=tuple(
                        HeadGroup(layer=layer, heads=(0, 1), pattern=AShape(sink=tokens(64), window=tokens(1024)))
                        for layer in range(12)
                    ),
                ),
            ),
        ),
        "decode": DecodePlan(
            lengths=(
                DecodeBucket(up_to=4096, dense=True),
                DecodeBucket(up_to=None, segments=(Segment(filter=2, layers=(4, 5, 6, 7), budget=TENTH, recent=128),)),
            ),
        ),
    }
    return Plan(**(given | fields))


def large_plan(layers: int = 32, heads: int = 32, buckets: int = 3) -> Plan:
    """A plan in which no two heads of a layer share a pattern: as many lines as such a model can have."""

    def group(layer: int, head: int, bucket: int) -> HeadGroup:
        pattern = VerticalSlash(
            vertical=tokens(30 + head + bucket), slash=tokens(2048 + head), max_tiles=fraction(0.1 + head / 1000)
        )
        return HeadGroup(layer=layer, heads=(head,), pattern=pattern)

    lengths = tuple(
        PrefillBucket(
            up_to=None if bucket == buckets - 1 else 8192 << bucket,
            heads=tuple(group(layer, head, bucket) for layer in range(layers) for head in range(heads)),
        )
        for bucket in range(buckets)
    )
    prefill = PrefillPlan(tile=TileShape(), lengths=lengths)
    return Plan(status="unverified", model=model_info(layers, heads, heads // 4), prefill=prefill)


def counts(heads: int, tiles: float, columns: float = 0.0) -> tuple[LayerCounts, ...]:
    """The same counts for every head of twelve layers."""
    return tuple(LayerCounts(layer=n, tiles=(tiles,) * heads, columns=(columns,) * heads) for n in range(12))


def sharing_plan() -> Plan:
    """A plan of a model with indexers."""
    sharing = IndexSharing(pattern="FSSFFSSS", lengths=(32768, 8192))
    return Plan(status="unverified", model=model_info(8, 4, 4, model_type="glm_moe_dsa"), index_sharing=sharing)


def full_plan() -> Plan:
    """A plan that uses every field of schema version 1, but that of models with indexers."""
    return Plan(
        status="verified",
        model=_mixed_model(),
        targets=(
            Target(device="NVIDIA H200", count=2, tensor_parallel=2, backend="flash", dtype="bfloat16"),
            Target(
                device="Example CPU @ 2.0GHz", host="vllm", backend="cpu", dtype="float32", chunk=2048, kv_dtype="fp8"
            ),
        ),
        prefill=_prefill(),
        decode=_decode(),
        kv_cache=(
            Eviction(layers=(1,), keep="all"),
            Eviction(
                layers=(0,),
                keep=tokens(1024),
                sink=4,
                recent=128,
                generated=512,
                score="attention_sum",
                observe=256,
                heads="max",
            ),
        ),
        quality=_quality(),
        cost=Cost(
            device="NVIDIA H200",
            backend="flash",
            lengths=(
                Prediction(
                    length=32768,
                    prefill=Estimate(dense_us=81234.5678, sparse_us=20311.25, density=0.221),
                    computed=(LayerCounts(layer=1, tiles=(0.0125678, 1, 0.25, 0.25), columns=(0.125, 0, 0.1, 0.0)),),
                    decode=Estimate(dense_us=412.5, sparse_us=96.25, density=0.0625),
                ),
            ),
        ),
        provenance=Provenance(
            versions={"sparsekv": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "triton": "3.7.1"},
            preset="minference",
            seed=1234,
            calibration=digest_of("c"),
            prompts=digest_of("9"),
            mix={"quote_text": 2, "kv_retrieval": 1},
            profile=digest_of("d"),
            device_cost=digest_of("e"),
            source="an example",
            settings={"target_density": 0.3, "lengths": [8192, 32768], "gate": {"drop": 1.0}, "crossover": False},
        ),
        extensions={"example.org/note": {"text": "no", "list": [1, 2.5e-05, None, True, "1e-05", "line\nbreak"]}},
    )


def _mixed_model() -> ModelInfo:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    return model_info(
        id="example/mixed-8l",
        revision="0123abc",
        model_type="example",
        rope={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "short_factor": [1.0, 1e-05]},
        attention=(
            AttentionGroup(layers=(0, 1, 2, 3, 4), kind="full", **shape),
            AttentionGroup(layers=(5,), kind="sliding", window=1024, **shape),
            AttentionGroup(layers=(6,), kind="full", keys_of=3, **shape),
            AttentionGroup(layers=(7,), kind="full", heads=8, kv_heads=4, head_dim=128),
            AttentionGroup(layers=(8,), kind="linear", **shape),
        ),
    )


def _prefill() -> PrefillPlan:
    static = AShape(sink=tokens(128), window=tokens(1024))
    lines = VerticalSlash(vertical=fraction(0.02), slash=tokens(600), last_q=64, max_tiles=fraction(0.1))
    heads = (
        HeadGroup(layer=0, heads=(0, 1), pattern=static),
        HeadGroup(layer=0, heads=(2,), pattern=lines),
        HeadGroup(layer=0, heads=(3,), pattern=BlockSparse(keep=fraction(0.06))),
        HeadGroup(layer=1, heads=(0, 2), pattern=static),
        HeadGroup(layer=1, heads=(1,), pattern=Dense()),
        HeadGroup(layer=2, heads=(0, 1, 2, 3), pattern=BlockSparse(keep=fraction(1 / 3))),
        HeadGroup(layer=3, heads=(0,), pattern=lines.model_copy(update={"max_tiles": tokens(8192)})),
    )
    return PrefillPlan(
        tile=TileShape(query=128, key=64),
        lengths=(
            PrefillBucket(up_to=12288, dense=True),
            PrefillBucket(up_to=131072, heads=heads),
            PrefillBucket(up_to=None, extrapolated=True, same_as=131072),
        ),
    )


def _decode() -> DecodePlan:
    maps, none = {4: (0, 1), 5: (1, 1)}, DecodeBudget(tokens=0)
    twentieth = DecodeBudget(fraction=0.05, at_most=8192)
    segments = (
        Segment(filter=1, layers=(2,), budget=DecodeBudget(tokens=2048), recent=128, heads="per_kv_head"),
        Segment(filter=3, layers=(4, 5), budget=twentieth, sink=0, recent=64, selector="uniform", window=8, heads=maps),
        Segment(
            filter=6, layers=(7,), budget=none, recent=1, selector="exponential", window=16, scope="local", heads="max"
        ),
    )
    return DecodePlan(
        lengths=(DecodeBucket(up_to=32768, dense=True), DecodeBucket(up_to=None, segments=segments)),
        offload=Offload(layers=(2, 4, 5), hot=tokens(4096)),
    )


def _quality() -> Quality:
    cells = (
        CellScore(task="niah_multikey", length=8192, prompts=24, answered=21, lost=1, won=2),
        CellScore(task="niah_multikey", length=32768, prompts=30, answered=21),
        CellScore(task="two_stage", length=32768, prompts=21, answered=0, unjudged=True),
    )
    return Quality(
        test="small",
        run=2,
        level=0.05 / 6,
        step=4096,
        cells=cells,
        lengths=quality_at(8192, 32768, density=0.221, read=0.0625, kl=1.5e-03, floor=1.1e-05, agreed=0.9987).lengths,
        excludes=Excludes(net_loss=0.0123456, task_loss=0.3, pooled_loss=0.15),
        missed=(32768,),
        reason="chosen by a seed",
    )


def quality_at(*lengths: int, step: int | None = None, **scores: float) -> Quality:
    """The quality of a plan at these lengths."""
    usual = {"density": 0.5, "read": 0.5, "kl": 0.003, "floor": 0.001, "upper": 0.004, "worst": 0.05}
    measured = tuple(LengthScore(length=length, **usual | scores) for length in lengths)
    return Quality(test="small", level=0.025, step=step, lengths=measured)

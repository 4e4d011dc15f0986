"""Methods from outside: found in files and packages, named by plans, and held to their budgets."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import drops, every_head, plan_for

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import Softmax
from sparsekv.kernels.methods import EvictionScore, PrefillRule, Tiles, method_of, register, register_file, registry
from sparsekv.kernels.tiles import Chunk, TileIndex, density
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.patterns import Registered, TileShape, fraction
from sparsekv.runtime.hf.apply import apply

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_method.py"
TILE, LENGTH = TileShape(query=64, key=64), 640
CHUNK = Chunk.uniform(1, 0, LENGTH)


@pytest.fixture(autouse=True)
def _registered_here_alone() -> Iterator[None]:
    before = dict(registry())
    yield
    registry().clear()
    registry().update(before)


class Drawn(PrefillRule):
    """Random scores of tiles and columns, other ones in each layer."""

    name = "drawn"

    def tiles(self, q_BHSD, k_BGKD, layer, budget):
        draws = torch.Generator().manual_seed(layer.number)
        shape, keys = q_BHSD.shape[:2], layer.chunk.longest
        tiles = layer.chunk.key_tiles(layer.tile)
        return Tiles(torch.rand(*shape, tiles, tiles, generator=draws), torch.rand(*shape, keys, generator=draws) / 250)


def drawn_index(patterns: list[Registered], layer: int = 0) -> TileIndex:
    q_BHSD, k_BGKD = torch.randn(1, len(patterns), LENGTH, 16), torch.randn(1, 1, LENGTH, 16)
    return build_index(patterns, q_BHSD, k_BGKD, CHUNK, TILE, scale=0.25, layer=layer)


@pytest.mark.parametrize("share", [0.55, 0.7, 0.9])
def test_scores_are_taken_within_the_budget_and_a_rule_is_told_its_layer(share: float) -> None:
    register([Drawn])
    patterns = [Registered(name="drawn", budget=fraction(share))] * 2
    index = drawn_index(patterns)
    assert share - 0.1 < float(density(index, CHUNK)) <= share  # columns within computed tiles are not counted
    assert index.columns_BHC.shape[-1] > 0
    assert not torch.equal(index.counts_BHT, drawn_index(patterns, layer=1).counts_BHT)


def test_tiles_and_columns_of_a_rule_are_attended_to() -> None:
    class Every(PrefillRule):
        name = "every_second"

        def tiles(self, q_BHSD, k_BGKD, layer, budget):
            rows, keys = layer.chunk.key_tiles(layer.tile), layer.chunk.longest
            second_K = torch.arange(keys) % 2 == 0
            nothing_BHTM = torch.zeros(1, 2, rows, rows, dtype=torch.bool)
            return Tiles(nothing_BHTM, second_K.expand(1, 2, keys))

    register([Every])
    q_BHSD, k_BGSD, v_BGSD = (torch.randn(1, heads, LENGTH, 16) for heads in (2, 1, 1))
    pattern = Registered(name="every_second", budget=fraction(0.1))
    index = build_index([pattern] * 2, q_BHSD, k_BGSD, CHUNK, TILE, scale=0.25)
    found = prefill_attention(q_BHSD, k_BGSD, v_BGSD, index, CHUNK, scale=0.25, backend="reference").out_BHSD
    at_S, tile_S = torch.arange(LENGTH), torch.arange(LENGTH) // 64
    seen_SS = (at_S % 2 == 0) | (tile_S == 0) | (tile_S >= tile_S[:, None] - 1)
    scores_BHSS = (q_BHSD @ k_BGSD.mT * 0.25).masked_fill(~(seen_SS & (at_S <= at_S[:, None])), -torch.inf)
    torch.testing.assert_close(found, scores_BHSS.softmax(-1) @ v_BGSD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_rule_is_told_the_soft_cap_and_the_sinks_of_its_layer(family: str) -> None:
    class Told(Drawn):
        name = "told"

        def tiles(self, q_BHSD, k_BGKD, layer, budget):
            softmaxes.append(layer.softmax)
            return super().tiles(q_BHSD, k_BGKD, layer, budget)

    softmaxes: list[Softmax] = []
    register([Told])
    model = tiny_model(family, context=1024)
    plan = plan_for(model, every_head(model, Registered(name="told", budget=fraction(1.0))))
    with torch.no_grad(), apply(model, plan, sparse="always"):
        model(input_ids=torch.randint(0, 90, (1, 300)))
    assert len(softmaxes) > 0
    cap = getattr(model.config, "attn_logit_softcapping", None) or 0.0
    assert {softmax.cap for softmax in softmaxes} == {cap}
    assert all((softmax.sinks_H is not None) == (family == "gpt_oss") for softmax in softmaxes)
    assert (cap > 0) == (family == "gemma2")


def test_tiles_alone_make_the_host_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(Drawn):
        name = "alone"

        def tiles(self, q_BHSD, k_BGKD, layer, budget):
            return super().tiles(q_BHSD, k_BGKD, layer, budget).tiles_BHTM

    register([Alone])
    monkeypatch.setattr(torch.Tensor, "__int__", None)
    assert drawn_index([Registered(name="alone", budget=fraction(0.7))] * 2).columns_BHC.shape[-1] == 0


def test_a_plan_names_methods_and_is_refused_by_the_name_that_nobody_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("pooled", "page_means", "key_norm"):  # which other tests of this process register
        monkeypatch.delitem(registry(), name, raising=False)
    model = tiny_model(context=1024)
    pattern, rule = Registered(name="pooled", budget=fraction(1.0)), drops((1,), 512)
    plan = plan_for(model, every_head(model, pattern), None, rule.model_copy(update={"score": "key_norm"}))
    with pytest.raises(UnsupportedError, match=r"EvictionScore key_norm, which nobody(.|\n)*PrefillRule pooled"):
        apply(model, plan)
    assert register_file(EXAMPLE) == ["pooled", "page_means", "key_norm"]
    ids_BS = torch.randint(0, 90, (1, 300))
    with torch.no_grad():
        dense = model(input_ids=ids_BS).logits
        with apply(model, plan, sparse="always"):
            torch.testing.assert_close(model(input_ids=ids_BS).logits, dense, atol=1e-4, rtol=1e-4)


def test_what_is_no_method_is_refused_by_what_was_expected(tmp_path: Path) -> None:
    register_file(EXAMPLE)
    with pytest.raises(UsageError, match=r"registered PrefillRule, found 'poold'; did you mean pooled"):
        method_of(PrefillRule, "poold")
    with pytest.raises(UsageError, match="registered PrefillRule, found 'key_norm'"):
        method_of(PrefillRule, "key_norm")
    for name in ("two words", "1st", "attention_sum", "block_sparse"):
        with pytest.raises(UsageError, match=f"found '?{name}.*; rename it"):
            register([type("Named", (EvictionScore,), {"name": name})])
    with pytest.raises(UsageError, match=r"found key_norm, which is methods of .*my_method\.py\.KeyNorm"):
        register([type("Named", (EvictionScore,), {"name": "key_norm"})])
    (path := tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="expected a class with a `name`"):
        register_file(path)
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(UsageError, match=r"empty\.py fails: ModuleNotFoundError: No module named 'nothing_of"):
        register_file(path)
    with pytest.raises(UsageError, match="found no"):
        register_file(tmp_path / "none.py")


def test_an_installed_package_brings_its_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    (project / "toy_methods.py").write_text(EXAMPLE.read_text())
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "toy-methods"\nversion = "1"\n[tool.setuptools]\npy-modules = ["toy_methods"]\n'
        '[project.entry-points."sparsekv.methods"]\nkey_norm = "toy_methods:KeyNorm"\n'
    )
    install = (
        "-m",
        "pip",
        "install",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        project,
    )
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    monkeypatch.syspath_prepend(str(site))
    registry.cache_clear()
    try:
        assert "key_norm" in registry()
        (site / "toy_methods-1.dist-info" / "entry_points.txt").write_text("[sparsekv.methods]\na = toy_methods:Gone\n")
        registry.cache_clear()
        with pytest.raises(UsageError, match="installed package toy-methods, found that toy_methods:Gone fails"):
            registry()
    finally:
        registry.cache_clear()

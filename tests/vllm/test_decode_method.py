"""The decode method of docs/extending.md in vLLM's engine, held against the transformers host."""

from pathlib import Path
from typing import Any

import pytest
from even_spread import EvenSpread, lower_to
from vllm_engine import Oracle, chunks_of, generate, make_engine, same

from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import serving_stats


def test_a_role_that_only_answers_for_itself_runs_in_an_engine(
    reference: LoadedModel, plan: Plan, prompts: dict[int, list[int]], kept_engines: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One request at a time: the steps that the role counts are those of all rows."""
    lower_to(monkeypatch, EvenSpread(500, 60))
    dense = plan.model_copy(update={"decode": None})
    write_plan(dense, path := tmp_path / "plan.yaml")
    engine = make_engine(str(reference.model.name_or_path), additional_config={"sparsekv": {"plan": str(path)}})
    kept_engines.append(engine)
    (output,) = generate(engine, [prompts[1500]], 12)
    cuts = chunks_of([1500], 12)
    assert same(output, Oracle(reference.model, dense)(prompts[1500], cuts[0], 12))
    assert serving_stats(engine).decode_sparse == 11
    monkeypatch.undo()
    assert not same(output, Oracle(reference.model, dense)(prompts[1500], cuts[0], 12)), "nothing is left out"

"""A user's program, for `make lint`: mypy accepts it as strict code, and finds a mistake (strict code may have no
`type: ignore` that nothing needs, so that a call that returns Any fails here)."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

from transformers import PreTrainedModel

import sparsekv
from sparsekv import Plan


def use(model: PreTrainedModel, path: Path) -> float | None:
    plan = sparsekv.plan_model("./my-model", lengths="32k", loss=0.01, retain="50%")
    assert_type(plan, Plan)
    sparsekv.write_plan(plan, path)
    result = sparsekv.verify_plan("./my-model", path)
    assert_type(result.recorded(plan), Plan)
    assert_type(sparsekv.load_model("tiny-retriever").model, PreTrainedModel)
    with sparsekv.apply(model, sparsekv.load_plan(path), exact="decode") as handle:
        return handle.stats().prefill_density


def misuse(model: PreTrainedModel, path: Path) -> None:
    sparsekv.plan_model(model, lenghts="32k")  # type: ignore[call-arg]
    sparsekv.apply(model, path, exact="prefill")  # type: ignore[arg-type]
    try:
        print(sparsekv.load_plan(path).state)  # type: ignore[attr-defined]
    except sparsekv.SparseKVError as error:
        print(error.code)  # type: ignore[attr-defined]

"""Tasks that a model is calibrated on: always those that any model can answer, of the others those that it solves."""

import pytest
from task_tokenizers import REFERENCE_MODEL, kit_named

from sparsekv.planner.job import solved_tasks, with_tasks
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.tasks import Split
from sparsekv.runtime.hf.load import LoadedModel, load_model


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    return load_model(REFERENCE_MODEL, device="cpu", dtype="auto")


def test_the_reference_model_solves_what_it_was_trained_on_where_that_fits(reference: LoadedModel) -> None:
    kit = kit_named("shipped", Split.CALIBRATION)
    tasks = ("kv_retrieval", "variable_tracking")
    assert solved_tasks(reference, kit, tasks, 512, samples=2) == tasks
    assert solved_tasks(reference, kit, tasks, 64, samples=2) == ("kv_retrieval",)


def test_tasks_that_were_asked_for_or_profiled_are_taken_without_running_the_model(loaded: LoadedModel) -> None:
    settled, no_model = settle(PlanOptions(lengths=(512,)), 4096, "cpu"), LoadedModel(None, None, loaded.info)  # type: ignore[arg-type]
    assert with_tasks(no_model, settled, ("niah_single",)).tasks == ("niah_single",)
    given = settle(PlanOptions(lengths=(512,), tasks=("two_stage",)), 4096, "cpu")
    assert with_tasks(no_model, given, ("niah_single",)).tasks == ("two_stage",)

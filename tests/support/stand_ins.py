"""Stand-ins for models and files that the command lines of documents name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from model_folders import save_model, sparse_plan
from planner_profiles import made_up_length, made_up_profile, made_up_reuse
from tiny_models import VOCABULARY, tiny_model

from sparsekv.bench.compare_file import CompareRun, Sampled
from sparsekv.bench.ruler_suite import RULER_SUITE
from sparsekv.bench.suite import SuiteCell, SuiteRun
from sparsekv.planner.records import RunFile, RunRecord, RunSettings, write_measured
from sparsekv.plans.aliases import ALIASES, PLAN_NAME
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel, load_model

_MODELS = re.compile(
    r"MODEL|DIR|FOLDER|CHECKPOINT|NAME|qwen|smollm2|(Qwen|your-name|organisation)/.+|(\./)?(my-)?model(-FP8)?|"
    + "|".join(re.escape(alias) for alias in ALIASES)
)
# Each kind by the name of a file, or by the flag before it.
_FILES = {
    "plan": r"--plan .+|.* (PLAN|.+\.yaml)",
    "preset": r".* (preset|minference)\.profile",
    "profile": r"--profile .+|.* .+\.profile",
    "compare": r"report .*compare\.jsonl|report\.html FILE|.* compare\.jsonl",
    "suite": r".* ruler\.jsonl",
    "own": r"--prompts .+",
    "pattern": r".* best_pattern\.json",
    "text": r".* (book|document)\.txt",
}
_PLANNED = tuple(1024 << power for power in range(8))  # up to 128K
_LEVELS = (0.05, 0.2, 0.4)  # densities


@dataclass(frozen=True)
class StandIns:
    """A tiny random model of a long context, and what makes a file of each kind."""

    folder: Path
    loaded: LoadedModel
    plan: Plan
    row: Sampled
    make: dict[str, Callable[[Path], object]]

    def put(self, word: str, before: str = "") -> None:
        """Makes what a word of a command names in the working folder, unless it is there; `before` it stands a word."""
        if os.path.exists(word):
            return
        if _MODELS.fullmatch(word):
            shutil.copytree(self.folder, word)
            self.make["plan"](Path(word, PLAN_NAME))
        elif kind := next((kind for kind, names in _FILES.items() if re.fullmatch(names, f"{before} {word}")), None):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            self.make[kind](Path(word))


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    model = tiny_model(context=1 << 20, eos_token_id=[*range(VOCABULARY)])  # whose answers end at once
    folder = save_model(model, tmp_path_factory.mktemp("stand_ins") / "my-model")
    loaded = load_model(folder, device="cpu")
    plan = sparse_plan(loaded.model).model_copy(update={"model": loaded.info})
    reuse = {"reuse": made_up_reuse(np.eye(3))}
    lengths = (
        made_up_length(length, np.random.default_rng(0), levels=_LEVELS).model_copy(update=reuse) for length in _PLANNED
    )
    profile = made_up_profile(*lengths, model=loaded.info)
    row = Sampled(method="dense", at="1", task="fwe", length=2048, number=0, score=1.0, kl=0.0, share=1.0)
    score = {"recall": (1.0,), "exact": (1.0,), "prefill_density": 1.0}
    cells = [SuiteCell(method="dense", device="cpu", task=task, length=1024, **score) for task in RULER_SUITE]
    drawn = {"seed": 0, "samples": 1}
    compared = {"phase": "prefill", "suite": "ruler", "reference": "sparsekv", "device": "cpu", "backend": "auto"}

    def write(settings: RunSettings, records: Sequence[RunRecord], path: Path) -> None:
        path.unlink(missing_ok=True)
        RunFile(settings, path).add(*records)

    heads = {str(head): ["vertical_and_slash", 100, 800, 1.0] for head in range(4)}
    make = {
        "profile": lambda path: write_measured(profile, path),
        "preset": lambda path: write_measured(profile.model_copy(update={"preset": "minference"}), path),
        "compare": lambda path: write(CompareRun.of(loaded, **compared, **drawn), [row], path),
        "suite": lambda path: write(SuiteRun.of(loaded, phase="both", backend="auto", **drawn), cells, path),
        "own": lambda path: path.write_text(
            '{"prompt": "The number is 2206914. The number is", "answer": " 2206914"}\n' * 4
        ),
        "pattern": lambda path: path.write_text(json.dumps([heads] * 3)),
        "text": lambda path: path.write_text("The special number for river is 2206914. " * 3),
        "plan": lambda path: write_plan(plan, path),
    }
    return StandIns(folder, loaded, plan, row, make)

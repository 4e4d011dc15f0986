"""Does the attention mass that a plan keeps foretell the answers that it loses?

    python -m sparsekv.bench.kept_mass run MODEL --plan plan.yaml --length 16k --out DIR [--samples 20]
    python -m sparsekv.bench.kept_mass tell DIR [DIR ...] [--picture FILE.svg]

Prompts are like those of calibration, or strange: a question about numbers planted in text of another kind, or one key
among hundreds like it. Each runs dense and by the plan's prefill. Beside the answers a run keeps, of 8 rows spread over
each chunk that did not choose, the softmax mass of the keys that the plan computes: exp(lse_sparse - lse_dense), by
layer and head. `tell` asks each figure of mass for its lowest fifth of the prompts, and how many of the lost answers
are among them. Choose the figure on one model, read it on the other.

Shapes: C chunks of a prompt, L layers, R sampled rows, H query heads, K keys, D head size, N prompts.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.bench.ruler_suite import RULER_SUITE
from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.reference import mask_of
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.planner.evaluation.batches import Batch, step_of
from sparsekv.planner.evaluation.predictions import PlanMode, after_prompt, answered, divergence, prefill
from sparsekv.planner.tasks import TASKS, Kit, Split, make_samples, prepare
from sparsekv.planner.tasks.documents import Document, DocumentRequest, Draws, Task
from sparsekv.planner.tasks.text import Filler, PieceEncoder, load_filler_text
from sparsekv.plans.files import load_plan
from sparsekv.plans.types import format_length, parse_length
from sparsekv.runtime.core import prefill as core_prefill
from sparsekv.runtime.hf.load import LoadedModel, load_model

Masses = npt.NDArray[np.float32]
Strange = Callable[[str, np.random.Generator], str]
ROWS = 8
LOWEST = 0.2  # of all prompts
_CHARACTERS = 400_000  # of text, from which a prompt of 128K tokens is drawn
_ASKED = ("niah_multikey", "niah_multivalue")  # in each kind of text


# --- prompts ----------------------------------------------------------------------------------------------------------


def _letters(first: str, last: str) -> Strange:
    alphabet = "".join(map(chr, range(ord(first), ord(last) + 1)))
    table = str.maketrans(string.ascii_lowercase, (alphabet * 3)[:26])
    return lambda text, rng: text.lower().translate(table)


def _alphabet(text: str, rng: np.random.Generator) -> str:
    """Words of 24 random ideographs."""
    few = rng.choice(np.arange(0x4E00, 0x9FA5), 24, replace=False)
    return _lines("".join(map(chr, rng.choice(few, 4))) for _ in range(len(text) // 8))


def _table(text: str, rng: np.random.Generator) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rng.integers(0, 9999, (len(text) // 40, 8)))


def _minified(text: str, rng: np.random.Generator) -> str:
    return _lines(("".join(line.split()) for line in text.splitlines() if line.strip()), ";", 6)


def _random_words(text: str, rng: np.random.Generator) -> str:
    return _lines(rng.permutation(text.split()).tolist())


def _hexadecimal(text: str, rng: np.random.Generator) -> str:
    return "".join(f"{rng.bytes(16).hex()} {rng.bytes(16).hex()}\n" for _ in range(len(text) // 64))


def _lines(words: Any, joiner: str = " ", count: int = 12) -> str:
    some = list(words)
    return "".join(joiner.join(some[at : at + count]) + "\n" for at in range(0, len(some), count))


TEXTS: Mapping[str, Strange] = {
    "greek letters": _letters("α", "ω"),
    "cyrillic letters": _letters("а", "я"),
    "ideographs": _alphabet,
    "table": _table,
    "minified": _minified,
    "random words": _random_words,
    "hexadecimal": _hexadecimal,
}


@dataclass(frozen=True, slots=True)
class InText:
    """A task whose filler is other text."""

    task: Task
    text: Strange
    name: str

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return self.task.longest_answer(encoder, length)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        text = self.text(load_filler_text(kit.split)[:_CHARACTERS], draws.rng)
        return self.task.document(replace(kit, filler=Filler.from_text(text, kit.encoder)), request, draws)


def kinds() -> dict[str, tuple[Split, Task]]:
    """Tasks by the kind of their prompts; `calibration` ones set what is usual."""
    found: dict[str, tuple[Split, Task]] = {}
    for name in _ASKED:
        found |= {f"{kind}, {name}": (split, TASKS[name]) for kind, split in _USUAL.items()}
        texts = ((f"{kind}, {name}", text) for kind, text in TEXTS.items())
        found |= {kind: (Split.EVALUATION, InText(TASKS[name], text, kind)) for kind, text in texts}
    return found | {name: (Split.EVALUATION, RULER_SUITE[name]) for name in ("niah_multikey_2", "niah_multikey_3")}


_USUAL = {"calibration": Split.CALIBRATION, "text": Split.EVALUATION}


# --- masses -----------------------------------------------------------------------------------------------------------


def kept_mass(q_1HSD: torch.Tensor, k_1GKD: torch.Tensor, index: TileIndex, chunk: Chunk, scale: float) -> torch.Tensor:
    """[R, H], float32: of rows in the middle of tiles spread over a chunk, but for the last two, which chose."""
    size, (past,), (length,) = index.tile.query, chunk.past, chunk.lengths
    tiles = max(1, (length - past) // size - 2)
    k_HKD = k_1GKD[0, :, :length].float().repeat_interleave(q_1HSD.shape[1] // k_1GKD.shape[1], 0)
    found = []
    for number in sorted({int(tile) for tile in np.linspace(0, tiles - 1, ROWS)}):
        first, row = past + number * size, size // 2
        own, part = slice(number, number + 1), Chunk((first,), (min(first + size, length),))
        tile = replace(
            index,
            tiles_BHTW=index.tiles_BHTW[:, :, own],
            counts_BHT=index.counts_BHT[:, :, own],
            live_BHTN=index.live_BHTN[:, :, own],
        )
        kept_HK = mask_of(tile, part, size)[0, :, row]
        scores_HK = torch.einsum("hd,hkd->hk", q_1HSD[0, :, number * size + row].float(), k_HKD) * scale
        seen_HK = scores_HK[:, : first + row + 1]
        lse_H = seen_HK.masked_fill(~kept_HK[:, : first + row + 1], -torch.inf).logsumexp(1)
        found.append((lse_H - seen_HK.logsumexp(1)).exp())
    return torch.stack(found)


@contextmanager
def recorded() -> Iterator[list[torch.Tensor]]:
    """The masses of sparse chunks of one prompt that run within, layer by layer."""
    seen: list[torch.Tensor] = []

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: TileIndex, chunk: Chunk, **how: Any) -> Any:
        seen.append(kept_mass(q, k, index, chunk, how["scale"]))
        return prefill_attention(q, k, v, index, chunk, **how)

    with patch.object(core_prefill, "prefill_attention", watched):
        yield seen


@torch.no_grad()
def run(loaded: LoadedModel, plan_file: Path, length: int, samples: int, out: Path, seed: int = 0) -> None:
    """One file a kind of prompts; those that are there are not run again."""
    plan = load_plan(plan_file)
    mode, step, model = PlanMode(plan, "prefill"), step_of(plan), loaded.model
    kits = {split: prepare(loaded.tokenizer, split) for split in (Split.CALIBRATION, Split.EVALUATION)}
    out.mkdir(parents=True, exist_ok=True)
    for kind, (split, task) in kinds().items():
        file = out / f"{kind.replace(', ', '-').replace(' ', '_')}.npz"
        if file.exists():
            continue
        rights, apart, masses = [], [], []
        for sample in make_samples(task, kits[split], length, seed, samples):
            batch, logs = Batch.of([sample], model.device), []
            for running in (nullcontext(), mode.running(model)):
                with running, recorded() as seen:
                    prompts = prefill(model, batch.prompt_BS, step)
                    logits_BAV = after_prompt(model, prompts, batch.answer_BA, stepwise=True)  # dense in both
                logs.append(logits_BAV.log_softmax(-1))
            rights.append([bool(answered(loaded, batch, log.argmax(-1))[0]) for log in logs])
            apart.append(float(divergence(*logs)[0]))
            masses.append(torch.stack(seen).cpu().numpy())
        part = out / "part.npz"
        np.savez_compressed(part, right=np.array(rights), divergence=apart, mass=np.stack(masses).astype(np.float32))
        part.rename(file)
        lost = sum(dense and not own for dense, own in rights)
        print(f"{format_length(length)} {kind}: dense right in {sum(r[0] for r in rights)} of {samples}, {lost} lost")


# --- what it says -----------------------------------------------------------------------------------------------------


def figures(usual_NLRH: Masses, mass_NLRH: Masses) -> dict[str, npt.NDArray[np.float64]]:
    """Figures of each prompt, the lowest the most suspicious, beside masses of prompts like those of calibration."""
    layer_NL, usual_NL = (x.mean((2, 3), dtype=np.float64) for x in (mass_NLRH, usual_NLRH))
    head_NLH, usual_NLH = (x.mean(2, dtype=np.float64) for x in (mass_NLRH, usual_NLRH))
    row_NLR = mass_NLRH.mean(3, dtype=np.float64)

    def below(found: npt.NDArray[np.float64], usual: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        distance: npt.NDArray[np.float64] = (found - usual.mean(0)) / (usual.std(0) + 1e-3)
        return distance

    return {
        "mean": layer_NL.mean(1),
        "lowest layer": layer_NL.min(1),
        "lowest head": head_NLH.min((1, 2)),
        "lowest row of a layer": row_NLR.min((1, 2)),
        "layer furthest below calibration": below(layer_NL, usual_NL).min(1),
        "head furthest below calibration": below(head_NLH, usual_NLH).min((1, 2)),
        "share of heads below calibration's lowest": -(head_NLH < usual_NLH.min(0)).mean((1, 2)),
        "mean distance from calibration": below(layer_NL, usual_NL).mean(1),
    }


def tell(folder: Path) -> str:
    """A line a figure: the share of lost answers, and of divergences above calibration's, in its lowest fifth."""
    files = {file.stem: np.load(file) for file in sorted(folder.glob("*.npz"))}
    usual = np.concatenate([files[name]["mass"] for name in files if name.startswith("calibration-")])
    tested = [data for name, data in files.items() if not name.startswith("calibration-")]
    mass = np.concatenate([data["mass"] for data in tested])
    right = np.concatenate([data["right"] for data in tested]).astype(bool)
    apart = np.concatenate([data["divergence"] for data in tested])
    answered_N = right[:, 0]  # what dense does not answer cannot be lost
    lost_N = (answered_N & ~right[:, 1])[answered_N]
    lines = [f"{folder}: {lost_N.sum()} of {answered_N.sum()} answers lost; {len(right)} prompts"]
    for name, figure_N in figures(usual, mass).items():
        low_N = figure_N[answered_N] <= np.quantile(figure_N[answered_N], LOWEST)
        found = (lost_N & low_N).sum() / max(1, lost_N.sum())
        together = np.corrcoef(figure_N.argsort().argsort(), apart.argsort().argsort())[0, 1]
        lines.append(f"  {found:4.0%} of lost answers in the lowest fifth, rank correlation {together:+.2f}: {name}")
    return "\n".join(lines)


def write_picture(folders: list[Path], path: Path) -> None:
    """Divergence against the mean kept mass, a point a prompt, a panel a folder; lost answers stand out."""
    import altair as alt

    from sparsekv.bench.report.charts import ACCENT, GREY, write_svg

    panels = []
    for folder in folders:
        points = []
        for file in map(np.load, sorted(folder.glob("*.npz"))):
            for mass, kl, (dense, own) in zip(
                file["mass"].mean((1, 2, 3)), file["divergence"], file["right"], strict=True
            ):
                state = ("lost" if dense > own else "kept") if dense else "not answered by dense"
                points.append({"mass": float(mass), "kl": max(1e-6, float(kl)), "answer": state})
        panels.append(
            alt.Chart(alt.InlineData(values=points), width=300, height=240, title=folder.name)
            .mark_point(filled=True, size=45)
            .encode(
                x=alt.X("mass:Q", title="kept attention mass, mean", scale=alt.Scale(zero=False)),
                y=alt.Y("kl:Q", title="divergence (nats, log)", scale=alt.Scale(type="log")),
                color=alt.Color(
                    "answer:N",
                    scale=alt.Scale(domain=["lost", "kept", "not answered by dense"], range=[ACCENT, "#2d7dd2", GREY]),
                ),
            )
        )
    write_svg(alt.hconcat(*panels), path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run")
    running.add_argument("model")
    running.add_argument("--plan", type=Path, required=True)
    running.add_argument("--length", type=parse_length, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--samples", type=int, default=20)
    telling = commands.add_parser("tell")
    telling.add_argument("folders", type=Path, nargs="+")
    telling.add_argument("--picture", type=Path)
    args = parser.parse_args(argv)
    if args.command == "run":
        run(load_model(args.model), args.plan, args.length, args.samples, args.out)
    else:
        print(*map(tell, args.folders), sep="\n")
        if args.picture:
            write_picture(args.folders, args.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

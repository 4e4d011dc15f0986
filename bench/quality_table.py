"""The table of quality: dense, a plan, and other methods held to its density, share or bytes, on RULER's tasks.

    python -m sparsekv.bench.quality_table MODEL --plan plan.yaml --evict 0.5=half.yaml --evict 0.25=quarter.yaml \\
        --profile own.profile --lengths 4k,8k,16k,32k --samples 20 --out quality.json --max-seconds 500
    python -m sparsekv.bench.quality_table --show quality.json
    python -m sparsekv.bench.quality_table --merge short.json long.json --out quality.json

All methods run the same prompts in one process. The file is written after every batch, and the same command goes on
where it ended. First come dense and the plan at all lengths, then the peers at theirs, then, on 100 samples, the tasks
of which a method lost 10 points, ours first.

Parts of a table (other --lengths, or other --tasks) may run beside each other, into files that --merge puts together.

Of a batch dense prefills once; decode and eviction go on from that cache. Each method then reads the first tokens of
dense's own text, step by step (divergence, time a step), and generates freely (RULER's score) unless it picked all of
dense's text. What plain torch computes (Quest, FlashPrefill, eviction) has no time.

Shapes: B batch, S tokens of a prompt, G tokens of a text, T tokens of it that are scored, V vocabulary.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsekv.bench import ruler_suite
from sparsekv.bench.baselines import RuleSteps
from sparsekv.bench.eviction_rules import ObservedPrompt, observed_prompt
from sparsekv.bench.harness import checkout_commit, parse_lengths, wait_for
from sparsekv.bench.quality_file import (
    LOST,
    Knobs,
    MethodNote,
    QualityCell,
    QualityFile,
    QualityRun,
    RunNote,
    markdown,
    merged,
)
from sparsekv.bench.quality_methods import PLAN, Inputs, Method, Rule, Run, check_shares
from sparsekv.bench.suite import SuiteSamples, check_continued, texts_of
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.evaluation.batches import prompts_at_once
from sparsekv.planner.evaluation.predictions import (
    DENSE,
    PlanMode,
    Prefilled,
    goes_on,
    prefill,
    until_end,
    without_plans,
)
from sparsekv.planner.evaluation.results import Spent
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profile_data import check_model as check_profile
from sparsekv.planner.records import RunRecord, only_run, read_measured
from sparsekv.planner.tasks import Kit, Sample, Split, make_sample, matches, prepare
from sparsekv.plans.errors import SparseKVError
from sparsekv.plans.files import executed_digest, load_plan
from sparsekv.plans.phases import DecodeBucket, DecodePlan
from sparsekv.plans.schema import Plan, check_model
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.cache import handed_over
from sparsekv.runtime.hf.describe import cache_inputs
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.model_config import device_name

SCORED = 32  # tokens of dense's text that divergence is measured on
AGAIN = 100  # samples of a task that lost


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Holds what a method generated, or read: picks [B, G] and the logits of the first T rows [B, T, V], and times."""

    picked_BG: torch.Tensor
    logits_BTV: torch.Tensor
    step_seconds: float | None


@torch.no_grad()
def followed(model: Any, prompts: Prefilled, tokens: int, scored: int, text_BG: torch.Tensor | None = None) -> Text:
    """Goes on behind prompts by so many tokens at most: by a text, or greedily until all rows have ended."""
    logits_BV = prompts.logits_BKV[:, -1]
    rows, picked, seconds = [logits_BV.float()], [logits_BV.argmax(-1)], list[float]()
    going_B1 = goes_on(model, picked[0][:, None])
    while len(picked) < tokens and (text_BG is not None or bool(going_B1.any())):
        fed_B = picked[-1] if text_BG is None else text_BG[:, len(picked) - 1]
        began = time.perf_counter()
        with without_plans():
            logits_BV = model(
                input_ids=fed_B[:, None], use_cache=True, **cache_inputs(model, prompts.cache, fed_B[:, None])
            ).logits[:, -1]
        wait_for(logits_BV.device)
        seconds.append(time.perf_counter() - began)
        picked.append(logits_BV.argmax(-1))
        if len(rows) < scored:
            rows.append(logits_BV.float())
        going_B1 = going_B1 & goes_on(model, picked[-1][:, None])
    return Text(torch.stack(picked, 1), torch.stack(rows, 1), float(np.median(seconds)) if seconds else None)


@dataclass(slots=True)
class Table:
    """A run of the command.

    Attributes:
        note: makes the note of this run, which is added after each batch.
        until: when to stop, by the monotonic clock.
        untimed: leave times out.
        known: what is added with the next batch.
    """

    inputs: Inputs
    asked: SuiteSamples
    found: QualityFile
    note: Callable[[], RunNote]
    tell: Callable[[str], None]
    until: float = float("inf")
    tasks: tuple[str, ...] | None = None
    untimed: bool = False
    kit: Kit | None = None
    methods: dict[int, dict[str, Method]] = field(default_factory=dict)
    known: list[RunRecord] = field(default_factory=list)

    def run(self, peer_lengths: Sequence[int]) -> bool:
        """Runs what is not there yet; returns whether all of it is."""
        kit = self.kit or prepare(self.inputs.loaded.tokenizer, Split.EVALUATION)
        self.kit = kit.shared_by(tuple(ruler_suite.RULER_SUITE), self.asked.lengths)
        self.asked.check_fit(self.kit)
        return all(self._all(stage) for stage in self._stages(peer_lengths))

    def _stages(self, peer_lengths: Sequence[int]) -> Iterator[list[tuple[int, str, list[str], int]]]:
        """(length, task, methods, samples), each stage planned when the one before is done."""
        lengths, own = self.asked.lengths, self.inputs.own
        for length in lengths:
            self._know(length, self.inputs.of_plan(length))
        yield self._of([n for n in lengths if n not in peer_lengths], [PLAN])
        yield self._of(peer_lengths, own)
        for length in peer_lengths:
            self._know(length, self.inputs.evictions(length))
            self._know(length, self.inputs.decode_peers(length, self.tell))
            known = self.found.all(Knobs).get(length)
            methods, values = self.inputs.prefill_peers(length, known.values if known else {}, self.tell)
            self._know(length, methods)
            if known is None or values != known.values:  # which may have taken longer than a batch
                self._add(Knobs(length=length, values=values))
            yield self._of([length], [*self.methods[length]])
        yield self._again(lambda name: name in own)
        yield self._again(lambda name: name not in own)

    def _of(self, lengths: Sequence[int], names: Sequence[str]) -> list[tuple[int, str, list[str], int]]:
        unique = list(dict.fromkeys(names))
        return [
            (length, task, [name for name in unique if name in self.methods[length]], self.asked.samples)
            for length, task in product(lengths, self.tasks or ruler_suite.RULER_SUITE)
        ]

    def _again(self, chosen: Callable[[str], bool]) -> list[tuple[int, str, list[str], int]]:
        found: dict[tuple[int, str], list[str]] = {}
        for name, task, length in self.found.by_key:
            known = name in self.methods.get(length, {})
            asked = task in (self.tasks or ruler_suite.RULER_SUITE)
            if known and asked and chosen(name) and self.found.loss(name, task, length) >= LOST:
                found.setdefault((length, task), []).append(name)
        return [(length, task, names, max(AGAIN, self.asked.samples)) for (length, task), names in found.items()]

    def _know(self, length: int, methods: Mapping[str, Method]) -> None:
        self.methods.setdefault(length, {}).update(methods)
        notes = (MethodNote(name=k, length=length, group=m.group, setting=m.setting) for k, m in methods.items())
        self.known += [note for note in notes if self.found.all(MethodNote).get(note.key) != note]

    def _add(self, *records: RunRecord) -> None:
        self.found.add(*self.known, *records, self.note())
        self.known = []

    def _all(self, cells: Sequence[tuple[int, str, list[str], int]]) -> bool:
        for length, task, names, count in cells:
            while self._missing(length, task, names, count):
                if time.monotonic() > self.until:
                    return False
                self._next(length, task, names, count)
        return True

    def _missing(self, length: int, task: str, names: Sequence[str], count: int) -> bool:
        return any(self.found.samples((name, task, length)) < count for name in (DENSE, *names))

    def _recorded(self, cell: QualityCell) -> QualityCell:
        own = cell.model_copy(update={"plan": _digests(self.inputs).get(cell.method)})
        return self.found.with_earlier(own.untimed() if self.untimed else own)

    def _next(self, length: int, task: str, names: Sequence[str], count: int) -> None:
        """One batch: the first samples that some method lacks, for all methods that lack the same."""
        have = {name: self.found.samples((name, task, length)) for name in (DENSE, *names)}
        first = min(have.values())
        lacking = [name for name, samples in have.items() if samples == first]
        last = min([count, *(samples for samples in have.values() if samples > first)])
        at_once = self.asked.batch or prompts_at_once(self.inputs.loaded.model, length)
        size = -(-(last - first) // -(-(last - first) // at_once))  # batches of one size
        assert self.kit is not None, "made by run"
        indices = range(first, min(last, first + size))
        samples = [
            make_sample(ruler_suite.RULER_SUITE[task], self.kit, length, self.asked.seed, index) for index in indices
        ]
        own = {name: self.methods[length][name] for name in lacking if name != DENSE}
        began = time.monotonic()
        batch = Batch.of(self.inputs.loaded, samples, self.asked.prefill_chunk)
        self._add(*[self._recorded(cell) for name, cell in batch.cells(own) if name in lacking])
        spent = time.monotonic() - began
        self.tell(f"{task}, {format_length(length)}: {'; '.join(lacking)}; {first + len(samples)}, {spent:.1f} s")


@dataclass(slots=True, eq=False)
class Batch:
    """Samples of one task and length, and dense's text behind them."""

    loaded: LoadedModel
    samples: Sequence[Sample]
    ids_BS: torch.Tensor
    chunk: int | None
    tokens: int
    dense: Text | None = None
    log_BTV: torch.Tensor | None = None

    @classmethod
    def of(cls, loaded: LoadedModel, samples: Sequence[Sample], chunk: int | None) -> Batch:
        """Prompts that are equally long."""
        ids_BS = torch.from_numpy(np.stack([sample.prompt_ids for sample in samples]).astype(np.int64))
        tokens = samples[0].length - ids_BS.shape[1]
        return cls(loaded, samples, ids_BS.to(loaded.model.device), chunk, tokens)

    @torch.no_grad()
    def cells(self, methods: Mapping[str, Method]) -> Iterator[tuple[str, QualityCell]]:
        """Yields methods that go on from dense's prefill, dense, then those that prefill by themselves. Dense is timed
        where nothing is observed beside it."""
        rules = {name: method for name, method in methods.items() if isinstance(method, Rule)}
        runs = {name: method for name, method in methods.items() if isinstance(method, Run)}
        shared = {
            name: run for name, run in runs.items() if isinstance(run.mode, PlanMode) and run.mode.prefilled_by == DENSE
        }
        model = self.loaded.model
        observes = tuple(sorted({one for rule in rules.values() for one in rule.observes}))
        self._warm_up()
        with self._timed() as seconds, observed_prompt(model, self.ids_BS, observes, self.chunk) as (seen, steps):
            wait_for(model.device)
            prefill_seconds = None if observes else seconds()
            check_numbers(model, "logits", seen.prompts.logits_BKV)
            self.dense = followed(model, deepcopy(seen.prompts), self.tokens, SCORED)
            self.log_BTV = self.dense.logits_BTV.log_softmax(-1)
            for name, rule in rules.items():
                yield name, self._of_rule(name, rule, seen, steps)
            logits_BKV, layers = seen.prompts.logits_BKV, list(handed_over(copy(seen.prompts.cache), seen.past))
        del seen, steps
        if not observes:
            timed = replace(self.dense, step_seconds=self._dense_step(logits_BKV, layers))
            yield DENSE, self._cell(DENSE, timed, self.dense.picked_BG, Spent(), 1.0, prefill_seconds)
        else:
            yield DENSE, self._cell(DENSE, self.dense, self.dense.picked_BG, Spent(), 1.0, None, is_timed=False)
        for name, run in shared.items():
            yield name, self._of_decode(name, run, logits_BKV, layers)
        del layers
        for name, run in runs.items():
            if name not in shared:
                yield name, self._of_run(name, run)

    def _warm_up(self) -> None:
        """Lets cuDNN make its plan for this shape."""
        if self.ids_BS.is_cuda:
            group, (batch, length) = self.loaded.info.attention[0], self.ids_BS.shape
            new = partial(torch.zeros, dtype=self.loaded.model.dtype, device=self.ids_BS.device)
            q_BHSD, k_BGSD = (new(batch, heads, length, group.head_dim) for heads in (group.heads, group.kv_heads))
            dense_attention(q_BHSD, k_BGSD, k_BGSD, Chunk.uniform(batch, 0, length), scale=1.0)

    def _dense_step(self, logits_BKV: torch.Tensor, layers: list[Any]) -> float | None:
        """Seconds of a dense step of this runtime, captured where steps of a plan are."""
        assert self.dense is not None
        bucket = DecodeBucket(up_to=None, dense=True)
        plan = Plan(status="unverified", model=self.loaded.info, decode=DecodePlan(lengths=(bucket,)))
        count = self.dense.logits_BTV.shape[1]
        with PlanMode(plan, "decode").applied(self.loaded.model) as handle:
            prompts = Prefilled(logits_BKV, handle.cache_of(iter(layers)))
            return followed(self.loaded.model, prompts, count, count, self.dense.picked_BG).step_seconds

    def _of_rule(self, name: str, rule: Rule, seen: ObservedPrompt, steps: RuleSteps) -> QualityCell:
        steps.rule, cached = rule.made(seen)
        steps.spent = Spent()
        read, picked_BG = self._read(lambda last: deepcopy(seen.prompts))
        return self._cell(name, read, picked_BG, steps.spent, cached, None, is_timed=False)

    def _of_decode(self, name: str, run: Run, logits_BKV: torch.Tensor, layers: list[Any]) -> QualityCell:
        assert isinstance(run.mode, PlanMode)
        with run.mode.applied(self.loaded.model) as handle:
            read, picked_BG = self._read(lambda last: Prefilled(logits_BKV, handle.cache_of(iter(layers))))
            stats = handle.stats()
            spent = Spent(attended=stats.decode_tokens_attended, cached=stats.decode_tokens_cached)
            return self._cell(name, read, picked_BG, spent, 1.0, None)

    def _of_run(self, name: str, run: Run) -> QualityCell:
        model = self.loaded.model
        with run.mode.running(model) as spent, self._timed() as seconds:
            prompts = prefill(model, self.ids_BS, self.chunk)
            wait_for(model.device)
            prefill_seconds = seconds()
            read, picked_BG = self._read(lambda last: prompts if last else deepcopy(prompts))
            first, is_timed = 1 if run.mode.dense_prefill else 0, isinstance(run.mode, PlanMode)
            timed = prefill_seconds if is_timed else None
            return self._cell(name, read, picked_BG, spent(), 1.0, timed, first=first, is_timed=is_timed)

    @contextmanager
    def _timed(self) -> Iterator[Callable[[], float]]:
        """Seconds of a prompt since the beginning of the block."""
        wait_for(self.loaded.model.device)
        began = time.perf_counter()
        yield lambda: (time.perf_counter() - began) / len(self.samples)

    def _read(self, prompts: Callable[[bool], Prefilled]) -> tuple[Text, torch.Tensor]:
        """Reads dense's text, and generates where a row picked otherwise or its text goes on.

        Args:
            prompts: gives a cache of its own each time; the argument says whether it is the last time.
        """
        assert self.dense is not None
        dense_BG, model = self.dense.picked_BG, self.loaded.model
        count = self.dense.logits_BTV.shape[1]
        read = followed(model, prompts(False), count, count, dense_BG)
        same_BT = (read.picked_BG == dense_BG[:, :count]) | ~until_end(model, dense_BG)[:, :count]
        if count == dense_BG.shape[1] and bool(same_BT.all()):
            return read, dense_BG
        return read, followed(model, prompts(True), self.tokens, 1).picked_BG

    def _cell(
        self, name: str, read: Text, picked_BG: torch.Tensor, spent: Spent, cached: float, seconds: float | None, *,
        first: int = 1, is_timed: bool = True,
    ) -> QualityCell:  # fmt: skip
        """Args: first: the first row of the text that the method computes itself."""
        both = list(zip(texts_of(self.loaded, picked_BG), self.samples, strict=True))
        return QualityCell(
            method=name,
            device=device_name(self.loaded.model.device),
            task=self.samples[0].task,
            length=self.samples[0].length,
            recall=tuple(ruler_suite.recall(text, sample.answer) for text, sample in both),
            exact=tuple(float(matches(text, sample.answer)) for text, sample in both),
            kl=tuple(self._divergence(read.logits_BTV, first)),
            prefill_density=spent.density,
            decode_share=spent.read,
            steps=picked_BG.shape[1] + read.picked_BG.shape[1] - 2,
            cached=cached,
            prefill_seconds=seconds,
            step_seconds=read.step_seconds if is_timed else None,
        )

    def _divergence(self, logits_BTV: torch.Tensor, first: int) -> list[float]:
        """KL(dense || method) of each sample, over the rows of dense's text up to its end; 0 where it has none."""
        assert self.dense is not None
        assert self.log_BTV is not None
        log_BTV, dense_BTV = logits_BTV[:, first:].log_softmax(-1), self.log_BTV[:, first:]
        counted_BT = until_end(self.loaded.model, self.dense.picked_BG)[:, first : self.log_BTV.shape[1]]
        kl_BT = (dense_BTV.exp() * (dense_BTV - log_BTV)).sum(-1).double().clamp(min=0.0) * counted_BT
        mean_B: list[float] = (kl_BT.sum(1) / counted_BT.sum(1).clamp(min=1)).tolist()
        return mean_B


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, or goes on with, a table; prints it as far as it is complete. Exits with 1 while something is missing."""
    args = _arguments(argv)
    if args.show is not None:
        print(*markdown(QualityFile.read(QualityRun, args.show)), sep="\n")
        return 0
    if args.merge:
        whole = merged([QualityFile.read(QualityRun, path) for path in args.merge])
        whole.add(*(cell.untimed() for cell in [*whole.by_key.values()] if args.untimed))
        whole.write(args.out)
        return 0
    with only_run(args.out):
        return _run(args, " ".join(["python -m sparsekv.bench.quality_table", *map(shlex.quote, argv or sys.argv[1:])]))


def _run(args: argparse.Namespace, command: str) -> int:
    clock, began = time.monotonic(), datetime.now().isoformat()
    inputs, asked = _inputs(args)
    found, earlier = _begun(inputs, asked, args), time.monotonic()
    device, commit = device_name(inputs.loaded.model.device), args.commit or checkout_commit() or "unknown"

    def note() -> RunNote:
        seconds = round(time.monotonic() - clock, 1)
        return RunNote(command=command, commit=commit, device=device, began=began, seconds=seconds)

    table = Table(inputs, asked, found, note, lambda line: print(line, file=sys.stderr, flush=True))
    table.until, table.tasks, table.untimed = earlier + args.max_seconds, args.tasks, args.untimed
    is_whole = table.run([n for n in asked.lengths if n in args.peer_lengths])
    if args.out.exists():
        print(*markdown(found), sep="\n")
    if not is_whole:
        print(f"time is over: the same command goes on from {args.out}", file=sys.stderr)
    return 0 if is_whole else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a file; nothing is run")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put parts of a table into --out")
    parser.add_argument("--plan", type=Path, help="ours; others are held to its density and share")
    parser.add_argument("--evict", action="append", default=[], metavar="SHARE=FILE", help="a plan of `plan --retain`")
    parser.add_argument("--profile", type=Path, help="of `plan --profile-out`, for OmniKV and Kascade")
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("4k,8k,16k,32k"))
    parser.add_argument("--peer-lengths", type=parse_lengths, default=parse_lengths("16k,32k"), metavar="LENGTHS")
    parser.add_argument("--tasks", type=lambda text: tuple(filter(None, text.split(","))), help="some of RULER's")
    parser.add_argument(
        "--untimed", action="store_true", help="leave all times out of --out: something else ran on the device"
    )
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--chunk", type=int, help="most tokens of a prompt at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="after which no batch begins")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--commit", help="where the folder is no checkout")
    args = parser.parse_args(argv)
    if args.show is None and not (args.out and (args.merge or (args.model and args.plan))):
        parser.error("expected MODEL, --plan FILE and --out FILE, or --merge FILES --out FILE, or --show FILE alone")
    if unknown := set(args.tasks or ()) - ruler_suite.RULER_SUITE.keys():
        parser.error(f"expected --tasks among {', '.join(ruler_suite.RULER_SUITE)}, found {', '.join(sorted(unknown))}")
    return args


def _inputs(args: argparse.Namespace) -> tuple[Inputs, SuiteSamples]:
    """Everything that is read, before anything is run."""
    plan, evicting = load_plan(args.plan), {k: load_plan(Path(v)) for k, v in check_shares(args.evict).items()}
    profile = read_measured(Profile, args.profile) if args.profile else None
    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    for one in (plan, *evicting.values()):
        check_model(one, loaded.info)
    if profile is not None:
        check_profile(profile, loaded.info, weights=False)
    asked = SuiteSamples(args.lengths, args.samples, args.batch, args.seed, args.chunk)
    return Inputs(loaded, plan, evicting, profile, args.backend, args.seed, args.chunk), asked


def _begun(inputs: Inputs, asked: SuiteSamples, args: argparse.Namespace) -> QualityFile:
    """Returns what an earlier run has left, if it was the same table; else an empty one."""
    settings = QualityRun.of(
        inputs.loaded,
        seed=asked.seed,
        samples=asked.samples,
        backend=inputs.backend,
        prefill_chunk=inputs.chunk,
    )
    found = QualityFile.of(settings, args.out)
    check_continued(found, {}, _digests(inputs), QualityCell)
    return found


def _digests(inputs: Inputs) -> dict[str, str]:
    """The digests of our plans by the names of methods."""
    plans = {PLAN: inputs.plan} | {f"plan, evicting to {name}": plan for name, plan in inputs.evicting.items()}
    return {name: executed_digest(plan) for name, plan in plans.items()}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SparseKVError as error:
        sys.exit(f"error: {error}")

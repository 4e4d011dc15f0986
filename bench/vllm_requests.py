"""Many requests of random lengths through vLLM's engine by a plan, some of them cancelled and some preempted, against
the same requests one at a time.

    VLLM_CPU_KVCACHE_SPACE=4 python -m sparsekv.bench.vllm_requests [--requests 2000] [--at-once 64] [--lengths 256,8k]
        [--step 4k] [--plan plan.yaml] [--dense] [--exact] [--tensor-parallel N] [--speculative ngram|draft_model|eagle]
        [--model MODEL] [--answers FILE] [--beside FILE]

In an environment with vLLM; on a GPU, VLLM_USE_FLASHINFER_SAMPLER=0 saves minutes of compiling. The prompts are
retrieval tasks of the reference model; each answer goes on to 48 tokens, and is judged by what stands before its end.
The cache has room for six of the longest prompts, so that the engine preempts. One request in ten is cancelled: before
its first step, amid its prompt, or amid its answer. A sample of those that were answered is asked again, one at a time
in the same engine with nothing cached. Prints a line of JSON for each; without a plan, one is made by hand that is
sparse from 512 tokens on, in prefill and in decode. Prefixes are cached, prompts longer than --step are cut, and on a
GPU steps that only decode are captured, as a server has it; prompts beyond the model's context stretch it. `--dense`
gives the share of right answers, and the memory, that a plan is held against; memory that grows from round to round of
the same requests is a leak. `--speculative` has others draft three tokens at a time: by look-up, by the model itself or
by a random layer (EAGLE); compare the share that is accepted, which has its 95% interval, with that of `--dense`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest

from sparsekv.bench.hand_plans import HandDecode, dense_up_to
from sparsekv.bench.harness import parse_lengths
from sparsekv.bench.random_model import write_eagle
from sparsekv.bench.serve import by_look_up
from sparsekv.bench.vllm_engines import COMPARING, asking_for_ours, greedy, make_engine
from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_sample, matches, prepare
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import parse_length
from sparsekv.runtime.hf.load import load_config
from sparsekv.runtime.model_config import describe_config
from sparsekv.runtime.settings import preset_vllm

MODEL = "tiny-retriever"
FILTERS = (0, 7)  # its filter layers, as `plan` finds them
WHEN = ("before", "prompt", "answer")  # a request is cancelled
CANCELLED = 0.1  # of the requests
NEW = 48  # tokens of an answer
DRAFTED = 3  # tokens at a time
AMID = 10  # tokens of an answer have come when it is cancelled amid it
ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and when it is cancelled, if at all."""

    name: str
    sample: Sample
    cancel: str | None

    @property
    def prompt(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self.sample.prompt_ids.tolist()}


@dataclass
class Served:
    """Holds what became of requests that were served together."""

    answers: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of the same answers, and what follows their end
    cancelled: Counter[str] = field(default_factory=Counter)
    memory: dict[str, int] = field(default_factory=dict)  # bytes at the end


def main() -> None:
    """Serves all requests together, then a part of them one at a time."""
    args = _arguments()
    llm = _engine(args)
    from sparsekv.runtime.vllm.engine_host import reset_stats

    requests = _requests(llm, args)
    _serve(llm, requests[: args.at_once])  # what is loaded once is no growth
    reset_stats(llm)
    before, start = _preempted(llm), time.perf_counter()
    rounds = [_serve(llm, requests) for _ in range(args.rounds)]
    together, served = time.perf_counter() - start, rounds[0]
    told = {
        "requests": len(requests),
        "finished": len(served.answers),
        "cancelled": served.cancelled,
        "preempted": _preempted(llm) - before,
        "right": _share(requests, served.answers),
        **_counted(llm, args.dense),
        **({"rank_differences": llm.collective_rpc("rank_differences")[0]} if _compares(args) else {}),
        **_accepted(llm),
        "free_pages": _scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks(),
        "memory_by_round": [one.memory for one in rounds],
        "seconds": round(together, 1),
        **({} if args.beside is None else _beside(served.tokens, args.beside)),
    }
    print(json.dumps(told), flush=True)
    if args.answers is not None:
        args.answers.write_text(json.dumps(served.tokens))
    print(json.dumps(_alone(llm, requests, served, args)), flush=True)


def _engine(args: argparse.Namespace) -> Any:
    preset_vllm()
    from sparsekv.runtime.vllm.internals import platform

    high, source = args.lengths[1], resolve_model(args.model).path_or_id
    longest = max(load_config(args.model).max_position_embeddings, high + 64)
    with tempfile.TemporaryDirectory() as folder:
        ours: dict[str, Any] = {"dense": True}
        if not args.dense:
            plan = str(args.plan or _write_hand_plan(Path(folder), high))
            ours = {"plan": plan}
        if args.exact:
            ours |= {"exact": True, "draft": DRAFTED, "allow_untested": True}
        llm = make_engine(
            source,
            dtype=args.dtype,
            enforce_eager=not ON_GPU,
            max_model_len=high + 64,
            max_num_batched_tokens=args.step,
            max_num_seqs=args.at_once,
            num_gpu_blocks_override=6 * (high + NEW) // platform.page + 2,
            disable_log_stats=False,
            tensor_parallel_size=args.tensor_parallel,
            additional_config={"sparsekv": ours},
            **({"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30} if ON_GPU else {}),
            **({} if args.dense else asking_for_ours()),
            **({"worker_cls": COMPARING} if _compares(args) else {}),
            **_speculating(args.speculative, source, longest, Path(folder)),
            # Exact output takes the model's files as they are.
            **({} if args.exact else {"hf_overrides": {"max_position_embeddings": longest}}),
        )
    if args.exact:  # whether it pays or not
        _scheduler(llm).drafting.next = lambda lengths: DRAFTED
    return llm


def _compares(args: argparse.Namespace) -> bool:
    """True where ranks are compared; exact output has a worker of its own."""
    return args.tensor_parallel > 1 and not (args.dense or args.exact)


def _speculating(method: str | None, model: str, longest: int, folder: Path) -> dict[str, Any]:
    """Returns the settings of an engine of a model for which others draft tokens."""
    if method is None:
        return {}
    if method == "ngram":
        return {"speculative_config": by_look_up(DRAFTED)}
    config = load_config(model)
    config.max_position_embeddings = longest
    drafter = str(write_eagle(config, folder)) if method == "eagle" else model
    return {"speculative_config": {"method": method, "num_speculative_tokens": DRAFTED, "model": drafter}}


def _beside(found: dict[str, list[int]], dense: dict[str, list[int]]) -> dict[str, Any]:
    """Returns how many answers are another run's, and how many part in 1,000 tokens up to there."""
    both = [(found[name], dense[name]) for name in found.keys() & dense.keys()]
    parting = [next((at for at, (x, y) in enumerate(zip_longest(*two)) if x != y), None) for two in both]
    alike = sum(len(one) if at is None else at for (one, _), at in zip(both, parting, strict=True))
    parted = sum(at is not None for at in parting)
    return {"beside": len(both), "same": len(both) - parted, "parting_per_1000": round(1e3 * parted / max(1, alike), 3)}


def _accepted(llm: Any) -> dict[str, Any]:
    """Returns how many tokens others drafted, and the accepted share with its 95% interval."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafted, accepted = (int(found.get(f"vllm:spec_decode_num_{name}_tokens", 0)) for name in ("draft", "accepted"))
    if not drafted:
        return {}
    interval = binomtest(accepted, drafted).proportion_ci(method="wilson")
    return {"drafted": drafted, "accepted": round(accepted / drafted, 4), "interval": [round(x, 4) for x in interval]}


def _write_hand_plan(folder: Path, longest: int) -> Path:
    info = describe_config(load_config(MODEL), MODEL)
    pattern = VerticalSlash(vertical=tokens(256), slash=tokens(1024), last_q=64, max_tiles=fraction(0.25))
    heads = tuple(
        HeadGroup(layer=layer, heads=tuple(range(group.heads)), pattern=pattern)
        for group in info.attention
        for layer in group.layers
    )
    prefill = PrefillPlan(tile=TileShape(query=64, key=64), lengths=(PrefillBucket(up_to=None, heads=heads),))
    decode = HandDecode(filters=FILTERS).plans(info, longest)[0]["last"].decode
    plan = Plan(status="unverified", model=info, prefill=prefill, decode=decode)
    write_plan(dense_up_to(plan, 512), folder / "sparsekv.yaml")
    return folder / "sparsekv.yaml"


def _counted(llm: Any, dense: bool) -> dict[str, float]:
    """Since the last reset: of prefill, and tokens that were decoded sparse."""
    from sparsekv.runtime.vllm.engine_host import serving_stats

    if dense:
        return {"density": 1.0, "decoded_sparse": 0, "failures": 0}
    stats = serving_stats(llm)
    counted = {"density": round(stats.prefill_density or 0.0, 4), "decoded_sparse": stats.decode_sparse}
    return counted | {"failures": stats.failures}


def _requests(llm: Any, args: argparse.Namespace) -> list[Request]:
    kit, source = prepare(llm.get_tokenizer(), Split.EVALUATION), random.Random(args.seed)

    def draw(number: int) -> Request:
        task, length = TASKS[source.choice(RETRIEVAL_TASKS)], source.randint(*args.lengths)
        cancel = source.choice(WHEN) if source.random() < CANCELLED else None
        return Request(str(number), make_sample(task, kit, length, args.seed, number), cancel)

    return [draw(number) for number in range(args.requests)]


def _serve(llm: Any, requests: Sequence[Request]) -> Served:
    """Serves all with nothing cached, a new one as soon as one of `max_num_seqs` has ended."""
    llm.reset_prefix_cache()
    engine, at_once = llm.llm_engine, llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    waiting, inside, served = deque(requests), dict[str, Request](), Served()

    def cancel(name: str, when: str) -> None:
        engine.abort_request([name])
        del inside[name]
        served.cancelled[when] += 1

    while waiting or inside:
        while waiting and len(inside) < at_once:
            one = waiting.popleft()
            inside[one.name] = one
            engine.add_request(one.name, one.prompt, greedy(NEW))
            if one.cancel == "before":
                cancel(one.name, "before")
        for output in engine.step():
            if output.finished:
                served.answers[output.request_id] = _answer(llm, output)
                served.tokens[output.request_id] = list(output.outputs[0].token_ids)
                del inside[output.request_id]
        for name, state in _states(llm).items():
            if name in inside and inside[name].cancel == state:
                cancel(name, state)
    served.memory = _memory()
    return served


def _states(llm: Any) -> dict[str, str]:
    """Returns which requests are amid their prompt, and which amid their answer. The engine adds a dash and a number of
    its own to their names."""
    done = {
        request.request_id.split("-")[0]: request.num_computed_tokens - request.num_prompt_tokens
        for request in _scheduler(llm).running
    }
    return {name: "prompt" if ahead < 0 else "answer" for name, ahead in done.items() if ahead < 0 or ahead >= AMID}


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler  # in this process


def _alone(llm: Any, requests: Sequence[Request], served: Served, args: argparse.Namespace) -> dict[str, Any]:
    """The same requests, one at a time."""
    from sparsekv.runtime.vllm.engine_host import reset_stats

    answered = [request for request in requests if request.name in served.answers]
    again = random.Random(args.seed).sample(answered, min(args.alone, len(answered)))
    reset_stats(llm)
    answers, start = {}, time.perf_counter()
    for one in again:
        llm.reset_prefix_cache()
        (output,) = llm.generate([one.prompt], greedy(NEW), use_tqdm=False)
        answers[one.name] = _answer(llm, output)
    return {
        "compared": len(again),
        "right_together": _share(again, served.answers),
        "right_alone": _share(again, answers),
        **{f"{name}_alone": count for name, count in _counted(llm, args.dense).items()},
        "seconds_alone": round(time.perf_counter() - start, 1),
    }


def _share(requests: Sequence[Request], answers: dict[str, str]) -> float:
    """Returns the share of right answers among those that there are."""
    right = [matches(answers[one.name], one.sample.answer) for one in requests if one.name in answers]
    return round(sum(right) / len(right), 4)


def _answer(llm: Any, output: Any) -> str:
    tokenizer, ids = llm.get_tokenizer(), list(output.outputs[0].token_ids)
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True))


def _preempted(llm: Any) -> int:
    return int(next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"))


def _memory() -> dict[str, int]:
    """Bytes: resident in this process, and on a GPU held by torch and in use there altogether."""
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
    if not ON_GPU:
        return {"resident": resident}
    free, total = torch.cuda.mem_get_info()
    return {"resident": resident, "reserved": torch.cuda.memory_reserved(), "device": total - free}


def _answers(name: str) -> dict[str, list[int]]:
    """Returns the answers of a file that `--answers` wrote."""
    try:
        found: dict[str, list[int]] = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a file that --answers wrote, found none: {error}") from None
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64, help="requests that the engine has at a time")
    parser.add_argument("--alone", type=int, default=500, help="requests that are asked again, one at a time")
    parser.add_argument("--lengths", type=parse_lengths, default="256,8k", help="shortest and longest prompt")
    parser.add_argument("--step", type=parse_length, default="4k", help="tokens that the engine computes in a step")
    parser.add_argument("--model", default=MODEL, help="alias, hub id or folder; any other than this one needs --plan")
    parser.add_argument("--plan", type=Path, help="one made by hand without it")
    parser.add_argument("--dense", action="store_true", help="without a plan")
    parser.add_argument("--exact", action="store_true", help="the plan drafts, dense attention verifies")
    parser.add_argument("--answers", type=Path, help="where the tokens of the answers go")
    parser.add_argument("--beside", type=_answers, help="such a file, of the same requests, to compare with")
    parser.add_argument("--speculative", choices=("ngram", "draft_model", "eagle"), help="who drafts tokens")
    parser.add_argument("--rounds", type=int, default=1, help="how often all are served together")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks, whose choices are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16" if ON_GPU else "float32")
    args = parser.parse_args()
    if args.model != MODEL and not (args.plan or args.dense):
        parser.error(f"expected --plan with a --model that is not {MODEL}, found none: the one made by hand is of that")
    if args.exact and args.dense:
        parser.error("expected --exact or --dense, found both: it is the plan that drafts; leave one out")
    if args.exact and args.speculative:
        parser.error("expected --exact or --speculative, found both: each says who drafts tokens; leave one out")
    if args.speculative == "eagle" and args.model != MODEL:
        parser.error(f"expected --speculative ngram or draft_model, found eagle: its random layer is of {MODEL}")
    if args.answers is not None and not args.answers.parent.is_dir():
        parser.error(f"expected a folder for --answers, found none at {args.answers.parent}; make it")
    return args


if __name__ == "__main__":
    main()

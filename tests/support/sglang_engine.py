"""An engine of SGLang on the CPU in this process: its scheduler and its loops, without the processes around them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan

LONGEST = 3072
BUDGET = 512  # tokens of a chunk
SLOTS = 8192
NEW = 8  # tokens of an answer
STUBS = [str(Path(__file__).parent / name) for name in ("no_torchvision", "sglang_stubs")]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": LONGEST,
    "max_total_tokens": SLOTS,
    "chunked_prefill_size": BUDGET,
    "max_running_requests": 8,
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.1,
    "log_level": "warning",
}


@dataclass(slots=True)
class Asked:
    """A request: of which prompt, before which step it comes, and before which one it is taken back, if any."""

    prompt: Sequence[int]
    new: int = NEW
    at: int = 0
    aborted: int | None = None
    with_logprobs: bool = True  # SGLang mixes no prompts with rows that decode if one is to tell them
    cuts: list[list[int]] = field(default_factory=list)  # ends of its chunks, anew each time that it is computed
    starts: list[int] = field(default_factory=list)  # the tokens that were cached by then
    req: Any = None  # SGLang's, once it came

    @property
    def tokens(self) -> list[int]:
        return list(self.req.output_ids)

    @property
    def logprobs(self) -> list[float]:
        return list(self.req.logprob.output_token_logprobs_val)


def plan_of(backend: Any) -> dict[str, Any]:
    """The attributes by which a backend has a plan, for another one."""
    return {name: value for name, value in vars(backend).items() if name.startswith("plan_") and name != "plan_step"}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return Random(f"{length} {seed}").choices(range(1, 128), k=length)


class Engine:
    """One scheduler of a process, the one of a rank where there are several: all are given the same requests."""

    def __init__(self, folder: Path, rank: int = 0, **settings: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        arguments = ServerArgs(model_path=str(folder), **(SETTINGS | {"enable_mixed_chunk": True} | settings))
        arguments.resolve_once()
        ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=rank, pp_rank=0), dp_rank=None, gpu_id=0)
        publish(arguments, role="scheduler", ranks=ranks)
        self.scheduler = Scheduler(arguments, PortArgs.init_new(arguments))
        self.runner = self.scheduler.tp_worker.model_runner
        silent = SimpleNamespace(send_output=lambda *given: None)
        self.scheduler.output_streamer.send_to_detokenizer = silent
        self.scheduler.ipc_channels.send_to_tokenizer.send_output = silent.send_output
        self.scheduler.ingest_requests = self._ingest
        self._run_batch: Callable[..., Any] = self.scheduler.run_batch
        self.scheduler.run_batch = self._run
        self._asked: dict[str, Asked] = {}

    def backend(self, plan: Plan | None, folder: Path, required: bool = True) -> Any:
        """An attention backend of this engine with a plan beside its model, or without one."""
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        from sparsekv.runtime.sglang.engine import with_plan

        backend = TorchNativeAttnBackend(self.runner)
        if plan is None:
            return backend
        write_plan(plan, folder / "sparsekv.yaml")
        model, self.runner.model_config.model_path = self.runner.model_config.model_path, str(folder)
        try:
            return with_plan(backend, self.runner, required)
        finally:
            self.runner.model_config.model_path = model

    def use(self, backend: Any) -> None:
        """Has another attention backend in steps to come, and nothing cached."""
        self.scheduler.flush_cache()
        self.runner.attn_backend = backend

    def answer(self, requests: Sequence[Asked], overlap: bool = True) -> Sequence[Asked]:
        """The requests, once all are answered."""
        self.mixed = 0  # steps of prompts and rows that decode
        self._step, self._asked = 0, {str(number): request for number, request in enumerate(requests)}
        self.scheduler.gracefully_exit, self.scheduler.enable_overlap = False, overlap
        self.scheduler.run_event_loop()
        return requests

    def _ingest(self, *given: Any, **named: Any) -> list[Any]:
        """In place of what comes from other processes: the requests of a step. A loop ends when all are answered."""
        from sglang.srt.managers.io_struct import AbortReq

        for name, request in self._asked.items():
            if request.at == self._step:
                self.scheduler.process_input_requests([_request(name, request)])
                request.req = self.scheduler.waiting_queue[-1]
            if request.aborted == self._step:
                self.scheduler.process_input_requests([AbortReq(rid=name)])
        self._step += 1
        came = all(request.req is not None for request in self._asked.values())
        self.scheduler.gracefully_exit = came and self.scheduler.is_fully_idle()
        return []

    def _run(self, batch: Any, *given: Any, **named: Any) -> Any:
        self.mixed += batch.forward_mode.is_mixed()
        if batch.forward_mode.is_extend():
            decoding = {id(req) for req in batch.decoding_reqs or ()}
            for req, past, rows in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
                if id(req) not in decoding:
                    request = self._asked[req.rid]
                    if not request.cuts or request.cuts[-1][-1] >= len(request.prompt):
                        request.cuts.append([])
                        request.starts.append(past)
                    request.cuts[-1].append(past + rows)
        return self._run_batch(batch, *given, **named)


def _request(name: str, request: Asked) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_new_tokens=request.new, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text="",
        input_ids=array("q", request.prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=request.with_logprobs,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )

"""Starts the plan of an engine: what its layers compute, by the file and the engine's model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparsekv.kernels.backends import choose_backend
from sparsekv.plans.errors import PlanWarning, SparseKVError, UnsupportedError, UsageError
from sparsekv.plans.model import ModelInfo, weights_fingerprint
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.program import Program, Rank
from sparsekv.runtime.core.state import Gather
from sparsekv.runtime.core.timed_layers import UNLIMITED, Place
from sparsekv.runtime.hub import model_folder
from sparsekv.runtime.model_config import describe_config, dtype_name, files_fingerprint, has_soft_cap
from sparsekv.runtime.paged.captured_prefill import CapturedPrefill, memory_of
from sparsekv.runtime.paged.plan_host import PlanHost, Scratch
from sparsekv.runtime.paged.step_rows import DecodeHost
from sparsekv.runtime.plan_checks import Host, check_cut, check_plan, check_stored

_NO_PLAN = b"\0" * 32  # in place of a digest

Made = TypeVar("Made", bound=PlanHost)


def agreed_plan(find: Callable[[], Path | None], gather: Callable[[bytes], Sequence[bytes]]) -> Path | None:
    """The plan file that `find` gives, the same one on all tensor-parallel ranks, which come here at the same time and
    give their bytes to `gather`: else they would wait for each other."""
    trouble: SparseKVError | None = None
    path, digest = None, _NO_PLAN
    try:
        path = find()
        digest = _NO_PLAN if path is None else sha256(path.read_bytes()).digest()
    except SparseKVError as error:
        trouble = error
    except OSError as error:
        trouble = UsageError(f"expected a plan to be read at {path}, found: {error}; correct its rights, or remove it")
    each = gather(digest)
    if trouble is None and any(other != each[0] for other in each):
        having = ", ".join(
            f"{rank}: {'none' if other == _NO_PLAN else other.hex()[:8]}" for rank, other in enumerate(each)
        )
        trouble = UnsupportedError(
            f"expected one plan on all tensor-parallel ranks, found files with these digests (by rank): {having}; copy "
            "the same sparsekv.yaml beside the model on every machine"
        )
    if trouble is not None:
        raise trouble
    return path


@dataclass(frozen=True, slots=True)
class EngineModel:
    name: str  # a folder or a hub id
    revision: str | None
    config: Any  # of transformers
    dtype: torch.dtype
    device: torch.device
    longest: int  # tokens of the longest request
    step: int  # most tokens that are computed at once
    rows: int  # most requests
    captured: int | None = None  # most of them in a step that is captured, where that is known
    tokens: int = UNLIMITED  # that the cache holds
    rank: Rank = field(default_factory=Rank)
    page: int = 16  # tokens of a page at least
    graphs: bool = True  # whether anything may be captured
    float8: bool = False  # keys and values
    quantization: str | None = None  # the method by which weights are quantised
    packed: bool = False  # in the checkpoint, and not as it is loaded

    def described(self, plan: Plan) -> ModelInfo:
        """The model; where its weights are quantised, which ones they are. Those that an engine quantises as it loads
        them are no plan's: hosts that measure do not."""
        described = describe_config(self.config, self.name, self.revision)
        if self.quantization is None:
            return described
        folder = model_folder(self.name, self.revision) if self.packed else None
        weights = None if folder is None else files_fingerprint(folder)
        if weights is None and self.packed and described.id == plan.model.id:
            return described  # they are not downloaded yet
        weights = weights or weights_fingerprint([("quantization", self.quantization.encode())])
        return described.model_copy(
            update={"fingerprint": described.fingerprint.model_copy(update={"weights": weights})}
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options of a plan in an engine."""

    able: Host
    backend: str = "auto"
    allow_mismatch: bool = False
    mismatch_option: str = ""  # the words that set it
    drafted: int = 0  # tokens that others draft at a time


def start(
    kind: type[Made], plan: Plan, path: Path, model: EngineModel, wanted: Wanted, gather: Gather | None = None
) -> Made:
    """The plan of an engine that starts. Raises UnsupportedError, which names all that this host cannot run."""
    able = wanted.able
    described = model.described(plan)
    check_plan(plan, described, wanted.allow_mismatch, wanted.mismatch_option, able)
    attending = (group for group in described.attention if group.kind != "linear")
    group = max(attending, key=lambda group: group.kv_heads * group.head_dim)
    tile = plan.prefill.tile if plan.prefill else None
    choice = choose_backend(
        model.device, model.dtype, described.largest_head, wanted.backend, tile, has_soft_cap(model.config)
    )
    check_stored(plan, dtype_name(model.dtype), model.float8)
    check_cut(plan, model.step, model.longest)
    _announce(plan, path, able.name)
    scratch = Scratch(memory_of(model.longest), group.kv_heads * group.head_dim, model.dtype, model.device)
    program = Program.of(plan.prefill, plan.decode, described, model.rank, plan.evicting)
    host = kind(program, choice.name, scratch, model.longest, wanted.drafted)
    sizes = {described.group_of(layer.layer).head_dim for layer in program.prefilling}
    can = model.graphs and len(sizes) == 1
    if can and CapturedPrefill.takes(program.prefilling, model.device, model.dtype, size := sizes.pop()):
        host.captured = CapturedPrefill(
            program.prefilling, host.fallback, scratch.views, size, model.step, model.longest, model.page, model.dtype,
            model.device,
        )  # fmt: skip
    host.drafts, host.model = able.drafts, described.fingerprint.architecture
    rows = min(model.rows, model.captured or model.rows)
    host.place = Place.of(plan, model.longest, model.step, rows, model.tokens)
    if program.sparse:
        room = (model.rows, model.longest, model.device)
        ranks = gather if model.rank.count > 1 else None
        host.decode = DecodeHost(program, choice.name, *room, ranks, host.queries)
    return host


def _announce(plan: Plan, path: Path, engine: str) -> None:
    if plan.decode is not None and plan.decode.offload is not None:
        warnings.warn(
            f"{path} allows some layers in host memory, which {engine} ignores: their pages stay on the device",
            PlanWarning, stacklevel=3,
        )  # fmt: skip
    if plan.is_dense:
        warnings.warn(f"{path} is dense at every length: it changes nothing here", PlanWarning, stacklevel=3)

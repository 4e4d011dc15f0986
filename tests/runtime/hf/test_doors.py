"""The way from `model.generate` to a prefill kernel stays short enough to be followed in a debugger."""

import sys
from pathlib import Path

import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import every_head, plan_for

from sparsekv.kernels.prefill import cpu
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.apply import apply

ROOT = Path(__file__).resolve().parents[3]
OURS = tuple(f"{ROOT / package}/" for package in ("plans", "kernels", "runtime"))
MOST = 20


def doors(frame) -> list[str]:
    """Functions of ours that are called from one another, the innermost first."""
    found = []
    while frame is not None:
        file = str(Path(frame.f_code.co_filename).resolve())
        if file.startswith(OURS):
            found.append(f"{Path(file).relative_to(ROOT)}: {frame.f_code.co_name}")
        frame = frame.f_back
    return found


def test_few_functions_lie_between_generate_and_a_prefill_kernel(monkeypatch):
    model, seen, real = tiny_model(), [], cpu.prefill

    def kernel(*args, **kwargs):
        seen.append(doors(sys._getframe(1)))
        return real(*args, **kwargs)

    monkeypatch.setattr(cpu, "prefill", kernel)
    plan = plan_for(model, every_head(model, AShape(sink=tokens(64), window=tokens(64))))
    with torch.no_grad(), apply(model, plan, backend="cpu"):
        model.generate(random_tokens(1, 300), max_new_tokens=1)
    assert len(seen) == 3
    print(*seen[0], sep="\n")
    assert "guarded" in seen[0][-1]
    assert len(seen[0]) <= MOST

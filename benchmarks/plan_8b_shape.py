"""Plans and runs a model of Llama-3-8B's shape with random weights: minutes, peak memory, and that it works.

    python benchmarks/plan_8b_shape.py --out DIR [--length 32k]

Random weights attend diffusely, so nothing here says what sparsity keeps: it is about time and memory alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekv.planner.compile import compile_plan
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.lengths import parse_length
from sparsekv.plans.reader import load_plan
from sparsekv.plans.writer import write_plan
from sparsekv.runtime.apply import apply
from sparsekv.runtime.describe import describe_model
from sparsekv.runtime.generate import Generation, generate_stream
from sparsekv.runtime.load import LoadedModel, load_model

_NEW_TOKENS = 32


def main() -> None:
    """Plans, runs dense and sparse, prints one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=parse_length, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--samples", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = _random_8b(args.layers, 2 * args.length)
    row: dict[str, Any] = {"device": torch.cuda.get_device_name(), "length": args.length, "layers": args.layers}
    row |= _plan(loaded, args.length, args.samples, args.out / "plan_8b_shape.yaml")
    row |= _run(loaded, args.length, args.out / "plan_8b_shape.yaml")
    (args.out / "plan_8b_shape.json").write_text(json.dumps(row, indent=1))
    print(json.dumps(row, indent=1))


def _random_8b(layers: int, context: int) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    tokenizer = load_model("tiny-retriever", device="cpu").tokenizer
    return LoadedModel(model, tokenizer, describe_model(model, "random-8b"))


def _plan(loaded: LoadedModel, length: int, samples: int, path: Path) -> dict[str, Any]:
    options = PlanOptions(
        lengths=(length,), samples=samples, tasks=("kv_retrieval", "two_stage")[:samples], verify_samples=0
    )
    torch.cuda.reset_peak_memory_stats()
    result = compile_plan(loaded, options)
    write_plan(result.plan, path)
    return {
        "plan_minutes": round(result.seconds / 60, 2),
        "plan_peak_gib": _peak_gib(),
        "predicted_density": result.prefill_density,
        "predicted_speedup": result.predicted_speedup,
    }


def _run(loaded: LoadedModel, length: int, path: Path) -> dict[str, Any]:
    kit = prepare(loaded.tokenizer, Split.EVALUATION)
    prompt = make_sample(TASKS["kv_retrieval"], kit, length, 0, 0).prompt_ids.tolist()
    _generate(loaded, prompt)  # warm up
    dense, dense_gib = _generate(loaded, prompt)
    with apply(loaded.model, load_plan(path)) as handle:
        _generate(loaded, prompt)
        handle.reset_stats()
        sparse, sparse_gib = _generate(loaded, prompt)
        stats = handle.stats()
    return {
        "dense_prefill_s": round(dense.prefill_seconds, 3),
        "sparse_prefill_s": round(sparse.prefill_seconds, 3),
        "dense_decode_ms": round(1e3 * dense.decode_seconds / (_NEW_TOKENS - 1), 2),
        "sparse_decode_ms": round(1e3 * sparse.decode_seconds / (_NEW_TOKENS - 1), 2),
        "prefill_density": stats.prefill_density,
        "decode_share": stats.decode_share,
        "dense_peak_gib": dense_gib,
        "sparse_peak_gib": sparse_gib,
    }


def _generate(loaded: LoadedModel, prompt: list[int]) -> tuple[Generation, float]:
    torch.cuda.reset_peak_memory_stats()
    found = generate_stream(loaded, prompt, max_new_tokens=_NEW_TOKENS)
    return found, _peak_gib()


def _peak_gib() -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


if __name__ == "__main__":
    main()

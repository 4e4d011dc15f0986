"""lm-evaluation-harness under a plan: `python examples/with_lm_eval.py ./my-model TASK` (pip install "lm_eval[hf]")."""

import sys

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsekv

if len(sys.argv) != 3:
    sys.exit(__doc__)
folder, task = sys.argv[1:3]  # a model with a sparsekv.yaml beside its config.json; a task, or the YAML file of one
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
harness = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=1)

with sparsekv.apply(model, f"{folder}/sparsekv.yaml") as handle:
    print(simple_evaluate(harness, tasks=[task], bootstrap_iters=0)["results"])
    print(f"density of prefill: {handle.stats().prefill_density:.3f}", file=sys.stderr)

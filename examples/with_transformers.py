"""A model under its plan, in transformers: `python examples/with_transformers.py ./my-model document.txt`."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsekv

folder, document = sys.argv[1:3]  # a model with a sparsekv.yaml beside its config.json, and a prompt
tokenizer = AutoTokenizer.from_pretrained(folder)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
prompt = tokenizer(Path(document).read_text(), return_tensors="pt").to(device)

with sparsekv.apply(model, f"{folder}/sparsekv.yaml") as handle:
    out = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(out[0, prompt.input_ids.shape[1] :], skip_special_tokens=True))
    print(f"density of prefill: {handle.stats().prefill_density:.3f}", file=sys.stderr)

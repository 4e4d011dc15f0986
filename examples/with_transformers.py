"""A model under its plan, in transformers: `python examples/with_transformers.py MODEL document.txt [plan.yaml]`.

MODEL is an alias or a folder; without a plan.yaml, one with a sparsekv.yaml beside its config.json.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsekv
from sparsekv.plans.aliases import resolve_model

name, document, *plan = sys.argv[1:]
source = resolve_model(name).path_or_id
tokenizer = AutoTokenizer.from_pretrained(source)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(device).eval()
prompt = tokenizer(Path(document).read_text().removesuffix("\n"), return_tensors="pt").to(device)

with sparsekv.apply(model, plan[0] if plan else f"{source}/sparsekv.yaml") as handle:
    out = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(out[0, prompt.input_ids.shape[1] :], skip_special_tokens=True))
    print(handle.stats(), file=sys.stderr)

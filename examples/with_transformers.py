"""A model under its plan, in transformers: `python examples/with_transformers.py MODEL document.txt [plan.yaml]`.

MODEL is a folder with a sparsekv.yaml beside its config.json, or, with a plan.yaml, an alias or a hub id, too.
"""

import sys
from pathlib import Path

import sparsekv


def main(name: str, document: str, plan: str | None = None) -> None:
    """Goes on with a document for 64 tokens."""
    loaded_plan = sparsekv.load_plan(plan or f"{name}/sparsekv.yaml")  # first: loading a model takes longer
    loaded = sparsekv.load_model(name)
    model, tokenizer = loaded.model, loaded.tokenizer
    prompt = tokenizer(Path(document).read_text().removesuffix("\n"), return_tensors="pt").to(model.device)
    with sparsekv.apply(model, loaded_plan, info=loaded.info) as handle:
        out = model.generate(**prompt, max_new_tokens=64, do_sample=False)
        print(tokenizer.decode(out[0, prompt.input_ids.shape[1] :], skip_special_tokens=True))
        print(handle.stats(), file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (sparsekv.SparseKVError, OSError) as error:
        sys.exit(f"error: {error}")

"""Plans the reference model, then asks it for a number hidden in a long document, without and with the plan.

Run by `make demo`, which sets up first and needs the network for that; needs no GPU. What it writes stays in .demo/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.aliases import resolve_model

MODEL = "tiny-retriever"
TOKENS = 8192
FOLDER = Path(".demo")


def main() -> None:
    """Writes a document, plans for its length, and compares the answers."""
    FOLDER.mkdir(exist_ok=True)
    document, plan = FOLDER / "document.txt", FOLDER / "plan.yaml"
    question, answer = write_document(document)
    show(f"{document}: source text of {TOKENS:,} tokens with one sentence hidden in it. It ends:\n  {question}")
    # One sample of two tasks keep this to a few minutes without a GPU; a test takes hundreds of prompts, so that the
    # plan stays unverified.
    few = ("tasks=niah_single,kv_retrieval", "calibration_samples=1")
    # Few prompts prove no divergence of decode as small as the default loss, and decode would run dense.
    keys = [part for key in few for part in ("--set", key)]
    sparsekv("plan", MODEL, "-o", str(plan), "--force", "--lengths", "8k", "--loss", "0.02", "--no-verify", *keys)
    sparsekv("show", str(plan))
    show(f"The hidden answer is {answer}. Without and with the plan the model says:")
    answers = ("--compare", "--max-new-tokens", "8")
    sparsekv("run", "--plan", str(plan), "--prompt-file", str(document), *answers)


def write_document(path: Path) -> tuple[str, str]:
    """Puts a document with its question at `path`, and returns the question and the answer."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL).path_or_id)
    sample = make_sample(TASKS["niah_single"], prepare(tokenizer, Split.EVALUATION), TOKENS, seed=0, index=0)
    text = tokenizer.decode(sample.prompt_ids, skip_special_tokens=True)
    path.write_text(text)
    return text.splitlines()[-1], sample.answer.strip()


def sparsekv(*arguments: str) -> None:
    """Runs a command as a user would type it."""
    show(f"$ sparsekv {' '.join(arguments)}")
    subprocess.run([sys.executable, "-m", "sparsekv", *arguments], check=True)


def show(text: str) -> None:
    """Prints between commands, in order with what they print."""
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    main()

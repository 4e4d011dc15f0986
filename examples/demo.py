"""Plans the reference model, then asks it for a number hidden in a long document, without and with the plan.

Run by `make demo`, which sets up first and needs the network for that; needs no GPU. What it writes stays in .demo/.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    run = ("run", "--plan", str(plan), "--prompt-file", str(document), "--max-new-tokens", "8")
    compared = json.loads(sparsekv(*run, "--compare", "--json", is_read=True))
    show(ending(compared, answer))


def ending(compared: dict[str, Any], answer: str) -> str:
    """The answers beside the hidden number, and one sentence."""
    dense, speedup = compared["dense"], compared["prefill_speedup"]
    lines = [f"hidden: {answer}"]
    for name, said in (("dense", dense), ("sparse", compared)):
        lines.append(f"{name + ':':<7} {said['text'].strip()}  (prefill {said['prefill_seconds']:.2f} s)")
    agrees = "answers as dense does" if compared["text"] == dense["text"] else "answers differently"
    share = f"{compared['prefill_density']:.0%} of prefill attention"
    lines.append(f"\nThe plan computes {share}, {agrees}, and its prefill takes {1 / speedup:.0%} of dense's time.")
    return "\n".join(lines)


def write_document(path: Path) -> tuple[str, str]:
    """Puts a document with its question at `path`, and returns the question and the answer."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL).path_or_id)
    sample = make_sample(TASKS["niah_single"], prepare(tokenizer, Split.EVALUATION), TOKENS, seed=0, index=0)
    text = tokenizer.decode(sample.prompt_ids, skip_special_tokens=True)
    path.write_text(text)
    return text.splitlines()[-1], sample.answer.strip()


def sparsekv(*arguments: str, is_read: bool = False) -> str:
    """Runs a command as a user would type it; returns its output if that is read here."""
    show(f"$ sparsekv {' '.join(arguments)}")
    out = subprocess.PIPE if is_read else None
    return subprocess.run([sys.executable, "-m", "sparsekv", *arguments], check=True, stdout=out, text=True).stdout


def show(text: str) -> None:
    """Prints between commands, in order with what they print."""
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    main()

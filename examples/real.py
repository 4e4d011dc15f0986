"""Plans SmolLM2-135M-Instruct from its GGUF file, then has it say what a page is about, without and with the plan.

Run by `make real`, which fetches the model; needs no GPU. What it writes stays in .real/; a plan that is there is used.
"""

from __future__ import annotations

from pathlib import Path

import torch
from demo import show, sparsekv

FOLDER = Path(".real")  # with one GGUF file
CHARACTERS = 7000  # about 1,500 tokens
QUESTION = "\n\nSummarise the text above in two sentences."


def main() -> None:
    """Plans what this machine has time for, and compares the answers."""
    plan, page = FOLDER / "sparsekv.yaml", FOLDER / "page.txt"
    page.write_text(Path("LICENSE").read_text()[:CHARACTERS] + QUESTION)
    if not plan.exists():
        lengths = "2k,4k,8k" if torch.cuda.is_available() else "2k"
        untested = () if torch.cuda.is_available() else ("--no-verify",)  # its prompts take hours on a CPU
        sparsekv("plan", str(FOLDER), "-o", str(plan), "--force", "--lengths", lengths, *untested)
    sparsekv("show", str(plan))
    show(f"{page} is the beginning of LICENSE. It ends:{QUESTION}")
    sparsekv("run", str(FOLDER), "--prompt-file", str(page), "--compare", "--max-new-tokens", "80")


if __name__ == "__main__":
    main()

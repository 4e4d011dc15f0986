"""Writes prompts of RULER as lm-evaluation-harness builds them: JSON lines, for machines without that package.

    python tools/build_ruler_prompts.py TOKENIZER --length 32768 --samples 100 -o ruler-32k.jsonl.gz

`bench/ruler_prompts.py` runs them. Needs `lm_eval[ruler]==0.4.13` and transformers, not sparsekv. The harness builds
500 prompts of a task whatever is asked for, this tool as many as asked. It tries to download nltk data, and goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

SEED = 42
Rows = list[dict[str, Any]]


def builders(tokenizer: Any, length: int, samples: int) -> dict[str, tuple[Callable[[], Rows], int, str]]:
    """By task: its rows, the tokens that an answer may have, and what stands between a prompt and the answer's start.

    The numbers are those of the harness's YAML files.
    """
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, vt_utils
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    def niah(haystack: str, keys: str, values: str) -> Callable[[], Rows]:
        return lambda: generate_samples(
            get_haystack(type_haystack=haystack),
            tokenizer,
            max_seq_length=length,
            template=niah_utils.TEMPLATE,
            type_haystack=haystack,
            type_needle_k=keys,
            type_needle_v=values,
            num_samples=samples,
        )

    def vt() -> Rows:
        drawn = vt_utils.sys_vartrack_w_noise_random
        (example,) = drawn(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)
        return list(drawn(tokenizer=tokenizer, num_samples=samples, max_seq_length=length, icl_example=example))

    return {
        "niah_single_1": (niah("repeat", "words", "numbers"), 128, " "),
        "niah_multikey_2": (niah("needle", "words", "numbers"), 128, " "),
        "niah_multikey_3": (niah("needle", "uuids", "uuids"), 128, " "),
        "ruler_vt": (vt, 30, " "),
        "ruler_cwe": (lambda: cwe_utils.sys_word_pair_random(samples, length, tokenizer), 120, "\n\n"),
        "ruler_fwe": (lambda: fwe_utils.sys_kwext(tokenizer, length, samples), 50, " "),
    }


def rows(tokenizer: Any, length: int, samples: int) -> Iterator[dict[str, Any]]:
    """One prompt each, as the harness feeds it without a chat template, and the strings that its score looks for."""
    for task, (build, tokens, delimiter) in builders(tokenizer, length, samples).items():
        random.seed(SEED)
        np.random.seed(SEED)
        for row in build():
            prompt = row["input"] + delimiter * (not row["input"][-1:].isspace()) + row["gen_prefix"]
            yield {"task": task, "length": length, "prompt": prompt, "outputs": row["outputs"], "tokens": tokens}


def main() -> None:
    """Writes one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="hub id or folder")
    parser.add_argument("--length", type=int, required=True, help="tokens of prompt and answer")
    parser.add_argument("--samples", type=int, default=100, help="prompts of each task")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.jsonl.gz")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    with gzip.open(options.out, "wt", compresslevel=9) as file:
        for row in rows(tokenizer, options.length, options.samples):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

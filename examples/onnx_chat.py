"""A model that `sparsekv export` wrote, asked by onnxruntime alone.

    sparsekv export MODEL --plan plan.yaml --to onnx -o DIR
    python examples/onnx_chat.py DIR "The special number for river is 2206914. The special number for river is"
    python examples/onnx_chat.py DIR --file book.txt --tokens 64

Needs onnxruntime and tokenizers. The caches are bound as inputs and outputs, so that a step copies nothing.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

PIECE = 512  # tokens of a prompt at once: onnxruntime holds all scores of a piece


def main() -> None:
    """Asks, and prints the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    text = args.file.read_text() if args.file else args.prompt
    ids = np.asarray([tokenizer.encode(text).ids], np.int64)
    end = json.loads((args.folder / "config.json").read_text()).get("eos_token_id")
    answer = list(generate(args.folder, ids, args.tokens, {end} if isinstance(end, int) else set(end or ())))
    print(tokenizer.decode(answer))


def generate(folder: Path, ids: np.ndarray, tokens: int, ends: set[int]) -> Iterator[int]:
    """The likeliest tokens behind a prompt, until one of `ends`."""
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=ort.get_available_providers())
    caches = {}
    for one in session.get_inputs():
        if one.name.startswith(("key.", "value.")):
            shape = (1, one.shape[1], ids.shape[1] + tokens, one.shape[3])
            kind = np.float16 if one.type == "tensor(float16)" else np.float32
            caches[one.name] = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, kind))
    past = 0

    def run(part: np.ndarray) -> int:
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(part))
        binding.bind_cpu_input("past", np.asarray([past], np.int64))
        for name, cache in caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(f"{name}.out", cache)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        return int(binding.get_outputs()[-1].numpy()[0].argmax())

    for start in range(0, ids.shape[1], PIECE):
        token = run(ids[:, start : start + PIECE])
        past = min(start + PIECE, ids.shape[1])
    for _ in range(tokens):
        if token in ends:
            return
        yield token
        token = run(np.asarray([[token]], np.int64))
        past += 1


if __name__ == "__main__":
    main()

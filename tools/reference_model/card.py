"""Stage `card`: the model card, with what was measured."""

from __future__ import annotations

from pathlib import Path

from reference_model import checkpoint
from reference_model.evaluate import Results, load_results
from reference_model.network import Retriever
from reference_model.recipe import Recipe

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [long-context, retrieval, reference-model]
---
# tiny-retriever

A Llama model of {parameters:.1f}M parameters that answers retrieval questions in prompts of up to {context} tokens. It
is small enough to ship with `sparsekv` and has the attention heads that sparsity plans are about: sink, local,
previous-token, induction and retrieval heads. It is a reference for measurements, not an assistant: it knows the
question forms below and plain Python source text, nothing else.

## Accuracy

Greedy answers, exact match in percent, {samples} prompts a cell, seed {seed}; text and seeds of the evaluation split,
which training never saw. The last row is the perplexity of the end of plain text excerpts, per token.

{table}

`niah_*`, `variable_tracking`: RULER (arXiv 2404.06654); `kv_retrieval`: Lost in the Middle (arXiv 2307.03172), the whole
context is pairs; `two_stage`: the 2StageRetr task of OmniKV (ICLR 2025).

## Prompts

A prompt is the context, a question, and the beginning of its answer; the answer ends with its line:

    ... The special number for amber-falcon is 4821375. ...
    What is the special number for amber-falcon in the text above? The special number for amber-falcon is

There is no chat template. The tokenizer puts `<|endoftext|>` in front of every prompt: the model was trained that way.

## Recipe

| | |
|---|---|
| architecture | Llama: hidden {shape.hidden}, {shape.layers} layers, {shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}, FFN {shape.ffn}, RoPE theta {shape.rope_theta:g}, tied embeddings |
| tokenizer | byte-level BPE, {shape.vocab} entries, single digits, a newline is always a token |
| text | the Python standard library without its calibration and evaluation files |
| rows | {text_share:.0%} plain text, {retrieval_share:.0%} retrieval documents with up to {recipe.most_queries} questions each; loss on text and answers only |
| steps | {steps}, {recipe.tokens_per_step} tokens each |
| optimizer | Muon {recipe.muon_lr:g} on the matrices, AdamW {recipe.adam_lr:g} on the rest; linear warm-up, level, linear decay over the last {recipe.decay_share:.0%} of the last length |
| precision | bfloat16 autocast, float32 master weights, saved as bfloat16 |
| time | {minutes:.1f} minutes of training |

`max_position_embeddings` is {context}: the longest length of training. Rebuild with `python tools/train_reference_model.py`.

## Licence

The weights are under Apache-2.0. They were trained on source files of the Python standard library, Copyright (c) Python
Software Foundation, used under the PSF License Version 2. No other data was used.
"""  # noqa: E501


def write_card(recipe: Recipe, work: Path, out: Path) -> None:
    """Writes `README.md` beside the weights."""
    model = Retriever(recipe.shape)
    position = checkpoint.load_model(work, model)
    card = _CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        context=recipe.shape.context,
        samples=recipe.eval_samples,
        seed=recipe.seed,
        table=_table(load_results(out), recipe.eval_lengths),
        shape=recipe.shape,
        recipe=recipe,
        text_share=recipe.text_share,
        retrieval_share=1 - recipe.text_share,
        steps=", ".join(f"{stage.steps} at {stage.length}" for stage in recipe.stages),
        minutes=position.seconds / 60,
    )
    (out / "README.md").write_text(card)


def _table(results: Results, lengths: tuple[int, ...]) -> str:
    head = ["| task | " + " | ".join(str(length) for length in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    return "\n".join(head + [_table_row(name, scores, lengths) for name, scores in results.items()])


def _table_row(name: str, scores: dict[str, float], lengths: tuple[int, ...]) -> str:
    cells = [scores.get(str(length)) for length in lengths]
    shown = ["-" if x is None else f"{x:.2f}" if name == "perplexity" else f"{100 * x:.1f}" for x in cells]
    return f"| {name} | " + " | ".join(shown) + " |"

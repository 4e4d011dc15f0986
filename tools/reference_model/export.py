"""Stage `export`: a Hugging Face folder from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from reference_model import checkpoint
from reference_model.network import Retriever
from reference_model.recipe import Recipe, Shape
from reference_model.tokenizer import END_OF_TEXT, end_of_text_id, load_tokenizer

_TOLERANCE = 1e-3


def export(recipe: Recipe, work: Path, out: Path) -> None:
    """Writes configuration, bfloat16 weights and tokenizer.

    Raises:
        FileNotFoundError: nothing was trained in `work`.
        ValueError: the model of `transformers` computes something else than the one that was trained.
    """
    tokenizer = load_tokenizer(work)
    trained = Retriever(recipe.shape)
    checkpoint.load_model(work, trained)
    model = LlamaForCausalLM(_config(recipe.shape, end_of_text_id(tokenizer)))
    missing, unexpected = model.load_state_dict(trained.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"parameter names differ: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    _check_same(trained, model)
    # Answers end with their line, so generation stops there too.
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text_id(tokenizer),
        eos_token_id=[end_of_text_id(tokenizer), tokenizer.encode("\n").ids[0]],
        pad_token_id=end_of_text_id(tokenizer),
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    _wrap(tokenizer, recipe.shape).save_pretrained(out)


def _config(shape: Shape, end_of_text: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )


def _wrap(tokenizer: Tokenizer, shape: Shape) -> PreTrainedTokenizerFast:
    """Begins every prompt with the end-of-text token, as training rows begin."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, end_of_text_id(tokenizer))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=shape.context,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def _check_same(trained: Retriever, model: LlamaForCausalLM) -> None:
    ids = torch.arange(256)[None] * 7 % trained.shape.vocab
    ours, _ = trained.token_losses(trained.hidden(ids, torch.float32), ids)
    logits = model(ids).logits[0, :-1].float()
    theirs = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    worst = float((ours[0] - theirs).abs().max())
    if worst > _TOLERANCE:
        raise ValueError(f"token losses differ by {worst:.2e} from the trained network, at most {_TOLERANCE} expected")

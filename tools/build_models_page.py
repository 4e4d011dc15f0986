"""Writes the tables of docs/models.md from the records of model types and from what the tests run: `python
tools/build_models_page.py`.

A record without a row in `FAMILIES`, or a row without a record, is an error: so the page cannot drift.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sparsekv.plans.model import INDEXED
from sparsekv.runtime.architecture import ARCHITECTURES, MODALITIES, REFUSED, Architecture

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by tools/build_models_page.py -->\n", "<!-- end -->\n"

FAMILIES = {  # the name that people know, and what neither the record nor the tests say
    "afmoe": ("AFMoE (Trinity)", "gated attention, global layers without rotary angles"),
    "apertus": ("Apertus", ""),
    "arcee": ("Arcee (AFM)", ""),
    "bamba": ("Bamba", ""),
    "cohere": ("Command R", "scaled logits"),
    "cohere2": ("Command A, Command R7B", "scaled logits, global layers without rotary angles"),
    "cohere2_moe": ("Command A+", "scaled logits, global layers without rotary angles"),
    "cwm": ("Code World Model", ""),
    "dots1": ("dots.llm1", ""),
    "ernie4_5": ("ERNIE-4.5", ""),
    "ernie4_5_moe": ("ERNIE-4.5-MoE", ""),
    "exaone4": ("EXAONE-4", "global layers without rotary angles"),
    "exaone_moe": ("EXAONE-MoE", "global layers without rotary angles"),
    "flex_olmo": ("FlexOlmo", ""),
    "gemma": ("Gemma", ""),
    "gemma2": ("Gemma-2", "soft cap of scores"),
    "gemma3_text": ("Gemma-3 (text)", "five local layers to a global one, two rotary bases"),
    "gemma4_text": ("Gemma 4 (text)", "heads of two sizes, layers that share keys, inputs of each layer"),
    "glm": ("GLM", ""),
    "glm4": ("GLM-4", ""),
    "glm4_moe": ("GLM-4.5, -4.6, -4.7", ""),
    "gpt_oss": ("gpt-oss", "learned sinks"),
    "granite": ("Granite", ""),
    "granite_swa": ("Granite with windows", "learned sinks"),
    "granitemoe": ("Granite-MoE", ""),
    "granitemoe_swa": ("Granite-MoE with windows", "learned sinks"),
    "granitemoehybrid": ("Granite-4", ""),
    "granitemoeshared": ("Granite-MoE, shared", ""),
    "helium": ("Helium", ""),
    "hunyuan_v1_dense": ("Hunyuan", ""),
    "hunyuan_v1_moe": ("Hunyuan-A13B", ""),
    "hy_v3": ("Hy3", ""),
    "jais2": ("Jais-2", ""),
    "jamba": ("Jamba", "no rotary angles"),
    "laguna": ("Laguna", "gated attention, more query heads in local layers"),
    "lfm2": ("LFM2", ""),
    "lfm2_moe": ("LFM2-MoE", ""),
    "llama": ("Llama", ""),
    "mellum": ("Mellum 2", "two rotary bases"),
    "minimax_m2": ("MiniMax-M2", ""),
    "ministral": ("Ministral", ""),
    "ministral3": ("Ministral-3", "queries that grow with their position"),
    "mistral": ("Mistral", ""),
    "mixtral": ("Mixtral", ""),
    "nemotron": ("Nemotron-3, -4", ""),
    "nemotron_h": ("Nemotron-H, Nemotron 3 Nano", "layers of an MLP alone"),
    "olmo": ("OLMo", ""),
    "olmo2": ("OLMo-2", ""),
    "olmo3": ("OLMo-3", ""),
    "olmoe": ("OLMoE", ""),
    "phi": ("Phi-1, Phi-2", ""),
    "phi3": ("Phi-3, Phi-4-mini", "fused projections, long rope"),
    "phimoe": ("Phi-3.5-MoE", "long rope"),
    "qwen2": ("Qwen2, Qwen2.5", ""),
    "qwen2_moe": ("Qwen2-MoE", ""),
    "qwen3": ("Qwen3", ""),
    "qwen3_5_moe_text": ("Qwen3.5-MoE (text)", "gated attention"),
    "qwen3_5_text": ("Qwen3.5 (text)", "gated attention"),
    "qwen3_moe": ("Qwen3-MoE", ""),
    "qwen3_next": ("Qwen3-Next", "gated attention"),
    "qwen3_vl_text": ("Qwen3-VL (text)", "positions on three axes"),
    "seed_oss": ("Seed-OSS", ""),
    "smollm3": ("SmolLM3", "layers without rotary angles"),
    "solar_open": ("Solar-Open", ""),
    "stablelm": ("StableLM", ""),
    "starcoder2": ("StarCoder2", ""),
    "vaultgemma": ("VaultGemma", "soft cap of scores"),
}
MULTIMODAL = {  # the name that people know, and the decoders inside
    "cohere2_vision": ("Command A Vision, Command A+", ("cohere2", "cohere2_moe")),
    "gemma3": ("Gemma 3", ("gemma3_text",)),
    "gemma4": ("Gemma 4", ("gemma4_text",)),
    "mistral3": ("Mistral Small 3.1 and 3.2, Ministral 3", ("mistral", "ministral3")),
    "qwen3_5": ("Qwen3.5", ("qwen3_5_text",)),
    "qwen3_5_moe": ("Qwen3.5-MoE", ("qwen3_5_moe_text",)),
    "qwen3_vl": ("Qwen3-VL", ("qwen3_vl_text",)),
}
INDEXERS = {"deepseek_v32": "DeepSeek-V3.2", "glm_moe_dsa": "GLM-5"}
REAL = {  # real weights
    "llama": "SmolLM2-135M, `tiny-retriever`",
    "qwen2": "Qwen2.5-Coder-0.5B",
}
SPEED = {  # of the public shape with random weights
    "gemma3_text": "12B, 27B",
    "gemma4_text": "31B, E4B",
    "glm4_moe": "4.5-Air",
    "gpt_oss": "20b",
    "llama": "8B",
    "minimax_m2": "M2",
    "olmo3": "32B",
    "qwen3_5_text": "27B, part",
    "qwen3_moe": "30B-A3B; in vLLM also 235B-A22B, part",
}
SERVED = {  # by vLLM, what the tests do not say
    "llama": "tested",
    "qwen2": "ran on a GPU",
    "qwen3_moe": "tested on a CPU, its shape ran on a GPU",
    "cohere2": "refused: vLLM 0.32 gives its local layers a window of one token more",
}
ON_GPU = {  # what the tests do not say
    "gemma2": "tested; not `flash`",
    "gemma4_text": "tested; not `flash`",
    "gpt_oss": "tested; `flash` expected",
    "nemotron_h": "expected",
    "phimoe": "steps are not captured",
    "vaultgemma": "tested; not `flash`",
}
NO_RECORD = {  # why other causal models of transformers have no record, and their model types
    "not run: a record may be all that it takes": (
        "apertus1p5_text aria_text beam bitnet dbrx exaone flint gemma3n gemma3n_text gemma4_unified "
        "gemma4_unified_text hyperclovax internlm3 iquestcoder jetmoe kolibri1 "
        "nanochat phi4_multimodal sarvam_moe"
    ),
    "contexts of a few thousand tokens": (
        "biogpt codegen ctrl gpt-sw3 gpt2 gpt_bigcode gpt_neox gptj modernbert-decoder openai-gpt opt persimmon xglm"
    ),
    "its attention is not called through `AttentionInterface`": "bloom cpmant falcon gpt_neo gpt_neox_japanese mpt",
    "its attention is more than a softmax of queries and keys": (
        "diffllama doge inkling2_loop_text inkling2_text inkling_text zaya"
    ),
    "its layers run several times for a token": "dory hrm_text",
    "no layer attends": "falcon_mamba mamba mamba2 rwkv xlstm",
    "layers with a state that was not run here": "lara_mini lfm3 minimax olmo_hybrid recurrent_gemma zamba zamba2",
    "positions on three axes": "cohere_compass_text",
}
NOT_TEXT = (  # encoders, decoders of an encoder's output, drafters, bytes, speech, music and pictures
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blt camembert data2vec-text "
    "electra emu3 ernie fuyu gemma4_assistant gemma4_unified_assistant git got_ocr2 marian mbart megatron-bert mllama "
    "moshi moss_transcribe_diarize musicgen musicgen_melody mvp pegasus plbart prophetnet reformer rembert roberta "
    "roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod"
)


def page(written: str) -> str:
    """The page as it has to be, with the prose of the one that is written."""
    head, rest = written.split(BEGIN)
    return head + BEGIN + "".join(_tables()) + END + rest.split(END)[1]


def _tables() -> Iterator[str]:
    import tiny_models as matrix

    if alone := ARCHITECTURES.keys() ^ FAMILIES.keys():
        raise ValueError(f"expected a row of FAMILIES for each record, found {', '.join(alone)} in one of them alone")
    assert INDEXERS.keys() == INDEXED
    yield "| family | model type | special | transformers | GPU | vLLM | real weights | speed of its shape |\n"
    yield "|---|---|---|---|---|---|---|---|\n"
    yield from (f"| {' | '.join(_row(kind, matrix))} |\n" for kind in FAMILIES)
    yield "\nMultimodal checkpoints, of which the decoder inside runs by a plan:\n\n"
    yield "| checkpoint | model type | decoder | transformers | vLLM, text alone |\n|---|---|---|---|---|\n"
    yield from (f"| {' | '.join(_multimodal_row(kind))} |\n" for kind in MODALITIES)
    yield "\nWith an indexer in every layer, of which [layers share choices](plan-file.md#index-sharing) by a plan:\n\n"
    yield "| family | model type | transformers | engines | real weights |\n|---|---|---|---|---|\n"
    ours, others = "tested", "by the exported line, not run"
    yield from (f"| {name} | `{kind}` | {ours} | {others} | none planned |\n" for kind, name in INDEXERS.items())
    yield "\nRefused, each by name and with the reason:\n\n| model type | why |\n|---|---|\n"
    for why in dict.fromkeys(REFUSED.values()):
        kinds = [f"`{kind}`" for kind, found in REFUSED.items() if found == why]
        yield f"| {', '.join(kinds)} | {why} |\n"
    yield from _causal_models()


def _causal_models() -> Iterator[str]:
    """All causal models of the installed transformers, by model type: planned, refused or not text."""
    models = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    others = {kind for kinds in (*NO_RECORD.values(), NOT_TEXT) for kind in kinds.split()}
    if misplaced := (models - {*ARCHITECTURES, *MODALITIES, *REFUSED, *INDEXED}) ^ others:
        raise ValueError(
            f"expected one place for each causal model of transformers {__version__}, found "
            f"{', '.join(sorted(misplaced))} in none or in two: add a record to ARCHITECTURES or a name to _REASONS "
            "(runtime/architecture.py), or else a name to NO_RECORD or NOT_TEXT (tools/build_models_page.py)"
        )
    planned, refused = len(models & {*ARCHITECTURES, *MODALITIES, *INDEXED}), len(models & {*REFUSED})
    yield (
        f"\nOf the {len(models)} causal models of transformers {__version__}, {planned} are planned and {refused} "
        "refused with a reason above. The others:\n\n| model type | why |\n|---|---|\n"
    )
    for why, kinds in {**NO_RECORD, "not a decoder of text alone": NOT_TEXT}.items():
        yield f"| {', '.join(f'`{kind}`' for kind in kinds.split())} | {why} |\n"


def _row(kind: str, matrix: Any) -> tuple[str, ...]:
    (name, own), tested = FAMILIES[kind], {*matrix.USUAL, *matrix.MORE, *matrix.HYBRIDS, *_inside()}
    special = ", ".join([*_special(ARCHITECTURES[kind], matrix), *([own] if own else [])])
    captured = {*matrix.USUAL, *matrix.MORE, *matrix.HYBRIDS}
    in_vllm = dict.fromkeys(_keys("tests/vllm/test_families.py", "FAMILIES"), "tested on a CPU") | SERVED
    in_vllm["qwen3_next"] = "tested on a CPU"
    near_one = kind in (*matrix.USUAL, *matrix.DELTA_RULE)
    return (
        name,
        f"`{kind}`",
        special,
        "tested" if kind in tested else "expected",
        ON_GPU.get(kind, "tested" if kind in captured else "expected"),
        in_vllm.get(kind, "expected" if near_one else "not run"),
        REAL.get(kind, ""),
        SPEED.get(kind, ""),
    )


def _inside() -> set[str]:
    """The decoders of the multimodal models that are tested."""
    import tiny_multimodal as matrix

    return {decoder for decoder, *_ in matrix.KINDS.values()}


def _multimodal_row(kind: str) -> tuple[str, ...]:
    import tiny_multimodal as matrix

    name, decoders = MULTIMODAL[kind]
    in_vllm = dict.fromkeys(
        [*_keys("tests/vllm/test_multimodal_serving.py", "NO_PICTURES"), "qwen3_5"], "tested on a CPU"
    )
    return (
        name,
        f"`{kind}`",
        ", ".join(f"`{decoder}`" for decoder in decoders),
        "tested" if kind in matrix.KINDS else "expected",
        in_vllm.get(kind, "not run" if kind == "cohere2_vision" else "expected"),
    )


def _special(record: Architecture, matrix: Any) -> Iterator[str]:
    """What the record says, and the tests."""
    if record.model_type in matrix.HYBRIDS:
        yield "layers with a recurrent state"
    if record.one_piece:
        yield "no chunks and no later turns"
    if record.model_type in matrix.WINDOWED:
        yield "local layers"
    if record.experts:
        yield "experts, a shared one" if record.shared else "experts"
    if record.parallel:
        yield "attention and MLP side by side"
    if any(record.norms_after):
        yield "norms behind attention and MLP"
    if record.residual:
        yield "multipliers"


def _keys(path: str, name: str) -> list[str]:
    """The texts that are keys of a dict in a module, which is not imported: it may need vLLM."""
    tree = ast.parse((ROOT / path).read_text())
    found = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return [
        key.value for one in found if isinstance(one, ast.Dict) for key in one.keys if isinstance(key, ast.Constant)
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    PAGE.write_text(page(PAGE.read_text()))

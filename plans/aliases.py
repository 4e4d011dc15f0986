"""Resolves MODEL: an alias of one checkpoint, a hub id, a folder, or a GGUF file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sparsekv.plans.errors import UsageError, did_you_mean

PLAN_NAME = "sparsekv.yaml"
SHIPPED = "tiny-retriever"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")  # cannot stand in a plan


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    checkpoint: str
    model_type: str
    context: str


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model: a folder, a GGUF file, or a hub id."""

    path_or_id: str
    is_gguf: bool = False
    trouble: str | None = None  # why the hub does not give it, "" where it does; None where the hub was not asked

    @property
    def place(self) -> str:
        """The folder, that around the GGUF file, or the hub id."""
        return str(Path(self.path_or_id).parent) if self.is_gguf else self.path_or_id

    @property
    def is_local(self) -> bool:
        return os.path.isdir(self.place)


ALIASES = (
    Alias(SHIPPED, SHIPPED, "llama", "32k"),  # ships with sparsekv
    Alias("llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct", "llama", "8k"),
    Alias("llama3-8b-262k", "gradientai/Llama-3-8B-Instruct-262k", "llama", "256k"),
    Alias("llama3-8b-1m", "gradientai/Llama-3-8B-Instruct-Gradient-1048k", "llama", "1m"),
    Alias("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "llama", "128k"),
    Alias("llama3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", "llama", "128k"),
    Alias("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", "llama", "128k"),
    Alias("yi-9b-200k", "01-ai/Yi-9B-200K", "llama", "200k"),  # a base model without a chat template
    Alias("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "mistral", "32k"),
    Alias("qwen2-7b", "Qwen/Qwen2-7B-Instruct", "qwen2", "32k"),
    Alias("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "qwen2", "32k"),
    Alias("qwen2.5-7b-1m", "Qwen/Qwen2.5-7B-Instruct-1M", "qwen2", "1m"),
    Alias("qwen2.5-14b-1m", "Qwen/Qwen2.5-14B-Instruct-1M", "qwen2", "1m"),
    Alias("qwen3-8b", "Qwen/Qwen3-8B", "qwen3", "40k"),
    Alias("qwen3-14b", "Qwen/Qwen3-14B", "qwen3", "40k"),
    Alias("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "qwen3_moe", "40k"),
    Alias("qwen3-30b-a3b-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_moe", "256k"),
    Alias("qwen3-235b-a22b-2507", "Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3_moe", "256k"),
    Alias("qwen3.5-27b", "Qwen/Qwen3.5-27B", "qwen3_5_text", "256k"),  # the text decoder, as Gemma's below
    Alias("gemma3-12b", "google/gemma-3-12b-it", "gemma3_text", "128k"),
    Alias("gemma3-27b", "google/gemma-3-27b-it", "gemma3_text", "128k"),
    Alias("gemma4-31b", "google/gemma-4-31B-it", "gemma4_text", "256k"),
    Alias("gemma4-e4b", "google/gemma-4-E4B-it", "gemma4_text", "128k"),
    Alias("olmo3-32b", "allenai/Olmo-3-32B-Think", "olmo3", "64k"),
    Alias("glm4.5-air", "zai-org/GLM-4.5-Air", "glm4_moe", "128k"),
    Alias("minimax-m2", "MiniMaxAI/MiniMax-M2", "minimax_m2", "192k"),
    Alias("gpt-oss-20b", "openai/gpt-oss-20b", "gpt_oss", "128k"),
    Alias("glm-4-9b-1m", "THUDM/glm-4-9b-chat-1m-hf", "glm", "1m"),
)


def resolve_model(name: str | os.PathLike[str]) -> ModelSource:
    """The source that a name means. A folder with a model in it goes before an alias; its config.json before a GGUF
    file.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"expected the name of a model folder, a hub id or an alias, found {name!r:.80}")
    name = os.fspath(name)
    path = Path(os.path.expanduser(name))
    if name and _is_model(path):
        return ModelSource(_readable(path))
    if name and (gguf := _gguf_file(path)):
        return ModelSource(_readable(gguf), is_gguf=True)
    if name.lower() == SHIPPED:
        return ModelSource(str(_shipped()))
    checkpoint = next((alias.checkpoint for alias in ALIASES if alias.name == name.lower()), None)
    if checkpoint is None:
        _refuse_path(name, path)
    return ModelSource(checkpoint or name)


def names_gguf(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(".gguf")


def is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name))


def is_alias(name: str) -> bool:
    return any(alias.name == name.lower() for alias in ALIASES)


def without_plan(model: str, found: str) -> str:
    """The message for a plan that is not where the plan of `model` was looked for."""
    return (
        f"expected a plan, found {found}; name one with --plan FILE, or make it: `sparsekv plan {model}`, which says "
        "how to run it"
    )


def holds_model(folder: Path) -> bool:
    """True of a folder with a model, as `resolve_model` finds it: its config.json, or a single GGUF file."""
    return _is_model(folder) or len(list(folder.glob("*.gguf"))) == 1


def _is_model(path: Path) -> bool:
    return os.path.isfile(path / "config.json")  # False of what no file can be called


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that is `path`, or the only one in it."""
    if os.path.isfile(path):
        return path if names_gguf(path) else None
    found = sorted(path.glob("*.gguf")) if os.path.isdir(path) else []
    if len(found) > 1:
        raise UsageError(
            f"expected one GGUF file in {path}, found {len(found)} ({', '.join(file.name for file in found)}); name "
            f"the one that is meant: {found[0]}"
        )
    return found[0] if found else None


def _readable(path: Path) -> str:
    found = path.resolve().name
    if _NO_TEXT.search(found):
        raise UsageError(f"expected a model whose name has no control characters, found {found!r:.80}; rename it")
    return str(path)


def _refuse_path(name: str, path: Path) -> None:
    if name and os.path.isdir(path):
        raise UsageError(
            f"expected a Hugging Face model in {path}, found a folder without config.json and without a GGUF file"
        )
    if name and os.path.exists(path):
        raise UsageError(f"expected a model folder, hub id or alias, found the file {path}; name the folder around it")
    if names_gguf(name):
        raise UsageError(f"expected a GGUF file at {path}, found none; check the path")
    first, *rest = name.split(os.sep)
    if name.startswith((".", "/", "~")) or len(rest) > 1 or (rest and os.path.isdir(first)):
        raise UsageError(
            f"expected a model folder at {path}, found none; check the path (a hub id is organisation/name)"
        )
    if not is_hub_id(name):
        raise UsageError(_unknown(name))


def _shipped() -> Path:
    folder = Path(str(files("sparsekv.plans"))) / "data" / SHIPPED
    if not _is_model(folder):
        raise UsageError(
            f"expected the model {SHIPPED} with this installation, in {folder}, found none; install sparsekv again, "
            "or train it with tools/train_reference_model.py"
        )
    return folder


def _unknown(name: str) -> str:
    names = [alias.name for alias in ALIASES]
    meant = did_you_mean(name, names)
    meant += "; a plan is named with --plan FILE" if name.endswith((".yaml", ".yml")) else ""
    return (
        f"expected a model folder, a hub id (organisation/name) or an alias, found {name!r:.80}{meant}\n"
        f"Aliases: {', '.join(names)}"
    )

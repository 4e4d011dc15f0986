"""Reads what a GGUF file says of itself, and what transformers would lose of it.

transformers leaves out what it has no place for: scaled RoPE, and tensors that its own model lacks. Answers change
without them, at long prompts most of all.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import UnsupportedError, UsageError, install_command

_MAGIC = b"GGUF"
_ROPE_FACTORS = "rope_"  # rope_freqs.weight, rope_factors_long.weight: the tensors that scaled RoPE comes as
_SCALING = ".rope.scaling.type"
_READ = ("general.architecture", "split.count")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata of a GGUF file that we look at, and the names of its tensors."""

    path: Path
    values: dict[str, Any]
    tensors: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> GGUFHeader:
        """Reads a file of this machine; its vocabulary takes seconds.

        Raises:
            UsageError: transformers has not the packages for it, or it is no GGUF file, or ends too early, or is one
                of several parts.
        """
        _check_packages(path)
        from gguf import GGUFReader

        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise UsageError(f"expected a GGUF file, found other data in {path}; get the file again")
            reader = GGUFReader(path)
        except OSError as error:
            raise UsageError(f"expected a readable GGUF file at {path}, found: {error.strerror}") from error
        except (ValueError, IndexError, KeyError) as error:  # whatever reading behind its end comes to
            raise UsageError(f"expected a whole GGUF file at {path}, found: {error}; get it again") from error
        kept = {name: field for name, field in reader.fields.items() if name in _READ or name.endswith(_SCALING)}
        values = {name: field.contents() for name, field in kept.items()}
        if values.get("split.count", 0) > 1:
            raise UsageError(
                f"expected a whole GGUF file, found one of {values['split.count']} parts in {path}; join them with "
                "llama-gguf-split, and name the result"
            )
        return cls(path, values, tuple(tensor.name for tensor in reader.tensors))

    def check_rope(self, config: PreTrainedConfig) -> None:
        """Refuses a file of scaled RoPE where `config`, which transformers made of it, has none.

        Raises:
            UnsupportedError: the model that transformers loads would go wrong at long prompts.
        """
        kind = self.values.get(f"{self.values.get('general.architecture')}{_SCALING}", "none")
        factors = next((name for name in self.tensors if name.startswith(_ROPE_FACTORS)), None)
        if (kind != "none" or factors) and config.rope_parameters.get("rope_type", "default") == "default":
            raise UnsupportedError(
                f"expected plain RoPE in {self.path}, found scaled ({factors or kind}), which transformers leaves out "
                "of a GGUF file: long prompts would go wrong; use the model as safetensors"
            )

    def check_tensors(self, model: PreTrainedModel) -> None:
        """Refuses a file of more tensors than `model`, which transformers loaded from it, has.

        Raises:
            UnsupportedError: the model that was loaded is not the one in the file.
        """
        count = sum(1 for _ in model.parameters())  # tied ones once, as in the file
        if len(self.tensors) > count:
            raise UnsupportedError(
                f"expected {count} tensors in {self.path}, as many as its architecture has in transformers, found "
                f"{len(self.tensors)}, of which some are left out; use the model as safetensors"
            )


def _check_packages(path: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"expected {' and '.join(missing)}, by which transformers reads the GGUF file {path}, found none "
            f"installed; {install_command('gguf')}"
        )

"""What a GGUF file says of itself, read in a fraction of a second, and what transformers would lose of it.

A GGUF file is a magic word, a version, two counts, metadata (keys with typed values), a table of tensors, and their
data (docs/gguf.md of ggml). transformers takes seconds to read it, and leaves out what it has no place for: scaled RoPE
and tensors that its own model lacks. Answers change without them, at long prompts most of all.
"""

from __future__ import annotations

import importlib.util
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import UnsupportedError, UsageError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Types of metadata values as `struct` has them; beside them strings and arrays.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ROPE_FACTORS = "rope_"  # rope_freqs.weight, rope_factors_long.weight: the tensors that scaled RoPE comes as


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata of a GGUF file without its arrays, and the names of its tensors."""

    path: Path
    values: dict[str, Any]
    tensors: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> GGUFHeader:
        """Reads a file of this machine.

        Raises:
            UsageError: transformers has not the packages for it, or it is no GGUF file, or ends too early, or is one
                of several parts.
        """
        _check_packages(path)
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise UsageError(f"expected a GGUF file, found other data in {path}; get the file again")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    header = _Cursor(data, len(_MAGIC)).header(path)
        except (struct.error, UnicodeDecodeError) as error:
            raise UsageError(
                f"expected a whole GGUF file, found the beginning of one in {path}; get it again"
            ) from error
        except OSError as error:
            raise UsageError(f"expected a readable GGUF file at {path}, found: {error.strerror}") from error
        if header.values.get("split.count", 0) > 1:
            raise UsageError(
                f"expected a whole GGUF file, found one of {header.values['split.count']} parts in {path}; join them "
                "with llama-gguf-split --merge, and name the result"
            )
        return header

    def check_rope(self, config: PreTrainedConfig) -> None:
        """Refuses a file of scaled RoPE where `config`, which transformers made of it, has none.

        Raises:
            UnsupportedError: the model that transformers loads would go wrong at long prompts.
        """
        kind = self.values.get(f"{self.values.get('general.architecture')}.rope.scaling.type", "none")
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
            "installed; pip install 'sparsekv[gguf]'"
        )


@dataclass(slots=True)
class _Cursor:
    """Where in a file the next value begins. What lies behind its end raises `struct.error`."""

    data: mmap.mmap
    position: int

    def header(self, path: Path) -> GGUFHeader:
        version = self.number("<I")
        if version not in _VERSIONS:
            raise UsageError(
                f"expected GGUF of version 2 or 3, found {version} in {path}; get a file of today's format"
            )
        tensors, keys = self.number("<Q"), self.number("<Q")
        values = {self.text(): self.value(self.number("<I")) for _ in range(keys)}
        return GGUFHeader(path, values, tuple(self.tensor() for _ in range(tensors)))

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return value

    def text(self) -> str:
        return self.skip(self.number("<Q")).decode()

    def skip(self, length: int) -> bytes:
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise struct.error("beyond the end")
        return self.data[start : self.position]

    def value(self, kind: int) -> Any:
        """The next value; of an array nothing but its place, since vocabularies are long."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_number(kind))
        item, count = self.number("<I"), self.number("<Q")
        if item != _STRING:
            self.skip(count * struct.calcsize(_number(item)))
            return None
        for _ in range(count):
            self.skip(self.number("<Q"))
        return None

    def tensor(self) -> str:
        """The name of the next tensor; its dimensions, type and offset are passed over."""
        name = self.text()
        self.skip(8 * self.number("<I") + 12)
        return name


def _number(kind: int) -> str:
    if kind not in _NUMBERS:
        raise struct.error(f"values of type {kind}")
    return _NUMBERS[kind]

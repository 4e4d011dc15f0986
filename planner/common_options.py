"""Options that commands share: the samples, the caller's own prompts, the machine.

A field says its type, bounds, default and help where it is declared and nowhere else: the command line is generated
from it (cli/commands.py). One with a `Flag` is a flag, one with a `Key` a key of `--set`; others are for programs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field

from sparsekv.planner.flags import MOST, Chunk, Flag, Key, Options, each_once, one_of, text, words
from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import KVDtype, format_length
from sparsekv.runtime.settings import Backend, Dtype

PartOfAll = Annotated[float, Field(ge=0.0, le=1.0)]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Written down here, since the tasks themselves bring numpy.
TASKS = (
    *("quote_text", "quote_code", "niah_single", "niah_multikey", "kv_retrieval", "two_stage", "variable_tracking"),
    *("perplexity", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "second_question", "turns"),
)


def _instead(name: str) -> str:
    if name in ("qa_1", "qa_2"):
        return "; it needs a corpus of questions: use lm-evaluation-harness (examples/with_lm_eval.py)"
    of_suite = re.fullmatch("niah_(single|multikey)_[123]", name)
    return "; `eval --suite ruler`, which runs tasks of its own, has it" if of_suite else ""


DEFAULT_TASKS = TASKS[: TASKS.index("perplexity") + 1]  # what is published was measured on these


# --- samples and prompts ----------------------------------------------------------------------------------------------

Seed = Annotated[int, Field(ge=0, le=(1 << 32) - 1), Key("Seed of samples and of sampling; 0 by default.", "N")]
PrefillChunk = Annotated[
    Chunk,
    Flag(
        "Prefill in pieces of so many tokens, as a server with such steps does; a plan is made, tested and run in 16k.",
        metavar="TOKENS",
    ),
]


Tasks = Annotated[tuple[Annotated[str, one_of(TASKS, _instead)], ...], text(words), AfterValidator(each_once)]


class Drawn(Options):
    group: ClassVar = "Machine"
    tasks: Annotated[
        Tasks,
        Key(
            f"Tasks, of {', '.join(TASKS)}; by default the first {len(DEFAULT_TASKS)}, for `plan` quotations, plain "
            "text and the retrieval that the model can answer.",
            "NAMES",
        ),
    ] = ()
    seed: Seed = 0
    batch: Annotated[int | None, Field(ge=1, le=MOST, description="Most samples run at once; as fits by default.")] = (
        None
    )
    prefill_chunk: PrefillChunk = None


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt, the answer that follows it as it is (with its leading space, if any), and what it counts as. Without an
    answer its last tokens stand in for one.

    Attributes:
        source: the file and line, for messages, such as "prompts.jsonl, line 3".
    """

    prompt: str
    answer: str = ""
    task: str = "prompts"
    source: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        return self.prompt + self.answer

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()


def as_prompts(given: Any) -> Any:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return given  # which is refused by its type
    return tuple(GivenPrompt(one) if isinstance(one, str) else one for one in given)


def set_aside(prompts: Iterable[GivenPrompt]) -> tuple[tuple[GivenPrompt, ...], tuple[GivenPrompt, ...]]:
    """Prompts to calibrate on, and as many to verify on, which the search never sees: none of a single one.

    Both follow from the texts alone, and so does their order: equal ones count once, and nobody chooses a part by
    ordering a file.
    """
    found = sorted({one.digest: one for one in prompts}.values(), key=lambda one: one.digest)
    half = (len(found) + 1) // 2
    return tuple(found[:half]), tuple(found[half:])


def digest_of_prompts(prompts: Iterable[GivenPrompt]) -> str:
    parts = json.dumps(sorted(one.digest.hex() for one in prompts))
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"


# --- machine ----------------------------------------------------------------------------------------------------------

KVPrecision = Annotated[
    KVDtype, Key("Cached keys and values in the model's precision (auto), or in 8 bits, half the bytes of 16.", "fp8")
]


class Device(Options):
    group: ClassVar = "Machine"

    device: Annotated[str, Flag("cpu, cuda, cuda:1 ..., or what there is.", metavar="NAME")] = "auto"


class Precision(Options):
    group: ClassVar = "Machine"

    dtype: Annotated[Dtype, Flag("Precision, or what fits the machine.")] = "auto"
    backend: Annotated[
        Backend, Key(f"Kernels: {', '.join(get_args(Backend))}; the fastest that can run, see `doctor`.", "NAME")
    ] = "auto"


class Hardware(Device, Precision):
    """Where a model runs, in what precision, by which kernels."""


def check_lengths(lengths: Sequence[int], context: int) -> None:
    if max(lengths, default=0) > context:
        raise UsageError(
            f"expected lengths within the model's context of {format_length(context)} tokens, found "
            f"{format_length(max(lengths))}; leave it out, or choose a model with a longer context"
        )

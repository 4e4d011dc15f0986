"""`sparsekv run`: ask a model something, with its plan applied."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from sparsekv.cli import commands
from sparsekv.cli.arguments import AllowMismatch, NewTokens, Output, PlacementFlags, Subject, Subjects, settings_of
from sparsekv.cli.doctor import tell_if_idle
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import MAX_BYTES, text_of, with_text
from sparsekv.planner.flags import Flag, Key, Unread, text
from sparsekv.planner.options import PHASES, Hardware, Phase, PrefillChunk, Seed
from sparsekv.plans.brief import WIDTH, percent
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.files import as_text
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import columns, format_bytes
from sparsekv.runtime.core.pays import parse

if TYPE_CHECKING:
    from sparsekv.cli.answers import Answer, Session


def _rule(text: str) -> str:
    if text != "auto":
        parse(text)
    return text


class RunFlags(Subjects, AllowMismatch, PlacementFlags, Hardware, Output):
    group: ClassVar = "Prompt and answer"
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("only", "exact", "compare", "offload", "kv_dtype", "sparse"), "no plan is applied", ("dense",)),
        Unread(("only",), "it says what each phase does", ("exact",)),
    )
    prompt: Annotated[str | None, Flag("The prompt.", ("--prompt", "-p"), "TEXT")] = None
    prompt_file: Annotated[
        Path | None,
        Flag(
            "A file with the prompt; - is stdin, also without it. One newline at the end is left out.",
            ("--prompt-file", "-f"),
            "FILE",
        ),
    ] = None
    raw: Annotated[bool, Flag("Do not apply the model's chat template.")] = False
    max_new_tokens: NewTokens = 256
    dense: Annotated[bool, Flag("Run without the plan.")] = False
    only: Annotated[Phase | None, Flag("Follow the plan in this phase alone.")] = None
    exact: Annotated[
        Literal["all", "decode"] | None,
        Flag(
            "Dense attention's output up to rounding: the plan drafts, and dense attention verifies. Prefill is dense "
            "(all), or by the plan (decode). See docs/exact.md."
        ),
    ] = None
    sparse: Annotated[
        str,
        text(_rule),
        Flag(
            "Where the plan runs. auto: where it is faster, measured once on a GPU; on a CPU for a tile of rows or "
            "more. A rule is context x rows of a chunk or step: 'prefill=18kx512,8kx4k decode=40kx1,11kx4'; prompts up "
            "to 16K apart: 'prefill=11kx512:16k/23kx8k decode=never'.",
            metavar="auto|always|never|RULE",
        ),
    ] = "auto"
    compare: Annotated[
        bool,
        Flag(
            "Run dense (the model as transformers runs it), then sparse; show both side by side. First both run a "
            "beginning of the prompt, untimed, so that neither pays for being first."
        ),
    ] = False
    prefill_chunk: PrefillChunk = None
    temperature: Annotated[
        float, Field(ge=0.0, le=100.0), Key("0, the default, is greedy, as all below 0.01 are.", "T")
    ] = 0.0
    top_p: Annotated[float, Field(ge=0.0, le=1.0), Key("Nucleus of sampling; 1 by default.", "P")] = 1.0
    seed: Seed = 0

    @property
    def follows(self) -> dict[Phase, bool]:
        return {phase: self.only in (None, phase) for phase in PHASES}


def run(flags: RunFlags) -> None:
    """Answer a prompt: from --prompt, a file, or standard input."""
    subject = flags.subject
    used = None if flags.dense else subject.need_plan("; or add --dense, which runs without a plan")
    subject = subject.checked(flags)
    flags.register_methods()
    text = given_prompt(flags.prompt, flags.prompt_file)
    if used is not None:
        tell_if_idle(flags, used.decode if flags.follows["decode"] else None)
    session = _session(flags, subject, used)
    (_compare if flags.compare else _answer)(session, text, flags.as_json)


def _chunk(flags: RunFlags, used: Plan | None) -> int | None:
    """As the plan was tested, where nothing else is asked for."""
    return flags.prefill_chunk or (used.quality.step if used and used.quality else None)


def _session(flags: RunFlags, subject: Subject, used: Plan | None) -> Session:
    from sparsekv.cli.answers import Session
    from sparsekv.runtime.hf.generate import Sampling

    def check(info: ModelInfo, _: str) -> None:
        if used is not None:
            flags.check_model(used, info)

    return Session(
        loaded=subject.load(flags, check),
        plan=used,
        **flags.follows,
        exact="decode" if flags.exact == "decode" else flags.exact is not None,
        backend=settings_of(flags).backend,
        allow_mismatch=flags.allow_mismatch,
        chat=not flags.raw,
        max_new_tokens=flags.max_new_tokens,
        chunk=_chunk(flags, used),
        offload=flags.offload_mode,
        kv_host_layers=flags.host_layers,
        kv_dtype=flags.kv_dtype,
        sparse=flags.sparse,
        sampling=Sampling(temperature=flags.temperature, top_p=flags.top_p, seed=flags.seed),
    )


def _answer(session: Session, prompt: str, as_json: bool) -> None:
    with session.applied(say=True) as handle:
        answer = session.ask(prompt, handle, None if as_json else _stream)
    if as_json:
        emit_json(answer.as_data())
    else:
        emit("")
        tell(answer.as_line())
    for remark in filter(None, (session.why_dense(answer), session.beyond_reach(answer))):
        _remark(remark)


def _remark(text: str) -> None:
    for line in wrap(text, WIDTH):
        tell(line)


def _stream(text: str) -> None:
    print(text, end="", flush=True)


# --- dense and sparse side by side ------------------------------------------------------------------------------------


def _compare(session: Session, text: str, as_json: bool) -> None:
    from sparsekv.planner.progress import BarProgress

    dense, sparse = session.dense_and_sparse(text, BarProgress())
    if as_json:
        faster = dense.generation.prefill_seconds / sparse.generation.prefill_seconds
        differ = {"first_diverging_token": _first_difference(dense, sparse), "prefill_speedup": round(faster, 3)}
        emit_json({**sparse.as_data(), "dense": dense.as_data(), **differ})
    else:
        emit(_comparison_text(dense, sparse))
    was_dense = "nothing was sparse" if sparse.is_dense and not sparse.drafted else ""
    for remark in filter(None, (session.why_dense(sparse) or was_dense, session.beyond_reach(sparse))):
        _remark(remark)


def _first_difference(dense: Answer, sparse: Answer) -> int | None:
    """Index of the first new token that is not the same; None if all are."""
    pairs = zip_longest(dense.generation.token_ids, sparse.generation.token_ids)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), None)


_TIMED = 32  # tokens of an answer, from which on the speed of decode means something


def _comparison_text(dense: Answer, sparse: Answer) -> str:
    name, one, other = "exact" if sparse.drafted else "sparse", dense.generation, sparse.generation
    lines = [f"dense:  {one.text.strip()}", f"{name + ':':<7} {other.text.strip()}", ""]
    if rows := [*_compared(dense, sparse)]:
        lines += [columns([("", "dense", name, "speed-up"), *rows], right=(1, 2, 3)), ""]
    index = _first_difference(dense, sparse)
    same = "all new tokens are the same" if index is None else f"the answers part at new token {index + 1}"
    lines.append(f"{same}: {one.prompt_tokens:,} prompt tokens, {one.new_tokens} new")
    if sparse.drafted:
        lines.append(f"{sparse.accepted} of {sparse.drafted} drafted tokens accepted")
    elif not sparse.is_dense and min(one.new_tokens, other.new_tokens) < _TIMED:
        lines.append(f"decode is compared from {_TIMED} new tokens on")
    return "\n".join(lines)


def _compared(dense: Answer, sparse: Answer) -> Iterator[tuple[str, ...]]:
    one, other = dense.generation, sparse.generation
    if sparse.prefill_density < 1.0:
        faster = one.prefill_seconds / other.prefill_seconds
        yield "prefill", f"{one.prefill_seconds:.2f} s", f"{other.prefill_seconds:.2f} s", f"{faster:.2f}x"
        yield "attention computed in prefill", "100%", percent(sparse.prefill_density), ""
    if min(one.new_tokens, other.new_tokens) >= _TIMED and not (sparse.is_dense and not sparse.drafted):
        faster = (other.new_tokens - 1) / other.decode_seconds * one.decode_seconds / (one.new_tokens - 1)
        yield "decode, tokens", dense.rate, sparse.rate, f"{faster:.2f}x"
    if sparse.decode_share not in (None, 1.0):
        yield "attention computed in decode", "100%", percent(sparse.decode_share), ""
    for place in ("device", "host"):
        both = (getattr(answer, f"kv_bytes_{place}") for answer in (dense, sparse))
        before, after = (format_bytes(count) if count else "-" for count in both)
        if before != after:
            yield f"keys and values on the {place}", before, after, ""


# --- the prompt -------------------------------------------------------------------------------------------------------


def given_prompt(text: str | None, file: Path | None) -> str:
    """The prompt of a call.

    Args:
        file: a file that holds it; `-` is standard input. Of both, one newline at the end is left out: `echo` and
            editors add it, and a model goes on behind it in another way.
    """
    if text is not None and file is not None:
        raise UsageError("expected --prompt or --prompt-file, found both; leave one out")
    if text is not None:
        # What an argument holds beside UTF-8 reaches us as escapes that no tokenizer takes.
        return _text(text.encode("utf-8", "surrogateescape"), "--prompt")
    if file is not None and str(file) != "-":
        return _without_newline(text_of(file))
    if file is None and sys.stdin.isatty():
        raise UsageError("expected a prompt, found none; give --prompt or --prompt-file, or pipe one in")
    return _without_newline(_text(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input"))


def _without_newline(text: str) -> str:
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _text(data: bytes, source: str) -> str:
    return with_text(as_text(data, source, MAX_BYTES, PromptError), source)


app = commands.app(
    run,
    "sparsekv run ./my-model --prompt-file book.txt --compare",
    "sparsekv run --plan plan.yaml -p 'What is the special number?' --max-new-tokens 32",
)

"""`sparsekv run`: ask a model something, with its plan applied."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from sparsekv.cli import commands
from sparsekv.cli.arguments import NewTokens, Output, PlacementFlags, Subject, Subjects, settings_of
from sparsekv.cli.doctor import MemoryEstimate, say_memory, tell_if_idle
from sparsekv.cli.output import columns, emit, emit_json, size, tell
from sparsekv.cli.prompts import given_prompt, typed_prompt
from sparsekv.planner.flags import Flag
from sparsekv.planner.options import Hardware, PrefillChunk, Seed
from sparsekv.plans.brief import percent
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan

if TYPE_CHECKING:
    from sparsekv.cli.chat import Answer, Session

# Logits over a temperature below this leave float32; one token has all of the probability long before.
_COLDEST, _HOTTEST = 0.01, 100.0


class RunFlags(Subjects, PlacementFlags, Hardware, Output):
    """Holds what `run` is asked to do."""

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
    dense: Annotated[bool, Flag("Run without the plan.")] = False
    dense_prefill: Annotated[bool, Flag("Prefill without the plan.")] = False
    dense_decode: Annotated[bool, Flag("Decode without the plan.")] = False
    exact: Annotated[
        bool,
        Flag(
            "The output of dense attention, rounding aside: prefill is dense, the plan drafts the answer, and dense "
            "attention checks it. See docs/exact.md."
        ),
    ] = False
    exact_decode: Annotated[bool, Flag("As --exact, behind a prompt that is prefilled by the plan.")] = False
    compare: Annotated[
        bool,
        Flag(
            "Run dense (the model as transformers runs it), then sparse; show both side by side. First both run a "
            "beginning of the prompt, untimed, so that neither pays for being first."
        ),
    ] = False
    max_new_tokens: NewTokens = 256
    temperature: Annotated[
        float, Field(ge=0.0, le=_HOTTEST), Flag(f"0 is greedy; else from {_COLDEST} on.", metavar="T")
    ] = 0.0
    top_p: Annotated[float, Field(ge=0.0, le=1.0), Flag("Nucleus of sampling.", metavar="P")] = 1.0
    seed: Seed = 0
    prefill_chunk: PrefillChunk = None
    dry_run: Annotated[
        bool,
        Flag(
            "Load no weights and run nothing: print the memory that this prompt takes, and the longest that fits. Exit "
            "1 if it does not fit."
        ),
    ] = False

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if 0.0 < self.temperature < _COLDEST:
            raise UsageError(
                f"expected --temperature 0, which is greedy, or one from {_COLDEST} to {_HOTTEST:g}, found "
                f"{self.temperature:g}"
            )
        if self.compare:
            self.refuse(("dense",), "it runs dense as well", "compare")
        if self.dense:
            because = "a plan under --dense-prefill and --dense-decode runs dense, and takes it"
            self.refuse(("offload", "kv_host_layers", "kv_dtype"), because, "dense")
            if not (self.target or self.plan or self.model):
                raise UsageError(
                    "expected a model (a folder, GGUF file, hub id or alias) beside --dense, found none; name one"
                )
        for name in ("exact", "exact_decode"):
            if getattr(self, name):
                self.refuse(("dense", "dense_decode"), "the plan drafts", name)
        if self.exact and self.exact_decode:
            self.refuse(("exact",), "it prefills by the plan", "exact_decode")
        if self.dry_run:
            self.refuse(("dense", "compare"), "nothing is run", "dry_run")
        return self


def run(flags: RunFlags) -> None:
    """Answer a prompt: from --prompt, a file, standard input, or typed at a terminal (several turns)."""
    machine, placing = settings_of(flags), flags.placing
    subject = flags.subject
    used = None if flags.dense else subject.need_plan("; or add --dense, which runs without a plan")
    subject = subject.checked(flags)
    text = given_prompt(flags.prompt, flags.prompt_file)
    if text is None and (flags.as_json or flags.compare or flags.dry_run):
        raise UsageError(
            "expected a prompt beside --json, --compare or --dry-run, found none; give --prompt or --prompt-file"
        )
    if used is not None:
        tell_if_idle(placing, None if flags.dense_decode else used.decode)
    if flags.dry_run:
        assert used is not None, "--dense was refused"
        assert text is not None
        _estimate(flags, subject, used, text)
        return
    session = _session(flags, subject, used, machine.backend)
    if text is None:
        _talk(session)
        return
    if flags.compare:
        from sparsekv.planner.progress import BarProgress

        dense_answer, answer = session.dense_and_sparse(text, BarProgress())
        if flags.as_json:
            emit_json(_comparison(dense_answer, answer))
        else:
            emit(_comparison_text(dense_answer, answer))
    elif flags.as_json:
        answer = session.once(text)
        emit_json(answer.as_data())
    else:
        answer = session.once(text, _stream)
        _tell(answer)
    for remark in filter(None, (session.why_dense(answer), session.beyond_reach(answer))):
        tell(remark)


def _estimate(flags: RunFlags, subject: Subject, used: Plan, text: str) -> None:
    """The memory that a prompt takes."""
    from sparsekv.runtime.hf.generate import room_for_answer

    prefill, decode = (
        None if is_dense else part
        for is_dense, part in ((flags.dense_prefill or flags.exact, used.prefill), (flags.dense_decode, used.decode))
    )
    config, prompt_tokens = subject.config_and_prompt_tokens(text, chat=not flags.raw)
    named = (config, subject.model, used.model_copy(update={"prefill": prefill, "decode": decode}))
    estimate = MemoryEstimate.of(*named, settings_of(flags), flags.placing, flags.allow_mismatch)
    most = min(flags.max_new_tokens, room_for_answer(config.max_position_embeddings, prompt_tokens))
    say_memory(estimate, prompt_tokens, most, chunk=flags.prefill_chunk, as_json=flags.as_json)


def _session(flags: RunFlags, subject: Subject, used: Plan | None, backend: str) -> Session:
    from sparsekv.cli.chat import Session
    from sparsekv.runtime.hf.generate import Sampling

    def check(info: ModelInfo, _: str) -> None:
        if used is not None:
            flags.check_model(used, info)

    return Session(
        loaded=subject.load(flags, check),
        plan=used,
        prefill=not flags.dense_prefill,
        decode=not flags.dense_decode,
        exact="decode" if flags.exact_decode else flags.exact,
        backend=backend,
        allow_mismatch=flags.allow_mismatch,
        chat=not flags.raw,
        max_new_tokens=flags.max_new_tokens,
        chunk=flags.prefill_chunk,
        offload=flags.placing.mode,
        kv_host_layers=flags.placing.host_layers,
        kv_dtype=flags.kv_dtype,
        sampling=Sampling(temperature=flags.temperature, top_p=flags.top_p, seed=flags.seed),
    )


def _talk(session: Session) -> None:
    """Turn after turn over one cache, until the end of the input."""
    from sparsekv.cli.chat import Conversation

    one_text = "" if session.has_turns else "; without a chat template each turn goes on from the text before it"
    tell(f"type a prompt; Ctrl-D ends{one_text}")
    with session.applied() as handle:
        conversation, told = Conversation(session, handle, turns=True), ""
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            try:
                text = typed_prompt()
                if text is None:
                    return
                if text.strip():
                    is_first = not conversation.messages
                    _tell(answer := conversation.ask(text.rstrip("\n"), _stream))
                    if is_first and (why := session.why_dense(answer)):
                        tell(why)
                    if not told and (told := session.beyond_reach(answer)):
                        tell(told)
            except (PromptError, UsageError) as error:
                tell(f"error: {error}")


def _stream(text: str) -> None:
    print(text, end="", flush=True)


def _tell(said: Answer) -> None:
    emit("")
    tell(said.as_line())
    if said.is_stuck:
        tell("the answer repeats itself to its end: this model was not trained for such a prompt or turn")


# --- dense and sparse side by side ------------------------------------------------------------------------------------


def _comparison(dense: Answer, sparse: Answer) -> dict[str, Any]:
    """The JSON of a comparison: the keys of the sparse answer, the dense answer, and how they differ."""
    return sparse.as_data() | {
        "dense": dense.as_data(),
        "first_diverging_token": _first_difference(dense, sparse),
        "prefill_speedup": round(dense.generation.prefill_seconds / sparse.generation.prefill_seconds, 3),
    }


def _first_difference(dense: Answer, sparse: Answer) -> int | None:
    """Index of the first new token that is not the same; None if all are."""
    pairs = zip_longest(dense.generation.token_ids, sparse.generation.token_ids)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), None)


_TIMED = 32  # tokens of an answer, from which on the speed of decode means something


def _comparison_text(dense: Answer, sparse: Answer) -> str:
    """Both answers, a table of what differs, and whether the tokens are the same."""
    name, one, other = "exact" if sparse.drafted else "sparse", dense.generation, sparse.generation
    lines = [f"dense:  {one.text.strip()}", f"{name + ':':<7} {other.text.strip()}", ""]
    lines += [columns([("", "dense", name, "speed-up"), *_compared(dense, sparse)], right=(1, 2, 3)), ""]
    index = _first_difference(dense, sparse)
    same = "all new tokens are the same" if index is None else f"the answers part at new token {index + 1}"
    lines.append(f"{same}: {one.prompt_tokens:,} prompt tokens, {one.new_tokens} new")
    if sparse.drafted:
        lines.append(f"{sparse.accepted} of {sparse.drafted} drafted tokens accepted")
    elif sparse.is_dense:
        lines.append("nothing was sparse: no speed is compared")
    elif min(one.new_tokens, other.new_tokens) < _TIMED:
        lines.append(f"decode is compared from {_TIMED} new tokens on")
    return "\n".join(lines)


def _compared(dense: Answer, sparse: Answer) -> Iterator[tuple[str, ...]]:
    """Rows of what the two did otherwise: name, dense, sparse, speed-up."""
    one, other = dense.generation, sparse.generation
    if sparse.prefill_density < 1.0 or sparse.drafted:
        faster = one.prefill_seconds / other.prefill_seconds
        yield "prefill", f"{one.prefill_seconds:.2f} s", f"{other.prefill_seconds:.2f} s", f"{faster:.2f}x"
    if sparse.prefill_density < 1.0:
        yield "attention computed in prefill", "100%", percent(sparse.prefill_density), ""
    if min(one.new_tokens, other.new_tokens) >= _TIMED and not (sparse.is_dense and not sparse.drafted):
        faster = (other.new_tokens - 1) / other.decode_seconds * one.decode_seconds / (one.new_tokens - 1)
        yield "decode, tokens", dense.rate, sparse.rate, f"{faster:.2f}x"
    if sparse.decode_share not in (None, 1.0):
        yield "attention computed in decode", "100%", percent(sparse.decode_share), ""
    for place in ("device", "host"):
        before, after = (getattr(answer, f"kv_bytes_{place}") for answer in (dense, sparse))
        if size(before) != size(after):
            yield f"keys and values on the {place}", size(before) if before else "-", size(after) if after else "-", ""


app = commands.app(commands.command(run))

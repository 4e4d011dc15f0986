"""`sparsekv run`: ask a model something, with its plan at work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli.options import AllowMismatch, Backend, Chunk, Device, Dtype, Json, Model, PlanFile, Seed, Target
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.plans.errors import PromptError, UsageError

if TYPE_CHECKING:
    from sparsekv.cli.session import Session


def run(
    target: Target = None,
    plan: PlanFile = None,
    model: Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", metavar="FILE", help="A file with the prompt; - is stdin.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    dense: Annotated[bool, typer.Option("--dense", help="Run without the plan.")] = False,
    dense_prefill: Annotated[bool, typer.Option("--dense-prefill", help="Prefill without the plan.")] = False,
    dense_decode: Annotated[bool, typer.Option("--dense-decode", help="Decode without the plan.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run dense, then sparse; show both side by side. First both run a beginning of the prompt, untimed, "
            "so that neither pays for being first.",
        ),
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Most tokens to generate.")
    ] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, metavar="T", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, metavar="P", help="Nucleus of sampling.")] = 1.0,
    seed: Seed = 0,
    chunk: Chunk = None,
    kv_host_layers: Annotated[
        str | None,
        typer.Option(
            "--kv-host-layers",
            metavar="N|LAYERS",
            help="Keep the keys and values of N layers, or of layers such as 4-7,9, in host memory, in place of those "
            "the plan moves. Dense decode reads them back at every step.",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    backend: Backend = None,
    allow_mismatch: AllowMismatch = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt: from --prompt, a file, standard input, or typed at a terminal (several turns)."""
    from sparsekv.cli.prompts import given_prompt
    from sparsekv.cli.subject import backend_named, load, need_plan, subject_of

    if dense and compare:
        raise UsageError("expected --dense or --compare, found both; --compare runs dense as well")
    placed = _host_layers(kv_host_layers, dense)
    subject = subject_of(target, plan, model)
    used = None if dense else need_plan(subject)
    text = given_prompt(prompt, prompt_file)
    if text is None and (as_json or compare):
        raise UsageError("expected a prompt beside --json or --compare, found none; give --prompt or --prompt-file")
    from sparsekv.cli.session import Session
    from sparsekv.runtime.hf.generate import Sampling

    session = Session(
        loaded=load(subject, device, dtype),
        plan=used,
        prefill=not dense_prefill,
        decode=not dense_decode,
        backend=backend_named(backend),
        allow_mismatch=allow_mismatch,
        chat=not raw,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        kv_host_layers=placed,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
    )
    if text is None:
        _talk(session)
    elif compare:
        _compare(session, text, as_json)
    else:
        _answer(session, text, as_json)


def _host_layers(text: str | None, dense: bool) -> int | tuple[int, ...] | None:
    from sparsekv.cli.values import layers_from

    if text is None:
        return None
    if dense:
        raise UsageError(
            "expected --kv-host-layers with a plan at work, found --dense; "
            "--dense-prefill and --dense-decode together run dense and place keys and values"
        )
    return int(text) if text.isdecimal() else layers_from(text, "--kv-host-layers")


def _answer(session: Session, text: str, as_json: bool) -> None:
    said = session.once(text, None if as_json else _stream)
    if as_json:
        emit_json(said.as_data())
    else:
        emit("")
        tell(said.as_line())


def _compare(session: Session, text: str, as_json: bool) -> None:
    from sparsekv.cli.compare import comparison, comparison_text

    dense, sparse = session.dense_and_sparse(text)
    if as_json:
        emit_json(comparison(dense, sparse))
    else:
        emit(comparison_text(dense, sparse))


def _talk(session: Session) -> None:
    """Turn after turn over one cache, until the end of the input."""
    from sparsekv.cli.answers import answer

    tell("type a prompt; Ctrl-D ends")
    with session.applied() as handle:
        conversation = session.conversation()
        while (text := _typed()) is not None:
            if not text.strip():
                continue
            try:
                said = answer(conversation, handle, text, _stream)
            except PromptError as error:
                tell(f"error: {error}")
            else:
                emit("")
                tell(said.as_line())


def _typed() -> str | None:
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _stream(text: str) -> None:
    print(text, end="", flush=True)

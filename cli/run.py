"""`sparsekv run`: ask a model something, with its plan applied."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.cli import arguments
from sparsekv.cli.output import columns, emit, emit_json, size, tell
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.types import MAX_ID, MAX_LENGTH

if TYPE_CHECKING:
    from sparsekv.cli.chat import Answer, Session

# Logits over a temperature below this leave float32; one token has all of the probability long before.
_COLDEST, _HOTTEST = 0.01, 100.0


def run(
    target: arguments.Target = None,
    plan: arguments.PlanFile = None,
    model: arguments.Model = None,
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
        int, typer.Option(min=1, max=MAX_LENGTH, metavar="N", help="Most tokens to generate.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=_HOTTEST, metavar="T", help=f"0 is greedy; else from {_COLDEST} on.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="P", help="Nucleus of sampling.")] = 1.0,
    seed: arguments.Seed = 0,
    chunk: arguments.Chunk = None,
    kv_host_layers: Annotated[
        str | None,
        typer.Option(
            metavar="N|LAYERS",
            help="Store the keys and values of N layers, or of layers such as 4-7,9, in host memory, in place of those "
            "the plan moves. Dense decode reads them back at every step.",
        ),
    ] = None,
    device: arguments.Device = None,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    allow_mismatch: arguments.AllowMismatch = False,
    as_json: arguments.Json = False,
) -> None:
    """Answer a prompt: from --prompt, a file, standard input, or typed at a terminal (several turns)."""
    from sparsekv.cli.prompts import given_prompt

    if dense and compare:
        raise UsageError("expected --dense or --compare, found both; --compare runs dense as well")
    if 0.0 < temperature < _COLDEST:
        raise UsageError(
            f"expected --temperature 0, which is greedy, or one from {_COLDEST} to {_HOTTEST:g}, found {temperature:g}"
        )
    machine = arguments.settings(device, dtype, backend)
    on_host = _host_layers(kv_host_layers, dense)
    if dense and target is None and plan is None and model is None:
        raise UsageError("expected a model (a folder, hub id or alias) beside --dense, found none; name one")
    subject = arguments.Subject.named(target, plan, model)
    used = None if dense else subject.need_plan()
    text = given_prompt(prompt, prompt_file)
    if text is None and (as_json or compare):
        raise UsageError("expected a prompt beside --json or --compare, found none; give --prompt or --prompt-file")
    from sparsekv.cli.chat import Session
    from sparsekv.plans.schema import check_model
    from sparsekv.runtime.hf.generate import Sampling

    session = Session(
        loaded=subject.load(device, dtype, lambda info, _: used and check_model(used, info, allow_mismatch)),
        plan=used,
        prefill=not dense_prefill,
        decode=not dense_decode,
        backend=machine.backend,
        allow_mismatch=allow_mismatch,
        chat=not raw,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        kv_host_layers=on_host,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
    )
    if text is None:
        _talk(session)
    elif compare:
        dense_answer, sparse_answer = session.dense_and_sparse(text)
        if as_json:
            emit_json(_comparison(dense_answer, sparse_answer))
        else:
            emit(_comparison_text(dense_answer, sparse_answer))
    elif as_json:
        emit_json(session.once(text).as_data())
    else:
        _tell(session.once(text, _stream))


def _host_layers(text: str | None, dense: bool) -> int | tuple[int, ...] | None:
    if text is None:
        return None
    if dense:
        raise UsageError(
            "expected --kv-host-layers with a plan applied, found --dense; "
            "--dense-prefill and --dense-decode together run dense and place keys and values"
        )
    is_count = text.isdecimal() and len(text) <= len(str(MAX_ID))
    return int(text) if is_count else arguments.layers_from(text, "--kv-host-layers")


def _talk(session: Session) -> None:
    """Turn after turn over one cache, until the end of the input."""
    from sparsekv.cli.chat import Conversation
    from sparsekv.cli.prompts import typed_prompt

    tell("type a prompt; Ctrl-D ends")
    with session.applied() as handle:
        conversation = Conversation(session, handle)
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            try:
                text = typed_prompt()
                if text is None:
                    return
                if text.strip():
                    _tell(conversation.ask(text.rstrip("\n"), _stream))
            except PromptError as error:
                tell(f"error: {error}")


def _stream(text: str) -> None:
    print(text, end="", flush=True)


def _tell(said: Answer) -> None:
    emit("")
    tell(said.as_line())


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


def _comparison_text(dense: Answer, sparse: Answer) -> str:
    facts: dict[str, Callable[[Answer], str]] = {
        "prompt tokens": lambda answer: f"{answer.generation.prompt_tokens:,}",
        "prefill": lambda answer: f"{answer.generation.prefill_seconds:.2f} s",
        "prefill density": lambda answer: f"{answer.prefill_density:.3f}",
        "new tokens": lambda answer: f"{answer.generation.new_tokens}",
        "decode": lambda answer: answer.rate,
        "KV on the device": lambda answer: size(answer.kv_bytes_device),
        "KV on the host": lambda answer: size(answer.kv_bytes_host),
    }
    rows = [(name, show(dense), show(sparse)) for name, show in facts.items()]
    index, count = _first_difference(dense, sparse), dense.generation.new_tokens
    same = f"all {count} new tokens are the same"
    return "\n".join(
        [
            f"dense:  {dense.generation.text.strip()}",
            f"sparse: {sparse.generation.text.strip()}",
            "",
            columns([("", "dense", "sparse"), *rows], right=(1, 2)),
            "",
            same if index is None else f"the answers part at new token {index + 1} of {count}",
        ]
    )

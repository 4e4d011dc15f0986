"""`sparsekv run`: ask a model something, with its plan applied."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.cli import arguments
from sparsekv.cli.doctor import MemoryEstimate, say_memory, tell_if_idle
from sparsekv.cli.output import columns, emit, emit_json, size, tell
from sparsekv.plans.errors import PromptError, UsageError

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
    max_new_tokens: arguments.MaxNewTokens = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=_HOTTEST, metavar="T", help=f"0 is greedy; else from {_COLDEST} on.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="P", help="Nucleus of sampling.")] = 1.0,
    seed: arguments.Seed = 0,
    chunk: arguments.Chunk = None,
    offload: arguments.OffloadMode = None,
    kv_host_layers: arguments.HostLayers = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Load no weights and run nothing: print the memory that this prompt takes, and the longest that fits. "
            "Exit 1 if it does not fit.",
        ),
    ] = False,
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
    placing = arguments.Placing.named(offload, kv_host_layers)
    if dense and not placing.by_default:
        raise UsageError(
            "expected --offload and --kv-host-layers with a plan applied, found --dense; "
            "--dense-prefill and --dense-decode together run dense and place keys and values"
        )
    if dry_run and (dense or compare):
        raise UsageError("expected --dry-run with a plan, found --dense or --compare; leave them out")
    if dense and target is None and plan is None and model is None:
        raise UsageError("expected a model (a folder, hub id or alias) beside --dense, found none; name one")
    subject = arguments.Subject.named(target, plan, model)
    used = None if dense else subject.need_plan()
    text = given_prompt(prompt, prompt_file)
    if text is None and (as_json or compare or dry_run):
        raise UsageError(
            "expected a prompt beside --json, --compare or --dry-run, found none; give --prompt or --prompt-file"
        )
    if not dense:
        tell_if_idle(placing, None if dense_decode or used is None else used.decode)
    if dry_run:
        from sparsekv.runtime.hf.generate import room_for_answer

        assert used is not None, "--dense was refused"
        assert text is not None
        phases = {"prefill": None if dense_prefill else used.prefill, "decode": None if dense_decode else used.decode}
        config, prompt_tokens = subject.config_and_prompt_tokens(text, chat=not raw)
        named = (config, subject.model, used.model_copy(update=phases))
        estimate = MemoryEstimate.of(*named, machine, placing, allow_mismatch)
        room = room_for_answer(config.max_position_embeddings, prompt_tokens)
        say_memory(estimate, prompt_tokens, min(max_new_tokens, room), chunk=chunk, as_json=as_json)
        return
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
        offload=placing.mode,
        kv_host_layers=placing.host_layers,
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


def _talk(session: Session) -> None:
    """Turn after turn over one cache, until the end of the input."""
    from sparsekv.cli.chat import Conversation
    from sparsekv.cli.prompts import typed_prompt

    tell("type a prompt; Ctrl-D ends")
    with session.applied() as handle:
        conversation = Conversation(session, handle, turns=True)
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            try:
                text = typed_prompt()
                if text is None:
                    return
                if text.strip():
                    _tell(conversation.ask(text.rstrip("\n"), _stream))
            except (PromptError, UsageError) as error:
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
    same = "the new token is the same" if count == 1 else f"all {count} new tokens are the same"
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

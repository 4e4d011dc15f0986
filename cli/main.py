"""`sparsekv`: the list of commands. Each stands in a file of its own and imports what it needs when it runs."""

from __future__ import annotations

import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from sparsekv.cli.output import (
    emit,
    emit_json,
    ending_by_signals,
    escaped,
    failure_data,
    handled_signals,
    prepare_streams,
    report,
    show_warning,
)
from sparsekv.plans.errors import did_you_mean

# Raised for wrong options, and shown by typer itself together with the usage.
_WrongUsage: type[Exception] = typer.BadParameter.__bases__[0]
_JSON = "sparsekv.json"  # in the context: whether a failure is to be told as JSON too


# Of each command the line in the list of commands; it stands in the module of its name, or in that of plan files.
SUMMARIES = {
    "plan": "Profile a model and write its sparsity plan.",
    "run": "Answer a prompt by a model and its plan.",
    "serve": "Serve a model and its plan by `transformers serve`.",
    "show": "Print a plan as tables.",
    "report": "Write a plan as a page with charts.",
    "diff": "Say what changed between two plans.",
    "validate": "Check plan files: schema, consistency, integrity.",
    "verify": "Compare a plan with dense on held-out prompts, by its gate.",
    "seal": "Renew the digest of an edited plan.",
    "publish": "Put a plan beside its model; print a section for its card.",
    "eval": "Measure a model on the tasks, dense and by its plan.",
    "compare": "Hold methods to one share or time beside a plan.",
    "import": "Make a plan of another tool's settings.",
    "export": "Write a plan for another tool.",
    "schema": "Print the JSON Schema of the plan file.",
    "doctor": "Print what is installed and can run, or what a run takes.",
    "bench": "Time kernels, a model, or vLLM's requests against dense.",
}

_MODULES = dict.fromkeys(("show", "report", "diff", "validate", "seal", "schema"), "plan_commands")
_MODULES |= dict.fromkeys(("import", "export", "publish"), "exchange")


class _Modules(Mapping[str, Any]):
    """The commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in SUMMARIES:
            raise KeyError(name)
        module = import_module(f"sparsekv.cli.{_MODULES.get(name, name)}")
        own = typer.main.get_command(module.app)
        found: Any = getattr(own, "commands", {}).get(name, own)
        found.name = name
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


class _Commands(TyperGroup):
    """Runs a command and turns what goes wrong in it into a message, an exit code, and JSON where that is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Modules()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(SUMMARIES)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta.setdefault(_JSON, "--json" in args)  # read here: what is wrong may be the other options
        with _telling_usage(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with ending_by_signals(), warnings.catch_warnings(), _telling_usage(ctx):
                warnings.showwarning = show_warning
                result = super().invoke(ctx)
            sys.stdout.flush()  # here, so that a reader that has left is noticed here
            return result
        except (typer.Exit, typer.Abort, SystemExit, _WrongUsage):  # rich leaves by SystemExit when its reader has left
            raise
        except BaseException as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            raise typer.Exit(report(error, ctx.invoked_subcommand or "", ctx.meta[_JSON])) from error


def _with_suggestion(message: str) -> str:
    """A message about a value that is none of the choices, with the nearest of them."""
    message = message.replace("Value error, ", "", 1)  # pydantic's
    parts = re.fullmatch(r"(?s).*'(.*)' is not one of (.*)\.", message)
    if parts is None:
        return message
    return message.removesuffix(".") + (did_you_mean(parts[1], re.findall(r"'([^']+)'", parts[2])) or ".")


def _key_meant(error: Exception) -> str:
    """Returns the key of `--set` that a flag that is not there may have been meant for."""
    option, command = getattr(error, "option_name", ""), getattr(getattr(error, "ctx", None), "command", None)
    meant = get_close_matches(option.strip("-").replace("-", "_"), getattr(command, "keys", ()), 1)
    return f" Did you mean --set {meant[0]}=VALUE?" if option and meant else ""


@contextmanager
def _telling_usage(ctx: Any) -> Iterator[None]:
    """Wrong usage as JSON, once, where that is asked for; people are told by typer, and nothing that moves a cursor."""
    try:
        yield
    except _WrongUsage as error:
        error.message = escaped(_with_suggestion(error.message) + _key_meant(error))  # type: ignore[attr-defined]
        if ctx.meta.get(_JSON):
            ctx.meta[_JSON] = False
            data = failure_data("UsageError", error.format_message(), error.exit_code)  # type: ignore[attr-defined]
            emit_json({"error": data})
        raise


app = typer.Typer(
    name="sparsekv",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from sparsekv import __version__

        emit(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Compile a long-context language model into a sparsity plan, and run it."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line `arguments` (those of the process where None) and exits."""
    prepare_streams()
    before = {number: signal.getsignal(number) for number in handled_signals()}
    try:
        app(args=None if arguments is None else list(arguments), prog_name="sparsekv")
    except (KeyboardInterrupt, OSError) as error:  # outside a command, which reports its own
        sys.exit(report(error, ""))
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # so rich leaves
            sys.exit(report(left.__context__, ""))
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    sys.exit(0)

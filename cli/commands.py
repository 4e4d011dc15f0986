"""Commands from models of options: each field a flag, with its help, type, bounds and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator

from sparsekv.planner.flags import Options, Spelled

_PLAIN = (bool, int, float, str, Path)


def app(run: Callable[..., None]) -> typer.Typer:
    """A command by itself."""
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    made.command()(run)
    return made


def command(run: Callable[[Any], None]) -> Callable[..., None]:
    """A function for typer that calls `run`, whose one parameter is a model of options, with what was typed."""
    (parameter,) = inspect.signature(run, eval_str=True).parameters.values()
    model: type[Options] = parameter.annotation
    spelled = {one.name: one for one in model.spelled()}

    def called(context: typer.Context, **values: Any) -> None:
        typed = {name: value for name, value in values.items() if _is_typed(context, name)}
        # What is on by default has a flag that switches it off.
        run(
            model(
                **{name: not value if spelled[name].field.default is True else value for name, value in typed.items()}
            )
        )

    called.__doc__, called.__name__, called.__annotations__ = run.__doc__, run.__name__, {}
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    called.__signature__ = inspect.Signature([context, *_parameters(spelled)])  # type: ignore[attr-defined]
    return called


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameters(spelled: dict[str, Spelled]) -> Iterator[inspect.Parameter]:
    """Arguments first, then what is required."""
    for one in sorted(spelled.values(), key=lambda one: (not one.flag.is_argument, not one.field.is_required())):
        default = False if one.field.default is True else one.field.default
        if one.field.is_required():
            default = inspect.Parameter.empty
        elif not isinstance(default, _PLAIN):
            default = None
        annotation = Annotated[_read_type(one), _option(one)]  # type: ignore[valid-type]
        yield inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(one: Spelled) -> Any:
    """Typer's part of a parameter."""
    if one.flag.is_argument:
        return typer.Argument(metavar=one.flag.metavar, help=one.flag.help, show_default=False)
    bounds = () if _is_text(one) else one.parts
    most = {name: getattr(bound, name) for bound in bounds for name in ("ge", "le") if hasattr(bound, name)}
    return typer.Option(
        *one.names,
        metavar=one.flag.metavar,
        help=one.flag.help,
        min=most.get("ge"),
        max=most.get("le"),
        show_default=not isinstance(one.field.default, bool),
    )


def _read_type(one: Spelled) -> Any:
    """Returns what the command line reads: numbers, words, files and choices as they are, all else as text."""
    read: Any = _plain(one.flag.reads or (str if _is_text(one) else one.field.annotation))
    return read if one.field.is_required() or get_origin(read) is list else read | None


def _plain(read: Any) -> Any:
    """A type without its bounds, which not every release of typer takes inside of another one."""
    if get_origin(read) is Annotated:
        return _plain(get_args(read)[0])
    if get_origin(read) in (Union, UnionType):
        return Union[tuple(map(_plain, get_args(read)))]  # noqa: UP007
    return read


def _is_text(one: Spelled) -> bool:
    return any(isinstance(part, BeforeValidator) for part in one.parts)

"""Commands from models of options: fields as flags and as keys of `--set`, with help, types, bounds and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator
from typer.core import TyperCommand

from sparsekv.planner.flags import Key, Options, Spelled

_PLAIN = (bool, int, float, str, Path)
_OTHERS, _KEYS = _LAST = "Options", "Keys of --set"


class Command(TyperCommand):
    """A command whose help lists options by group, then keys of `--set`, then examples, which are its epilog."""

    @property
    def keys(self) -> dict[str, Key]:
        return getattr(self.callback, "keys", {})

    @property
    def examples(self) -> list[str]:
        return (self.epilog or "").splitlines()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                is_argument = param.param_type_name == "argument"
                panel = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or _OTHERS
                groups.setdefault(panel, []).append(record)
        groups.setdefault(_KEYS, []).extend((f"  {name}={key.metavar}", key.help) for name, key in self.keys.items())
        for name in (*(name for name in groups if name not in _LAST), *_LAST):
            if records := groups.get(name):
                with formatter.section(name):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in self.examples))


def group(**settings: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **settings)


def app(run: Callable[..., None], *examples: str) -> typer.Typer:
    made = group()
    add(made, run, *examples)
    return made


def add(to: typer.Typer, run: Callable[..., None], *examples: str, name: str | None = None, summary: str = "") -> None:
    """Adds a command that takes a model of options, or parameters that typer makes options of."""
    parameters = inspect.signature(run, eval_str=True).parameters.values()
    takes_model = [parameter.annotation for parameter in parameters if isinstance(parameter.annotation, type)]
    called = command(run) if takes_model and issubclass(takes_model[0], Options) else run
    to.command(name, cls=Command, short_help=summary or None, epilog="\n".join(examples))(called)


def command(run: Callable[[Any], None]) -> Callable[..., None]:
    """A function for typer that calls `run`, whose one parameter is a model of options, with what was typed."""
    (parameter,) = inspect.signature(run, eval_str=True).parameters.values()
    model: type[Options] = parameter.annotation
    spelled, keys = {one.name: one for one in model.spelled()}, model.set_keys()

    def called(context: typer.Context, **values: Any) -> None:
        given: dict[str, Any] = dict(model.set_by(values.pop("set_keys", None) or ()))
        for name, value in values.items():
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
                # What is on by default has a flag that switches it off.
                given[name] = not value if spelled[name].field.default is True else value
        run(model(**given))

    called.__doc__, called.__name__, called.__annotations__ = run.__doc__, run.__name__, {}
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *_parameters(spelled), *(_set_keys() if keys else ())]
    called.__signature__, called.keys = inspect.Signature(parameters), keys  # type: ignore[attr-defined]
    return called


def _set_keys() -> Iterator[inspect.Parameter]:
    help = "Set an option that has no flag; may be repeated."
    option = typer.Option("--set", metavar="KEY=VALUE", help=help, show_default=False, rich_help_panel=_KEYS)
    annotation = Annotated[list[str] | None, option]
    yield inspect.Parameter("set_keys", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parameters(spelled: dict[str, Spelled]) -> Iterator[inspect.Parameter]:
    for flag in sorted(spelled.values(), key=lambda flag: (not flag.flag.is_argument, not flag.field.is_required())):
        default = False if flag.field.default is True else flag.field.default
        if flag.field.is_required():
            default = inspect.Parameter.empty
        elif not isinstance(default, _PLAIN):
            default = None
        annotation = Annotated[_read_type(flag), _option(flag)]  # type: ignore[valid-type]
        yield inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(option: Spelled) -> Any:
    if option.flag.is_argument:
        return typer.Argument(metavar=option.flag.metavar, help=option.flag.help, show_default=False)
    bounds = () if _is_text(option) else option.parts
    most = {name: getattr(bound, name) for bound in bounds for name in ("ge", "le") if hasattr(bound, name)}
    return typer.Option(
        *option.names,
        metavar=option.flag.metavar,
        help=option.flag.help,
        min=most.get("ge"),
        max=most.get("le"),
        show_default=not isinstance(option.field.default, bool),
        rich_help_panel=option.group,
    )


def _read_type(option: Spelled) -> Any:
    """The type that the command line reads: numbers, words, files and choices as they are, all else as text."""
    read: Any = _plain(option.flag.reads or (str if _is_text(option) else option.field.annotation))
    return read if option.field.is_required() or get_origin(read) is list else read | None


def _plain(read: Any) -> Any:
    """A type without its bounds, which not every release of typer takes inside of another one."""
    if get_origin(read) is Annotated:
        return _plain(get_args(read)[0])
    if get_origin(read) in (Union, UnionType):
        return Union[tuple(map(_plain, get_args(read)))]  # noqa: UP007
    return read


def _is_text(option: Spelled) -> bool:
    return any(isinstance(part, BeforeValidator) for part in option.parts)

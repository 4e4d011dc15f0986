"""The base of options: a frozen model whose fields carry type, bounds and default; and the meaning of texts.

The command line is generated from such models (cli/commands.py); programs make them by keyword. A field is a flag
(`Flag`), a key of `--set KEY=VALUE` (`Key`), or for programs alone. A value may be given as the text that the command
line takes: `lengths="4k,16k"`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import get_annotations
from itertools import chain
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from sparsekv.plans.errors import UsageError, did_you_mean
from sparsekv.plans.patterns import Budget, TileShape, fraction, tokens
from sparsekv.plans.types import LEAST_CHUNK, MAX_LENGTH, parse_ids, parse_length

LENGTHS = (("--lengths", "--length"), "LIST")  # names of a flag, and its values
MOST = 1 << 20  # of whatever is counted: more is a slip of the hand


@dataclass(frozen=True, slots=True)
class Flag:
    """A field as the command line takes it.

    Attributes:
        names: the flag and other names for it; by default the name of the field, after "no-" where it is on.
        reads: the type that the command line reads, where that is not the field's.
        is_argument: it is not a flag, but a word of its own.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    reads: Any = None
    is_argument: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    help: str
    metavar: str


@dataclass(frozen=True, slots=True)
class Unread:
    """Options that nothing reads, and so are refused.

    Attributes:
        beside: the options that leave them unread together; a pair is one with that value.
        without: options any of which has them read.
    """

    names: Collection[str]
    because: str
    beside: tuple[str | tuple[str, Any], ...] = ()
    without: tuple[str, ...] = ()

    def check(self, options: Options) -> None:
        switches = [one if isinstance(one, str) else one[0] for one in self.beside]
        values = [getattr(options, one[0]) == one[1] for one in self.beside if not isinstance(one, str)]
        unread = next((name for name in self.names if name not in switches and options.is_given(name)), None)
        if unread is None or not all((*map(options.is_given, switches), *values)):
            return
        if any(map(options.is_given, self.without)):
            return
        given, *others = (options.flag_of(name, getattr(options, name)) for name in (unread, *switches))
        if not others:
            raise UsageError(f"expected no {given}: {self.because}; leave it out")
        raise UsageError(f"expected {given} or {' and '.join(others)}, found both: {self.because}; leave one out")


class Spelled(NamedTuple):
    name: str
    field: FieldInfo
    flag: Flag
    group: str

    @property
    def names(self) -> tuple[str, ...]:
        off = "no-" if self.field.default is True else ""
        return self.flag.names or (f"--{off}{self.name.replace('_', '-')}",)

    @property
    def parts(self) -> list[Any]:
        """Bounds and validators of the values, also of an alternative to None."""
        nested = (part for one in get_args(self.field.annotation) for part in getattr(one, "__metadata__", ()))
        return [*self.field.metadata, *chain(*(getattr(part, "metadata", (part,)) for part in nested))]


class Options(BaseModel):
    """Options of a call.

    Attributes:
        group: what `--help` lists the flags of this class under.
        unread: options that are refused, beside those of its bases.
    """

    group: ClassVar[str] = "Options"
    unread: ClassVar[tuple[Unread, ...]] = ()
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UsageError(self._told(error)) from None

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        for base in reversed(type(self).__mro__):
            for rule in vars(base).get("unread", ()):
                rule.check(self)
        return self

    def but(self, **changes: Any) -> Self:
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)

    @classmethod
    def declared(cls) -> Iterator[tuple[str, FieldInfo, type[Options]]]:
        """The fields, each with the class that declares it: the model's own, then those of its bases in their order."""
        first = {name: base for base in reversed(cls.__mro__) for name in get_annotations(base)}
        names = dict.fromkeys(name for base in cls.__mro__ for name in get_annotations(base))
        yield from ((name, cls.model_fields[name], first[name]) for name in names if name in cls.model_fields)

    @classmethod
    def spelled(cls) -> Iterator[Spelled]:
        for name, field, base in cls.declared():
            for flag in (part for part in field.metadata if isinstance(part, Flag)):
                yield Spelled(name, field, flag, base.group)

    @classmethod
    def set_keys(cls) -> dict[str, Key]:
        declared = ((name, part) for name, field, _ in cls.declared() for part in field.metadata)
        return {name: part for name, part in declared if isinstance(part, Key)}

    @classmethod
    def set_by(cls, texts: Sequence[str]) -> dict[str, str]:
        """The fields that `--set` gives, each KEY=VALUE, as texts that a model takes."""
        found: dict[str, str] = {}
        for text in texts:
            key, _, value = text.partition("=")
            key, keys = key.strip().replace("-", "_"), cls.set_keys()
            if key not in keys:
                flag = next((one.names[0] for one in cls.spelled() if one.name == key), "")
                meant = f"; it is the flag {flag}" if flag else did_you_mean(key, keys)
                raise UsageError(f"--set: expected one of {', '.join(keys)}, found {key!r:.40}{meant}")
            if not value or key in found:
                raise UsageError(f"--set {key}: expected {key}={keys[key].metavar} once, found {text!r:.60}")
            found[key] = value
        return found

    @classmethod
    def flag_of(cls, name: str, value: object = None) -> str:
        """A field as messages show it, with its value if that is a word."""
        if name in cls.set_keys():
            return f"--set {name}"
        flag = next((one.names[0] for one in cls.spelled() if one.name == name), name)
        word = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        return f"{flag} {word}" if isinstance(word, str) else flag

    def is_given(self, name: str) -> bool:
        """True of a field that was set to something."""
        value = getattr(self, name) if name in self.model_fields_set else None
        return not (value is None or value is False or value == ())

    def typed(self, name: str) -> Any:
        """The value of a field that was asked for; None of one left at its default."""
        return getattr(self, name) if self.is_given(name) else None

    @classmethod
    def _told(cls, error: ValidationError) -> str:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            near = get_close_matches(name, cls.model_fields, 1) or list(cls.model_fields)
            return f"expected an option such as {near[0]}, found {name!r:.40}"
        if first["type"] == "value_error":
            return f"{cls.flag_of(name)}: {first['ctx']['error']}"
        expected, found = first["msg"].replace("Input should be", "expected"), first["input"]
        expected = "expected one or more" if first["type"] == "too_short" else expected
        meant = did_you_mean(str(found), re.findall("'([^']*)'", expected)) if first["type"] == "literal_error" else ""
        return f"{cls.flag_of(name)}: {expected}, found {found!r:.60}{meant}"


# --- what texts mean --------------------------------------------------------------------------------------------------


def text(parse: Callable[[str], Any]) -> BeforeValidator:
    """A validator that takes a text for what `parse` makes of it."""

    def read(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except UsageError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(read)


def words(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(","))
    if "" in found:
        raise ValueError(f"expected names separated by commas, found {text!r:.40}")
    return found


def lengths(text: str) -> tuple[int, ...]:
    """Lengths such as 4k,16k, in the order given: densities may pair up with them."""
    return tuple(map(parse_length, text.split(",")))


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, such as 1,4."""
    numbers = tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in words(text))
    if not all(1 <= number <= MOST for number in numbers):
        raise ValueError(f"expected whole numbers from 1 to {MOST}, such as 1,4, found {text!r:.40}")
    return numbers


def one_share(text: str) -> float:
    """A share such as 0.3 or 30%."""
    if (share := _share(text)) is None:
        raise ValueError(f"expected a share above 0 and up to 1, such as 0.3 or 30%, found {text!r:.40}")
    return share


def shares(text: str) -> tuple[float, ...]:
    return tuple(map(one_share, text.split(",")))


def budget(text: str) -> Budget:
    """A number of tokens (2048, 2k) or a share of the context (10%, 0.1)."""
    share = _share(text)
    try:
        return tokens(parse_length(text))
    except UsageError:
        if share is not None:
            return fraction(share)
    raise ValueError(f"expected tokens, such as 2048 or 2k, or a share up to 100%, found {text!r:.40}")


_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kmgt]i?b)", re.ASCII | re.IGNORECASE)
_UNITS = {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", start=1)}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", start=1)}


def size(text: str) -> int:
    """An amount of memory such as 80GiB or 128 GB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not (count := int(float(found[1]) * _UNITS[found[2].lower()])):
        raise ValueError(f"expected an amount of memory, such as 80GiB or 128GB, found {text!r:.40}")
    return count


def square(side: str) -> TileShape:
    return TileShape.model_validate({"query": int(side), "key": int(side)})


def _share(text: str) -> float | None:
    """A share above 0 and up to 1; None where the text is none."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        return None
    return share if 0.0 < share <= 1.0 else None


def one_of(names: Sequence[str]) -> AfterValidator:
    def known(name: str) -> str:
        if name not in names:
            raise ValueError(f"expected one of {', '.join(names)}, found {name!r:.40}{did_you_mean(name, names)}")
        return name

    return AfterValidator(known)


def each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"expected each once, found {', '.join(map(str, values))}")
    return values


def _not_empty(value: Budget) -> Budget:
    if value.tokens == 0:
        raise ValueError("expected a budget of one token or more, found 0")
    return value


Count = Annotated[int, Field(ge=1, le=MOST)]
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Lengths = Annotated[tuple[Length, ...], text(lengths), AfterValidator(each_once)]
Shares = Annotated[tuple[Share, ...], text(shares)]
OneShare = Annotated[Share, text(one_share)]
OneLength = Annotated[Length, text(parse_length)]
Size = Annotated[int, text(size)]
Counts = Annotated[tuple[Count, ...], text(counts), AfterValidator(each_once)]
Layers = Annotated[tuple[int, ...], text(parse_ids)]
Names = Annotated[tuple[str, ...], text(words), AfterValidator(each_once)]
Chunk = Annotated[Annotated[int, Field(ge=LEAST_CHUNK, le=MAX_LENGTH)] | None, text(parse_length)]
TokenBudget = Annotated[Budget, text(budget), AfterValidator(_not_empty)]
Tile = Annotated[TileShape | None, text(square)]

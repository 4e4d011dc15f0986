"""Methods from outside: a prefill rule, a decode selector or an eviction score is one class with a name, by which plans
and commands then know it.

A package names its classes as entry points of the group `sparsekv.methods`; `--methods FILE.py` registers the classes
of a file for one call. Such a file is code, so that the command line alone names one, never a plan or the folder of a
model.

Shapes: B batch, H query heads, G KV heads, S queries, K keys so far, L new keys, N query heads of a KV head, W observed
queries, P pages, T row tiles, M key tiles, D head size; g is 1 or G.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from sparsekv.kernels.keys import PLAIN, Softmax
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import UsageError, did_you_mean
from sparsekv.plans.patterns import METHOD_NAME, PATTERNS, Pattern, Registered, TileShape, fraction
from sparsekv.plans.phases import BUILT_IN_SCORE

GROUP = "sparsekv.methods"


@dataclass(frozen=True, slots=True)
class Layer:
    """Facts of one layer's call."""

    number: int
    chunk: Chunk
    tile: TileShape
    scale: float
    window: int | None = None  # the layer's own sliding window
    softmax: Softmax = PLAIN


class Method:
    """The base of the three kinds.

    Attributes:
        name: by which plans and commands name it.
        engines: it also runs in engines with pages, where nothing may wait for the device.
    """

    name: ClassVar[str] = ""
    engines: ClassVar[bool] = False


class Tiles(NamedTuple):
    """Tiles and single columns of a prompt, to be computed (bool) or scored (float): the share of a row's attention
    that each holds; a column's is the mean over all rows. The host waits for the device to count columns."""

    tiles_BHTM: torch.Tensor
    columns_BHK: torch.Tensor | None = None


class PrefillRule(Method):
    """Says which key tiles each row tile of a head computes.

    Tiles that every pattern computes (the first, the diagonal and the one before it) are added, invisible ones dropped.
    Of scores each head takes the best within its budget, a column at the cost of what it computes.
    """

    def tiles(self, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, layer: Layer, budget: float) -> Tiles | torch.Tensor:
        """The tiles of all heads, alone or with columns.

        Args:
            budget: more computes more; of scores the share of the causal tiles. A rule that returns bool may read it as
                any parameter, which `compare` then sets to what comes to the share asked for.
        """
        raise NotImplementedError

    def pattern(self, budget: float) -> Pattern:
        """The pattern that plans name: this rule, unless it is one that a plan has anyway."""
        return Registered(name=self.name, budget=fraction(budget))

    def setting(self, budget: float) -> str:
        """The budget in the words of the method."""
        return f"budget {budget:.4g}"


class DecodeSelector(Method):
    """Scores the cached tokens, or pages of them, for one decode step; the best are attended to.

    Attributes:
        page: tokens that are chosen together.
        sink, recent: tokens that are always attended to, beside the newest page.
        dense_layers: the first ones, which attend to everything.
        reads: tokens' worth of memory that scoring reads of each page.
    """

    page: ClassVar[int] = 1
    sink: ClassVar[int] = 0
    recent: ClassVar[int] = 0
    dense_layers: ClassVar[int] = 0
    reads: ClassVar[float] = 0.0

    def append(self, state: Any, k_BGLD: torch.Tensor) -> Any:
        """The state once these keys are cached; it is None before the first."""
        return None

    def scores(self, q_BHD: torch.Tensor, k_BGKD: torch.Tensor, state: Any, layer: Layer) -> torch.Tensor:
        """[B, g, P]: higher for pages that should be attended to; one choice for all KV heads where g is 1."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class QueryStatistics:
    """Mean and covariance of a layer's queries to come: those of the prompt but for its first four tokens, rotated as
    the next 512 positions are on average."""

    mean_BHD: torch.Tensor
    covariance_BHDD: torch.Tensor


class EvictionScore(Method):
    """Scores the tokens of a complete prompt; those with the lowest scores are evicted.

    Attributes:
        observe: last queries of the prompt that it is given; they also stay cached where `keeps_observed`.
        needs_statistics: it is given statistics of all queries, which `compare` alone gathers.
        shares_budget: the heads of a layer share its budget (AdaKV), which `compare` alone can mask.
    """

    observe: ClassVar[int] = 1
    keeps_observed: ClassVar[bool] = False
    needs_statistics: ClassVar[bool] = False
    shares_budget: ClassVar[bool] = False

    def scores(
        self,
        q_BHWD: torch.Tensor,
        k_BGKD: torch.Tensor,
        v_BGKD: torch.Tensor,
        layer: Layer,
        statistics: QueryStatistics | None,
    ) -> torch.Tensor:
        """float32 [B, G, K], higher for tokens that should stay cached."""
        raise NotImplementedError


_RESERVED = {BUILT_IN_SCORE: "the score of plans", **dict.fromkeys(PATTERNS, "a pattern of plans")}
KINDS = (PrefillRule, DecodeSelector, EvictionScore)
Kind = TypeVar("Kind", bound=Method)


@cache
def registry() -> dict[str, Method]:
    """The methods of this process by name: at first those of installed packages.

    Raises:
        UsageError: a package's method cannot be loaded or registered.
    """
    methods: dict[str, Method] = {}
    for entry in entry_points(group=GROUP):
        try:
            register([entry.load()], methods)
        except Exception as error:
            package = entry.dist.name if entry.dist else "unknown"
            raise UsageError(
                f"expected methods in the installed package {package}, found that {entry.value} fails: {error}; update "
                "or uninstall it"
            ) from error
    return methods


def register(classes: Iterable[type[Method]], into: dict[str, Method] | None = None) -> list[str]:
    """Adds methods by their names, which it returns; a class that is defined anew replaces itself.

    Raises:
        UsageError: no method, or a name that plans cannot have or that is taken.
    """
    methods, names = registry() if into is None else into, []
    for kind in classes:
        if not (inspect.isclass(kind) and issubclass(kind, Method) and kind.name):
            raise UsageError(f"expected a subclass of {Method.__name__} with a `name` for {GROUP}, found {kind!r:.80}")
        _check_name(kind, methods)
        methods[kind.name] = kind()
        names.append(kind.name)
    return names


def _check_name(kind: type[Method], methods: Mapping[str, Method]) -> None:
    origin = _origin(kind)
    if not (isinstance(kind.name, str) and re.fullmatch(METHOD_NAME, kind.name)):
        raise UsageError(
            f"expected a `name` of at most 64 letters, digits, `_`, `.` and `-`, a letter first, found "
            f"{kind.name!r:.80} of {origin}; rename it"
        )
    taken = _origin(type(methods[kind.name])) if kind.name in methods else origin
    if kind.name in _RESERVED or taken != origin:
        other = _RESERVED.get(kind.name, taken)
        raise UsageError(f"expected a name of its own for {origin}, found {kind.name}, which is {other}; rename it")


def _origin(kind: type[Method]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def register_file(path: Path) -> list[str]:
    """Runs a file and registers the methods that it defines.

    Raises:
        UsageError: there is no such file, it fails, or no method is in it.
    """
    spec = spec_from_file_location(f"methods of {path.resolve()}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"expected a Python file of methods, found no {path}; name one that is there")
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"expected a Python file of methods, found that {path} fails: {type(error).__name__}: {error}; correct it "
            "(sparsekv --debug prints the traceback)"
        ) from error
    own = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    classes = [one for one in own if issubclass(one, Method) and one.name]
    if not classes:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise UsageError(f"expected a class with a `name` of {kinds} in {path}, found none; see docs/extending.md")
    return register(classes)


def method_of(kind: type[Kind], name: str, beside: Sequence[str] = ()) -> Kind:
    """The registered method of a kind.

    Args:
        beside: other names that the caller takes.

    Raises:
        UsageError: nobody registered it.
    """
    known: Mapping[str, Kind] = {key: one for key, one in registry().items() if isinstance(one, kind)}
    if name not in known:
        raise UsageError(
            f"expected {''.join(f'{one}, ' for one in beside)}{'or ' if beside else ''}a registered {kind.__name__}, "
            f"found {name!r:.60}{did_you_mean(name, (*beside, *known))}; install its package, or name its file "
            "(--methods FILE)"
        )
    return known[name]


def code_of(method: Method) -> str:
    """The source of the file that defines a method; empty of one in a notebook."""
    try:
        return Path(inspect.getsourcefile(type(method)) or "").read_text()
    except (TypeError, OSError):
        return ""

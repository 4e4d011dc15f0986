"""The errors a user meets. Each message says what was expected, what was found, and what to do.

`exit_code` is what the command line returns: 1 a check or gate failed, 2 usage, 3 plan and model do not match.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Self


def did_you_mean(found: str, choices: Iterable[str]) -> str:
    """ "; did you mean X?" where choices come near, else nothing."""
    near = get_close_matches(found.lower(), list(choices), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(near)}?" if near else ""


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra, by their own names, beside a clone or a wheel."""
    from importlib.metadata import PackageNotFoundError, requires

    mark = f'; extra == "{extra}"'
    try:
        packages = [need.removesuffix(mark) for need in requires("sparsekv") or () if need.endswith(mark)]
        return shlex.join(["pip", "install", *packages])
    except PackageNotFoundError:  # run from its source tree
        return f"pip install '.[{extra}]'"


class SparseKVError(Exception):
    """Base of every error that sparsekv raises on purpose.

    Attributes:
        exit_code: of the command line.
        facts: what had been found out when it failed, as JSON data; `--json` prints it beside the error.
    """

    exit_code = 1
    facts: Mapping[str, Any] = MappingProxyType({})

    def with_facts(self, **facts: Any) -> Self:
        """This error with facts to print beside it."""
        self.facts = facts
        return self


class UsageError(SparseKVError):
    """The call itself is off: an unknown alias, a missing file, an option out of range."""

    exit_code = 2


class PlanError(SparseKVError):
    """A file that is there, but is no plan (or no profile), or whose content contradicts itself."""

    exit_code = 2


class PlanMismatchError(SparseKVError):
    """A sound plan, but of another model."""

    exit_code = 3


class UnsupportedError(SparseKVError):
    """Something that is valid but that this version cannot execute correctly."""

    exit_code = 2


class BackendError(SparseKVError):
    """A kernel backend was asked for where it cannot run."""

    exit_code = 2


class ShapeError(SparseKVError):
    """Tensors that do not fit together."""

    exit_code = 2


class PromptError(SparseKVError):
    """A prompt that cannot be run: empty, binary, or longer than the model's context."""

    exit_code = 2


class GateError(SparseKVError):
    """A plan does not keep, or was not shown to keep, what was asked of it: accuracy, finite numbers, a speedup."""


class ConflictError(SparseKVError):
    """A file that something else writes to, or wrote to meanwhile; it is left as it is."""


class PlanWarning(UserWarning):
    """Something runs, but not exactly as the plan or the caller asked."""

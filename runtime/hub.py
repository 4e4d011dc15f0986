"""The hub: whether a model can be had from it, what to type when it cannot, and the plan in a model's repository."""

from __future__ import annotations

import threading
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from sparsekv.plans.aliases import PLAN_NAME, without_plan
from sparsekv.plans.errors import UsageError

_SECONDS = 5.0  # that the hub has to answer in; the name lookup of a machine without a route may take a minute
_OFFLINE = "offline"


def needs_cache(repository: str, revision: str | None, local_only: bool) -> bool:
    """Whether only the local copy of `repository` can be used; asks the hub once, without retries.

    Raises:
        UsageError: neither the hub nor the local cache has it for us; the message says what to type.
    """
    trouble = (
        f"{_OFFLINE}: only the local cache may be used, and it has no copy" if local_only else _trouble(repository)
    )
    if trouble and not isinstance(try_to_load_from_cache(repository, "config.json", revision=revision), str):
        raise UsageError(without_model(repository, trouble))
    return bool(trouble)


def without_model(repository: str, trouble: str) -> str:
    """The message for a model that cannot be had."""
    folder = repository.rpartition("/")[2]
    terms = f"after accepting the terms at https://huggingface.co/{repository}, if it is gated"
    login = "" if trouble.startswith(_OFFLINE) else f"  hf auth login   ({terms})\n"
    return (
        f"expected the model {repository}, but {trouble}. Where there is network:\n{login}"
        f"  hf download {repository} --local-dir {folder}\n"
        f"then use the folder {folder} in place of {repository}."
    )


def download_plan(repository: str) -> Path:
    """The plan in a hub repository, at the revision that models are loaded at (`main`), as a file in the local cache.

    The copy of an earlier call serves where the hub cannot be reached.

    Raises:
        UsageError: the repository has none, or it cannot be had; the message says what to do.
    """
    trouble = _trouble(repository)
    try:
        return Path(hf_hub_download(repository, PLAN_NAME, local_files_only=trouble is not None))
    except LocalEntryNotFoundError as error:
        reason = trouble or _reason(error)
        raise UsageError(without_plan(repository, f"no {PLAN_NAME} of {repository}: {reason}")) from error
    except EntryNotFoundError as error:
        found = f"no {PLAN_NAME} in the hub repository {repository}"
        raise UsageError(without_plan(repository, found)) from error
    except Exception as error:  # whatever the HTTP library of the hub client raises
        raise UsageError(without_plan(repository, f"no {PLAN_NAME} of {repository}: {_reason(error)}")) from error


def find_plan(repository: str, revision: str | None = None) -> Path | None:
    """The plan in a hub repository at a revision, from the local cache or else the hub; None where neither has one."""
    cached = try_to_load_from_cache(repository, PLAN_NAME, revision=revision)
    if cached is not None:  # a path, or the mark of a file that the hub is known not to have
        return Path(cached) if isinstance(cached, str) else None
    try:
        return Path(hf_hub_download(repository, PLAN_NAME, revision=revision))
    except Exception:  # whatever the HTTP library of the hub client raises, and its offline mode
        return None


def _trouble(repository: str) -> str | None:
    found: list[str | None] = []
    asked = threading.Thread(target=lambda: found.append(_refusal(repository)), daemon=True)
    asked.start()
    asked.join(_SECONDS)
    return found[0] if found else f"{_OFFLINE}: the hub did not answer in {_SECONDS:.0f} s, and there is no local copy"


def _refusal(repository: str) -> str | None:
    try:
        HfApi().auth_check(repository)
    except Exception as error:  # whatever the HTTP library of the hub client raises, and its offline mode
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "it is gated and you have no access yet"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{_OFFLINE}: HF_HUB_OFFLINE is set, and there is no local copy"
    return f"{_OFFLINE}: the hub cannot be reached ({type(error).__name__}), and there is no local copy"

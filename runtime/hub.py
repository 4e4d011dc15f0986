"""The hub: whether a model can be had from it, what to type when it cannot, and the plan in a model's repository."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Generic, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from sparsekv.plans.aliases import PLAN_NAME, ModelSource, is_hub_id, without_plan
from sparsekv.plans.errors import UsageError

Found = TypeVar("Found")

# That the hub has to answer in, that something has to take a connection in before that, and in which a machine without
# a network says so. A name is looked up without any limit, so that threads wait.
_SECONDS, _CONNECT_SECONDS, _AT_ONCE = 5.0, 1.75, 0.1
_OFFLINE = "offline"


def asked(source: ModelSource) -> ModelSource:
    """The source after the hub was asked for it, once and without retries; a folder or a file as it is."""
    if source.is_local or source.trouble is not None:
        return source
    return replace(source, trouble=_trouble(source.path_or_id))


def needs_cache(source: ModelSource, revision: str | None = None, local_only: bool = False) -> bool:
    """Returns whether only the local copy of a hub model can be used; asks the hub where it was not asked.

    Raises:
        UsageError: neither the hub nor the local cache has it for us; the message says what to type.
    """
    repository = source.path_or_id
    trouble = f"{_OFFLINE}: only the local cache may be used, and it has no copy"
    trouble = trouble if local_only else asked(source).trouble or ""
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


def download_plan(source: ModelSource) -> Path:
    """The plan in a hub repository, at the revision that models are loaded at (`main`), as a file in the local cache.

    The copy of an earlier call serves where the hub cannot be reached.

    Raises:
        UsageError: the repository has none, or it cannot be had; the message says what to do.
    """
    repository, trouble = source.path_or_id, asked(source).trouble
    if trouble:
        cached = try_to_load_from_cache(repository, PLAN_NAME)  # a download would look for the hub even so
        if isinstance(cached, str):
            return Path(cached)
        raise UsageError(without_plan(repository, f"no {PLAN_NAME} of {repository}: {trouble}"))
    try:
        return Path(hf_hub_download(repository, PLAN_NAME))
    except Exception as error:  # whatever the HTTP library of the hub client raises
        found = f"no {PLAN_NAME} of {repository}: {_reason(error)}"
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            found = f"no {PLAN_NAME} in the hub repository {repository}"
        raise UsageError(without_plan(repository, found)) from error


def download_plans(source: ModelSource) -> Path | None:
    """The folder, in the local cache, of the plans in a hub repository that has several, called NAME.sparsekv.yaml.

    The copies of an earlier call serve where the hub cannot be reached. None where the repository has a sparsekv.yaml,
    which is its plan, or where there is nothing to choose from.
    """
    repository, trouble = source.path_or_id, asked(source).trouble
    try:
        if not trouble and PLAN_NAME in HfApi().list_repo_files(repository):
            return None
        pattern = f"*.{PLAN_NAME}"
        return Path(snapshot_download(repository, allow_patterns=[pattern], local_files_only=bool(trouble)))
    except Exception:  # whatever the HTTP library of the hub client raises; `download_plan` says what is wrong
        return None


def upload_plan(source: ModelSource, plan: bytes, create_pr: bool = False) -> str:
    """Uploads the text of a plan to a hub repository as its sparsekv.yaml; returns the address of the commit, or of the
    pull request.

    Raises:
        UsageError: the hub does not take it.
    """
    repository, trouble = source.path_or_id, asked(source).trouble
    if not trouble:
        try:
            done = HfApi().upload_file(
                path_or_fileobj=plan, path_in_repo=PLAN_NAME, repo_id=repository, create_pr=create_pr
            )
            return done.pr_url or done.commit_url
        except Exception as error:  # whatever the HTTP library of the hub client raises
            trouble = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    raise UsageError(
        f"expected the hub to take {PLAN_NAME} into {repository}, but {trouble}; log in with `hf auth login`, or add "
        "--create-pr where the model is not yours"
    )


def model_folder(source: str, revision: str | None = None) -> Path | None:
    """The folder of a model: itself, or the copy of a hub model in the local cache; None where there is no copy."""
    if Path(source).is_dir():
        return Path(source)
    config = try_to_load_from_cache(source, "config.json", revision=revision) if is_hub_id(source) else None
    return Path(config).parent if isinstance(config, str) else None


def find_plan(repository: str, revision: str | None = None) -> Path | None:
    """The plan in a hub repository at a revision, from the local cache or else the hub; None where neither has one."""
    cached = try_to_load_from_cache(repository, PLAN_NAME, revision=revision)
    if cached is not None:  # a path, or the mark of a file that the hub is known not to have
        return Path(cached) if isinstance(cached, str) else None
    if _trouble(repository):  # a download tries again and again
        return None
    try:
        return Path(hf_hub_download(repository, PLAN_NAME, revision=revision))
    except Exception:  # whatever the HTTP library of the hub client raises, and its offline mode
        return None


def _trouble(repository: str) -> str:
    """Returns why the hub does not give us a repository; empty where it does."""
    lookup = _Asking(partial(_refusal, repository))
    if not lookup.is_answered_in(_AT_ONCE):
        connection = _Asking(_connects)
        if not lookup.is_answered_in(_CONNECT_SECONDS) and not connection.answer:
            return f"{_OFFLINE}: the hub took no connection in {_CONNECT_SECONDS:.0f} s, and there is no local copy"
    if lookup.is_answered_in(_SECONDS - _CONNECT_SECONDS):
        return lookup.answer or ""
    return f"{_OFFLINE}: the hub did not answer in {_SECONDS:.0f} s, and there is no local copy"


class _Asking(Thread, Generic[Found]):
    """A question that may never be answered."""

    def __init__(self, question: Callable[[], Found]) -> None:
        super().__init__(daemon=True)
        self._question = question
        self.answer: Found | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._question()

    def is_answered_in(self, seconds: float) -> bool:
        """Waits so long at most."""
        self.join(seconds)
        return not self.is_alive()


def _refusal(repository: str) -> str:
    try:
        HfApi().auth_check(repository)
    except Exception as error:  # whatever the HTTP library of the hub client raises, and its offline mode
        return _reason(error)
    return ""


def _connects() -> bool:
    """Returns whether the hub, or the proxy on the way to it, takes a connection."""
    hub = urlsplit(constants.ENDPOINT)
    proxies = {} if proxy_bypass(hub.hostname or "") else getproxies()
    way = urlsplit(proxies.get(hub.scheme) or proxies.get("all") or constants.ENDPOINT)
    port = way.port or {"http": 80, "socks5": 1080}.get(way.scheme, 443)
    try:
        socket.create_connection((way.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "it is gated and you have no access yet"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{_OFFLINE}: HF_HUB_OFFLINE is set, and there is no local copy"
    return f"{_OFFLINE}: the hub cannot be reached ({type(error).__name__}), and there is no local copy"

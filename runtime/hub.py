"""The hub: whether a model can be had from it, what to type when it cannot, and the plan in a model's repository."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

from huggingface_hub import HfApi, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from sparsekv.plans.aliases import PLAN_NAME, ModelSource, is_hub_id, without_plan
from sparsekv.plans.errors import UsageError

_SECONDS = 5.0  # that the hub has to answer in
_OFFLINE = "offline"


def asked(source: ModelSource) -> ModelSource:
    """The source after the hub was asked for it, once and without retries; a folder or a file as it is."""
    if source.is_local or source.trouble is not None:
        return source
    return replace(source, trouble=_trouble(source.path_or_id))


def needs_cache(source: ModelSource, revision: str | None = None, local_only: bool = False) -> bool:
    """Returns whether only the local copy of a hub model can be used; asks the hub where it was not asked."""
    repository = source.path_or_id
    trouble = f"{_OFFLINE}: only the local cache may be used, and it has no copy"
    trouble = trouble if local_only else asked(source).trouble or ""
    if trouble and _cached(repository, "config.json", revision) is None:
        raise UsageError(without_model(repository, trouble))
    return bool(trouble)


def without_model(repository: str, trouble: str) -> str:
    folder = repository.rpartition("/")[2]
    terms = f"after accepting the terms at https://huggingface.co/{repository}, if it is gated"
    login = "" if trouble.startswith(_OFFLINE) else f"  hf auth login   ({terms})\n"
    return (
        f"expected the model {repository}, but {trouble}. Where there is network:\n{login}"
        f"  hf download {repository} --local-dir {folder}\n"
        f"then use the folder {folder} in place of {repository}."
    )


def download_plan(source: ModelSource, revision: str | None = None) -> Path:
    """The plan in a hub repository, at the revision that models are loaded at, as a file in the local cache. The copy
    of an earlier call serves where the hub cannot be reached."""
    repository, trouble = source.path_or_id, asked(source).trouble
    if trouble and (cached := _cached(repository, PLAN_NAME, revision)):  # a download would look for the hub even so
        return cached
    missing = f"no {PLAN_NAME} of {repository}: {trouble}"
    try:
        if not trouble:
            return Path(hf_hub_download(repository, PLAN_NAME, revision=revision))
    except Exception as error:  # whatever the HTTP library of the hub client raises
        missing = f"no {PLAN_NAME} of {repository}: {_reason(error)}"
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            missing = f"no {PLAN_NAME} in the hub repository {repository}"
    raise UsageError(without_plan(repository, missing))


def download_plans(source: ModelSource) -> Path | None:
    """The folder, in the local cache, of the plans in a hub repository that has several, called NAME.sparsekv.yaml. The
    copies of an earlier call serve where the hub cannot be reached. None where the repository has a sparsekv.yaml,
    which is its plan, or where there is nothing to choose from."""
    repository, trouble = source.path_or_id, asked(source).trouble
    try:
        if not trouble and PLAN_NAME in HfApi().list_repo_files(repository):
            return None
        pattern = f"*.{PLAN_NAME}"
        return Path(snapshot_download(repository, allow_patterns=[pattern], local_files_only=bool(trouble)))
    except Exception:  # whatever the HTTP library of the hub client raises; `download_plan` says what is wrong
        return None


def upload_plan(source: ModelSource, plan: bytes, create_pr: bool = False) -> str:
    """Uploads a plan to a hub repository as its sparsekv.yaml; the address of the commit or the pull request."""
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
    config = _cached(source, "config.json", revision) if is_hub_id(source) else None
    return config and config.parent


def find_plan(repository: str, revision: str | None = None) -> Path | None:
    """The plan in a hub repository at a revision, from the local cache or else the hub; None where neither has one."""
    known = try_to_load_from_cache(repository, PLAN_NAME, revision=revision)
    if known is not None:  # a path, or the mark of a file that the hub is known not to have
        return Path(known) if isinstance(known, str) else None
    with suppress(UsageError):
        return download_plan(ModelSource(repository), revision)
    return None


def plan_beside(model: str, revision: str | None = None) -> Path | None:
    """The plan in a model's folder, or in its hub repository; None where neither has one."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        path = folder / PLAN_NAME
        return path if path.is_file() else None
    return find_plan(model, revision) if is_hub_id(model) else None


def _trouble(repository: str) -> str:
    answers: list[str] = []
    lookup = Thread(target=lambda: answers.append(_refusal(repository)), daemon=True)  # names are looked up unlimited
    lookup.start()
    lookup.join(_SECONDS)
    late = f"{_OFFLINE}: the hub did not answer in {_SECONDS:.0f} s, and there is no local copy"
    return answers[0] if answers else late


def _refusal(repository: str) -> str:
    try:
        HfApi().auth_check(repository)
    except Exception as error:  # whatever the HTTP library of the hub client raises, and its offline mode
        return _reason(error)
    return ""


def _cached(repository: str, name: str, revision: str | None = None) -> Path | None:
    path = try_to_load_from_cache(repository, name, revision=revision)
    return Path(path) if isinstance(path, str) else None


def _reason(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "it is gated and you have no access yet"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{_OFFLINE}: HF_HUB_OFFLINE is set, and there is no local copy"
    return f"{_OFFLINE}: the hub cannot be reached ({type(error).__name__}), and there is no local copy"

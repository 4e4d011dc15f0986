"""Whether a model can be had from the hub, and what to type when it cannot."""

from __future__ import annotations

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from sparsekv.plans.errors import UsageError


def needs_cache(repository: str, revision: str | None, local_only: bool) -> bool:
    """Whether only the local copy of `repository` can be used; asks the hub once, without retries.

    Raises:
        UsageError: neither the hub nor the local cache has it for us; the message says what to type.
    """
    trouble = "offline mode is on" if local_only else _trouble(repository)
    if trouble and not _is_cached(repository, revision):
        raise UsageError(without_model(repository, trouble))
    return bool(trouble)


def without_model(repository: str, trouble: str) -> str:
    """The message for a model that cannot be had."""
    folder = repository.rpartition("/")[2]
    return (
        f"expected the model {repository}, but {trouble}. Where there is network:\n"
        f"  hf auth login   (after accepting the terms at https://huggingface.co/{repository}, if it is gated)\n"
        f"  hf download {repository} --local-dir {folder}\n"
        f"then use the folder {folder} in place of {repository}."
    )


def _trouble(repository: str) -> str | None:
    try:
        HfApi().auth_check(repository)
    except GatedRepoError:
        return "it is gated and you have no access yet"
    except RepositoryNotFoundError:
        return "the hub has no such model, or it is private"
    except Exception as error:  # whatever the HTTP library of the hub client raises, and its offline mode
        return f"the hub cannot be reached ({type(error).__name__}) and there is no local copy"
    return None


def _is_cached(repository: str, revision: str | None) -> bool:
    return isinstance(try_to_load_from_cache(repository, "config.json", revision=revision), str)

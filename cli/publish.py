"""`sparsekv publish`: a plan beside its model, in a folder or on the hub, and a section for the model card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import Json, PlanPlace, found_source, plan_file
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import check_replaceable
from sparsekv.plans.aliases import PLAN_NAME, ModelSource, is_hub_id, resolve_model
from sparsekv.plans.brief import eviction_losses, kept_share
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import MAX_BYTES, load_plan, read_bytes, write_bytes
from sparsekv.plans.markdown import cell
from sparsekv.plans.schema import Estimate, Plan, check_model
from sparsekv.plans.show import target_text
from sparsekv.plans.types import format_length

_UNKNOWN = "YOUR_NAME/YOUR_MODEL"
_PASTE = """\
paste the section into the model card (README.md), name in it the address that you cloned sparsekv from, and tag the \
card `sparsekv`, by which plans are found"""
_RUNNING = """\
```sh
git clone THIS_REPOSITORY sparsekv && pip install ./sparsekv    # there is no release on a package index yet
sparsekv run {repository} --prompt-file book.txt --compare    # dense and sparse, side by side
vllm serve {repository}    # in an environment with sparsekv and vLLM
```"""


def publish(
    plan: PlanPlace,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model's folder, or its hub id.", show_default=False)
    ],
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request on the hub, where the model is not yours.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and upload nothing; print the section.")] = False,
    as_json: Json = False,
) -> None:
    """Copy a plan into its model's folder, or upload it to its hub repository, as sparsekv.yaml.

    Prints a section to paste into the model card: use, device, quality, gain. No card is read or written.
    """
    path = plan_file(plan)
    found = load_plan(path)
    source = found_source(resolve_model(model))
    beside = _path_in(model, source)
    if create_pr and beside is not None:
        raise UsageError(f"expected a hub id beside --create-pr, found the folder {beside.parent}; leave one out")
    _check_fits(found, source)
    data = read_bytes(path, MAX_BYTES)
    to, is_new = source.path_or_id, not dry_run
    if beside is not None:
        to, is_new = str(beside), is_new and not (beside.exists() and read_bytes(beside, MAX_BYTES) == data)
        if is_new:
            write_bytes(beside, data)
    elif is_new:
        from sparsekv.runtime.hub import upload_plan

        to = upload_plan(source, data, create_pr)
    told = "\n".join(section(found, source))
    if as_json:
        emit_json({"to": to, "written": is_new, "section": told})
        return
    emit(told)
    tell(f"{to}: {'written' if is_new else 'nothing was written' if dry_run else 'as it was'}; {_PASTE}")


def _path_in(model: str, source: ModelSource) -> Path | None:
    """The plan's path in a folder of the user's; None of a hub id.

    Raises:
        UsageError: the folder is not the user's, or what is there is no plan.
    """
    if not source.is_local:
        return None
    path = Path(source.place) / PLAN_NAME
    if not os.path.exists(os.path.expanduser(model)) or path.is_symlink():
        raise UsageError(
            f"expected a folder of yours to copy the plan into, found {path}, which is sparsekv's own or a link, as in "
            "the hub's cache; copy the model first, and name its copy"
        )
    check_replaceable(path, "the plan", "plan")
    return path


def _check_fits(plan: Plan, source: ModelSource) -> None:
    """Refuses the plan of another architecture; weights are not read.

    Raises:
        PlanMismatchError: naming what differs.
    """
    from sparsekv.runtime.hf.load import load_config
    from sparsekv.runtime.model_config import describe_config

    check_model(plan, describe_config(load_config(source), source.path_or_id))


# --- the section ------------------------------------------------------------------------------------------------------


def section(plan: Plan, source: ModelSource) -> Iterator[str]:
    """The section for a model card, in parts of Markdown.

    Args:
        plan: the plan.
        source: the model; of a folder the plan's own name of it is told.
    """
    named = plan.model.id if source.is_local else source.path_or_id
    lengths = ", ".join(map(format_length, plan.planned_lengths))
    devices = "; ".join(map(target_text, plan.targets))
    yield "## Sparse attention plan\n"
    yield (
        f"[`{PLAN_NAME}`]({PLAN_NAME}) is a plan for sparsekv: what each attention head of {cell(named)} computes of a "
        "long prompt, and which tokens a decode step reads."
        + (f" Planned for prompts of {lengths}." if lengths else "")
        + (f" Measured on {cell(devices)}." if devices else "")
    )
    yield "\n" + "\n".join(f"- {line}" for line in _facts(plan)) + "\n"
    yield _RUNNING.format(repository=named if is_hub_id(named) else _UNKNOWN)


def _facts(plan: Plan) -> Iterator[str]:
    """A sentence each: quality, status, gain, and what evicting tokens loses."""
    if plan.is_dense:
        yield "**It does not pay**: nothing in it is sparse, and the model runs as without it."
        return
    yield _measured(plan)
    evidence = plan.quality.evidence if plan.quality else None
    if plan.status != "verified":
        reason = f" ({cell(evidence.reason)})" if evidence and evidence.reason else ""
        yield f"**It is {plan.status}**: nothing has shown that answers stay as good as with dense attention{reason}."
    else:
        excludes = f", which excludes, {cell(evidence.excludes)}" if evidence and evidence.excludes else ""
        yield f"It is {plan.status_text}{excludes}."
    if plan.retained:
        yield f"It evicts tokens from the KV cache, which is lossy: what stays is {kept_share(plan)}."
        yield from (f"{cell(line).capitalize()}." for line in eviction_losses(plan))
    yield from _gains(plan)


def _measured(plan: Plan) -> str:
    """How far next tokens are from dense attention's."""
    for phase in ("both", "prefill", "decode"):
        measured = plan.quality.phases.get(phase) if plan.quality else None
        if measured and (agreed := measured.agreement):
            lengths = ", ".join(map(format_length, sorted(measured.lengths)))
            alone = "" if phase == "both" else f" (sparse {phase} alone)"
            same = "" if agreed.top1 is None else f", and {agreed.top1:.2%} of likeliest tokens are the same"
            return (
                f"On {agreed.samples} held-out prompts of {lengths}{alone} its next tokens diverge by {agreed.kl:.2g} "
                f"nats from dense attention's{same}."
            )
    return "How far its answers are from dense attention's was not measured."


def _gains(plan: Plan) -> Iterator[str]:
    """Each phase's predicted speed, at the longest length at which it is sparse."""
    cost, gains = plan.cost, [(phase, gain) for phase in ("prefill", "decode") if (gain := _predicted(plan, phase))]
    if cost is None or not gains:
        yield "**Whether it pays is not known**: its speed was not predicted."
        return
    for phase, (length, found) in gains:
        speed = found.dense_us / max(found.sparse_us, 1e-9)
        at = f"at {format_length(length)} on {cell(cost.device)}"
        pays = "" if speed > 1 else "; **it does not pay there**"
        yield f"Attention in {phase} is predicted to be {speed:.2f}x as fast as dense {at}{pays}."


def _predicted(plan: Plan, phase: str) -> tuple[int, Estimate] | None:
    """The longest priced length at which a phase is sparse, with its cost; None where there is none."""
    part = getattr(plan, phase)
    priced = ((entry.length, getattr(entry, phase)) for entry in reversed(plan.cost.lengths if plan.cost else ()))
    return next((one for one in priced if one[1] and part and not part.bucket(one[0]).dense), None)


app = commands.app(
    publish,
    "sparsekv publish plan.yaml ./my-model --dry-run",
    "sparsekv publish plan.yaml your-name/your-model --create-pr",
)

"""The model card of a published plan: a section between two markers in README.md, and tags in the card's metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from sparsekv.cli.verdict import verdict
from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.errors import UsageError
from sparsekv.plans.markdown import cell, table
from sparsekv.plans.schema import Plan, Quality
from sparsekv.plans.show import AGREEMENT_HEADER, agreement_rows, claims, figure_of, header
from sparsekv.plans.types import format_length

BEGIN, END = "<!-- sparsekv:begin -->", "<!-- sparsekv:end -->"
TAGS = ("sparsekv", "sparse-attention")
"""By which plans are found on the hub."""
_FENCE = "---"
_RUNNING = """\
### Running it

Where `sparsekv` is installed, it finds the plan beside the model. Without it, the model runs as before.

```python
import sparsekv
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repository}")
model = AutoModelForCausalLM.from_pretrained("{repository}", dtype="auto").to("cuda").eval()
prompt = tokenizer(open("book.txt").read(), return_tensors="pt").to(model.device)
with sparsekv.apply(model, hf_hub_download("{repository}", "{plan}")):
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```

```sh
sparsekv run {repository} --prompt-file book.txt --compare    # dense and sparse, side by side
vllm serve {repository}                                       # in an environment with sparsekv and vLLM
```"""


def with_plan(card: str, plan: Plan, repository: str) -> str:
    """Returns a card that tells of a plan: the section in place of an older one or at the end, the tags added to its
    own. All else stays as it is; a second time, nothing changes.

    Args:
        card: the text of README.md; empty where there is none.
        plan: the plan.
        repository: the hub id under which readers have the model.

    Raises:
        UsageError: the markers, or the lines of metadata, cannot be made out.
    """
    newline = "\r\n" if "\r\n" in card else "\n"
    section = "\n".join(_section(plan, repository)).replace("\n", newline)
    return _with_tags(_with_section(card, section, newline), newline)


def _section(plan: Plan, repository: str) -> Iterator[str]:
    """The section, its parts between blank lines."""
    yield f"{BEGIN}\n## Sparse attention plan\n"
    device = " and the device below" if plan.targets else ""
    yield (
        f"`{PLAN_NAME}` is a plan of sparsekv for this model{device}: what each attention head computes of a long\n"
        "prompt, and which layers choose the tokens that a decode step reads.\n"
    )
    yield table(("", ""), [*_facts(plan)]) + "\n"
    yield "\n".join(f"- {cell(line)}" for line in verdict(plan, PLAN_NAME)[:-1]) + "\n"
    yield "### Quality beside dense attention, on held-out prompts\n"
    yield "\n\n".join(_quality(plan.quality) if plan.quality else ("Not measured.",)) + "\n"
    yield _RUNNING.format(repository=repository, plan=PLAN_NAME) + "\n"
    yield END


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    named = ("Model", "Status", "Target", "Made with")
    yield from (row for row in header(plan) if row[0] in named)
    if plan.planned_lengths:
        yield "Planned for", ", ".join(map(format_length, plan.planned_lengths))


def _quality(quality: Quality) -> Iterator[str]:
    """Agreement with its intervals and gates with their bounds, each over all lengths and tasks."""
    agreed = [row for row in agreement_rows(quality) if row[1] == "all"]
    if agreed:
        yield "With 95% intervals:"
        yield table(AGREEMENT_HEADER, agreed)
    found = [(phase, name, claim) for phase, over, name, claim in claims(quality) if over == "all"]
    if found:
        rows = [
            (
                phase,
                figure_of(name),
                str(claim.prompts),
                f"{claim.mean:.3g}",
                f"{claim.bound:.3g}",
                f"{claim.gate:.3g}",
                claim.outcome,
            )
            for phase, name, claim in found
        ]
        yield "Lost beyond rounding, as a mean over prompts; a gate is met where that is shown to be below it:"
        yield table(("Phase", "Figure", "Prompts", "Mean", "Shown below", "Gate", "Outcome"), rows)
    lengths = {length for measured in quality.phases.values() for length in measured.lengths}
    excluded = quality.evidence.excludes if quality.evidence else None
    yield f"Measured at {', '.join(map(format_length, sorted(lengths)))}." + (
        f" Verified excludes, {cell(excluded)}." if excluded else ""
    )


# --- in the text of a card --------------------------------------------------------------------------------------------


def _with_section(card: str, section: str, newline: str) -> str:
    begins, ends = (list(re.finditer(re.escape(marker), card)) for marker in (BEGIN, END))
    if not begins and not ends:
        head = card.rstrip()
        return f"{head}{newline * 2 if head else ''}{section}{newline}"
    if len(begins) != 1 or len(ends) != 1 or begins[0].start() > ends[0].start():
        raise UsageError(
            f"expected README.md to have {BEGIN} once and {END} once behind it, found them {len(begins)} and "
            f"{len(ends)} times, or in another order; remove what is left of the section, and run again"
        )
    return card[: begins[0].start()] + section + card[ends[0].end() :]


def _with_tags(card: str, newline: str) -> str:
    """Adds the tags to the metadata between the two lines --- at the top of a card."""
    lines = card.splitlines(keepends=True)
    if not lines or lines[0].rstrip() != _FENCE:
        made = newline.join((_FENCE, "tags:", *(f"- {tag}" for tag in TAGS), _FENCE, "", ""))
        return made + card
    end = next((at for at, line in enumerate(lines[1:], 1) if line.rstrip() == _FENCE), None)
    if end is None:
        raise UsageError("expected the metadata of README.md to end with a line ---, found none; add it, and run again")
    block = lines[1:end]
    known = _metadata("".join(block))
    own = _tags_of(known)
    missing = [tag for tag in TAGS if tag not in own]
    if not missing:
        return card
    wanted = known | {"tags": [*own, *missing]}
    changed = _inserted(block, missing, newline)
    if _parsed(changed) != wanted:  # written in another way than as a list of lines
        changed = yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True).replace("\n", newline)
    return "".join((lines[0], changed, *lines[end:]))


def _inserted(block: Sequence[str], tags: Sequence[str], newline: str) -> str:
    """Metadata with tags behind those that are there, a line each, in their indentation; or with a list of its own."""
    at = next((at for at, line in enumerate(block) if re.fullmatch(r"tags:\s*", line)), None)
    if at is None:
        return "".join((*block, newline.join(("tags:", *(f"- {tag}" for tag in tags), ""))))
    items = at + 1
    while items < len(block) and re.match(r"\s*- ", block[items]):
        items += 1
    indent = re.match(r"\s*", block[at + 1])[0] if items > at + 1 else ""  # type: ignore[index]
    return "".join((*block[:items], *(f"{indent}- {tag}{newline}" for tag in tags), *block[items:]))


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _metadata(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    found = _parsed(text)
    if not isinstance(found, dict):
        raise UsageError(
            "expected the metadata of README.md, between its two lines ---, to be a mapping in YAML, found something "
            "else; repair it, and run again"
        )
    return found


def _tags_of(metadata: dict[str, Any]) -> list[str]:
    found = metadata.get("tags") or []
    tags = [found] if isinstance(found, str) else found
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise UsageError("expected `tags` in the metadata of README.md to be a list of words, found something else")
    return tags

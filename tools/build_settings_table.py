"""Writes the table of settings in docs/vllm.md from `runtime/vllm/engine_settings.py`: `python
tools/build_settings_table.py`."""

from __future__ import annotations

from pathlib import Path

from sparsekv.runtime.vllm.engine_settings import SETTINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "vllm.md"
BEGIN, END = "<!-- made by tools/build_settings_table.py -->\n", "<!-- end -->\n"


def page(before: str) -> str:
    """The page with today's table."""
    head, _, rest = before.partition(BEGIN)
    rows = (
        f"| {f'`{one.name}`' if one.name.startswith('--') else one.name} | {one.verdict} | {one.told} | {one.seen} |\n"
        for one in SETTINGS
    )
    table = "".join(("| setting | with a plan | | run |\n|---|---|---|---|\n", *rows))
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

"""Records which layers a release of SGLang has reuse a choice: python tools/record_sglang_reader.py WHEEL

The function that reads a config is run on the configs of `CASES`; tests compare exported lines with its answers.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

OUT = Path(__file__).parents[1] / "tests/data/sglang_reader.json"
FILE, FUNCTION = "sglang/srt/configs/model_config.py", "dsa_layer_skips_topk"
PATTERN, LAYERS = "FSSFFSSS", 10  # of which two are behind the pattern, as a drafter's
CASES: tuple[dict[str, Any], ...] = (
    {"index_topk_pattern": PATTERN},
    {"index_topk_pattern": PATTERN, "indexer_types": None},
    {"index_topk_pattern": PATTERN, "indexer_types": ["full"] * len(PATTERN)},
)


def recorded(source: str) -> dict[str, Any]:
    """The names that the function reads of a config, in order, and the layers that reuse a choice in each case."""
    tree = ast.parse(source)
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION)
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"]
    reads = [ast.literal_eval(call.args[1]) for call in sorted(calls, key=lambda call: call.lineno)]
    names: dict[str, Any] = {"PretrainedConfig": object, "is_deepseek_dsa": lambda config: True}
    exec(compile(ast.Module([function], []), FILE, "exec"), names)
    skips = [
        {
            "config": case,
            "reusing": [layer for layer in range(LAYERS) if names[FUNCTION](SimpleNamespace(**case), layer)],
        }
        for case in CASES
    ]
    return {"reads": reads, "cases": skips}


def main(wheel: str) -> None:
    """Writes the record."""
    version = re.match(r"sglang-([^-]+)-", Path(wheel).name)
    if version is None:
        raise SystemExit(f"expected a wheel named sglang-VERSION-..., found {wheel}")
    data = {"release": version[1], **recorded(ZipFile(wheel).read(FILE).decode())}
    OUT.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Imports every installed module of the package, but for those of engines: `python tools/import_modules.py`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("plans", "kernels", "runtime", "planner", "bench", "cli")
_NEED_ENGINES = ("sparsekv.runtime.vllm.", "sparsekv.runtime.sglang.")


def modules() -> list[str]:
    """The names of the modules in the tree."""
    files = (path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = (".".join(("sparsekv", *path.with_suffix("").parts)).removesuffix(".__init__") for path in files)
    return sorted(name for name in names if not name.startswith(_NEED_ENGINES))


if __name__ == "__main__":
    for name in modules():
        import_module(name)
    print(f"{len(modules())} modules")

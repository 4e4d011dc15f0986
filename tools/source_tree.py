"""Makes the packages of a checkout importable where the project is not installed."""

import importlib.util
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("plans", "kernels", "runtime", "planner", "bench", "cli")


def make_importable() -> None:
    """Puts a folder of links, `sparsekv/<package>`, on the import path unless `sparsekv` is installed."""
    if importlib.util.find_spec("sparsekv") is not None:
        return
    folder = Path(tempfile.mkdtemp(prefix="sparsekv-links-"))
    (folder / "sparsekv").mkdir()
    for package in _PACKAGES:
        (folder / "sparsekv" / package).symlink_to(_ROOT / package)
    sys.path.insert(0, str(folder))

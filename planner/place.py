"""Where something was measured: device, precision, versions. No machine names, no paths, no times."""

from __future__ import annotations

from importlib.metadata import version

from sparsekv import __version__
from sparsekv.runtime.hf.describe import device_name as device_name
from sparsekv.runtime.hf.describe import dtype_name as dtype_name


def versions() -> dict[str, str]:
    """Versions of what measurements depend on."""
    return {"sparsekv": __version__, **{name: version(name) for name in ("torch", "transformers")}}

"""The config of a model by its name, or its public shape where not even the config can be had.

Public shapes are facts from the models' own cards and configs, rope bases included: no time or memory depends on those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from sparsekv.plans.aliases import ALIASES, ModelSource, resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.architecture import architecture_of
from sparsekv.runtime.hf.load import load_config

# By alias, see plans/data/aliases.toml. The sizes that a config of transformers has by default are those of its first
# checkpoint.
PUBLIC_SHAPES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "shapes.json").read_text())


def config_of(name: str, source: ModelSource | None = None) -> tuple[Any, list[str]]:
    """The config of a model, or one of its shape where it cannot be had; and what there is to say about that.

    Args:
        source: what the name stands for, where it was looked for.
    """
    source = source or resolve_model(name)
    try:
        return load_config(source), []
    except UsageError as error:
        alias = next((alias for alias, model in ALIASES.items() if name.lower() in (alias, model.lower())), "")
        if alias not in PUBLIC_SHAPES:
            error.add_note(f"Shapes known without a config: {', '.join(PUBLIC_SHAPES)}")
            raise
    architecture_of(PUBLIC_SHAPES[alias]["model_type"])
    return AutoConfig.for_model(**PUBLIC_SHAPES[alias]), ["its shape is from a table: no config to be had"]

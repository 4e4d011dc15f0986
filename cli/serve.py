"""`sparsekv serve`: transformers' own server, with a model's plan applied."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli.arguments import plan_file
from sparsekv.cli.commands import Command, group
from sparsekv.plans.errors import UsageError

app = group()


@app.command(
    "serve",
    cls=Command,
    epilog="sparsekv serve ./my-model --port 8000\nsparsekv serve ./my-model --plan plan.yaml --cb-num-blocks 2000",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or an id on the hub.", show_default=False)],
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its plan; by default the one beside it.", show_default=False)
    ] = None,
) -> None:
    """Serve a model and its plan by `transformers serve --continuous-batching`, which takes all other options."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UsageError("expected what transformers serves with; install it: pip install 'transformers[serving]'")
    from transformers.cli.transformers import app as transformers

    from sparsekv.runtime.hf.serving import planned

    with planned(None if plan is None else plan_file(plan)):
        transformers(["serve", model, "--continuous-batching", *context.args], standalone_mode=False)

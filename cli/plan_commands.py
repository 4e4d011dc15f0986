"""Commands that read plan files and need no model: `show`, `report`, `diff`, `validate`, `seal`, `schema`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import PLACE, Json, PlanArgument, PlanPlace, plan_file
from sparsekv.cli.output import FAILED, emit, emit_json, emit_verdict, print_parts, tell
from sparsekv.cli.plan_files import check_replaceable, one_of_kinds
from sparsekv.plans.brief import sentences, verdict
from sparsekv.plans.errors import PlanError, PlanMismatchError, SparseKVError, UsageError, install_command
from sparsekv.plans.files import dump_plan, executed_digest, load_plan, parse_plan, read_text, write_bytes
from sparsekv.plans.files import seal as seal_file
from sparsekv.plans.model import same_architecture
from sparsekv.plans.schema import Plan, json_schema, to_data, unsupported

if TYPE_CHECKING:
    from sparsekv.bench.own_file import OwnFile
    from sparsekv.bench.suite import SuiteTable
    from sparsekv.planner.profile.profile_data import Profile


def show(
    plan: PlanPlace,
    full: Annotated[bool, typer.Option("--full", help="List every head, length and figure.")] = False,
    as_json: Json = False,
) -> None:
    """Print a plan as tables: what each layer computes, measured quality, predicted cost. Needs no model."""
    path = plan_file(plan)
    found = load_plan(path)
    if as_json:
        emit_json(to_data(found) | {"unsupported": unsupported(found)})
        return
    _print(found, full, str(plan))


def _print(plan: Plan, full: bool, place: str) -> None:
    from sparsekv.plans.show import describe

    print_parts(describe(plan, full))
    emit("")
    emit_verdict(verdict(plan, place), plan.status)


def report(
    plan: PlanPlace,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE", help="Its profile, and what `compare`, `eval` and `bench own` wrote.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")] = Path(
        "report.html"
    ),
) -> None:
    """Write a plan as one self-contained page: budgets of heads, a head on the matrix, time and quality by length."""
    check_replaceable(out, "-o", "page")
    path = plan_file(plan)
    loaded = load_plan(path)
    try:
        from sparsekv.bench.report.page import report as page_of
    except ModuleNotFoundError as error:
        raise UsageError(
            f"expected the packages that reports need, found no {error.name}; install them: {install_command('report')}"
        ) from error
    from sparsekv.bench.compare_file import CompareFile, CompareRun

    given = {one_of_kinds(file, ("profile", "compare", "suite", "own")): file for file in files or ()}
    compared = CompareFile.read(CompareRun, given["compare"]) if "compare" in given else None
    profiled = _profile_of(loaded, given["profile"]) if "profile" in given else None
    table = _suite_of(loaded, given["suite"]) if "suite" in given else None
    own = _own_of(loaded, given["own"]) if "own" in given else None
    write_bytes(out, page_of(loaded, sentences(loaded, str(plan)), profiled, compared, table, own).encode())
    emit(f"{out}: the page of {loaded.model.id}, {loaded.status_text}")


def _suite_of(plan: Plan, path: Path) -> SuiteTable:
    """The results of a suite, if they are of the plan's model; that the plan does something else than the one that was
    run is said.
    """
    from sparsekv.bench.suite import SuiteCell, SuiteRun, SuiteTable
    from sparsekv.planner.records import RunFile

    file = RunFile.read(SuiteRun, path)
    if not same_architecture(file.settings.architecture, plan.model.fingerprint.architecture):
        raise PlanMismatchError(
            f"expected results of {plan.model.id} in {path}, found some of {file.settings.model}, of another "
            "architecture; run `eval` with this plan"
        )
    if executed_digest(plan) not in (cell.plan for cell in file.all(SuiteCell).values()):
        tell(f"{path}: its results are of other plans than this one")
    return SuiteTable.of(file)


def _own_of(plan: Plan, path: Path) -> OwnFile:
    """The figures of `bench own`, if they are of this plan."""
    from sparsekv.bench.own_file import OwnRun
    from sparsekv.planner.records import RunFile

    file: OwnFile = RunFile.read(OwnRun, path)
    if file.settings.plan != executed_digest(plan):
        raise PlanMismatchError(f"expected figures of this plan in {path}, found those of another; run `bench own`")
    return file


def _profile_of(plan: Plan, path: Path) -> Profile:
    """The profile, if it is one of the plan's model; another one of it than the plan was compiled from is said."""
    from sparsekv.planner.profile.profile_data import Profile, check_model
    from sparsekv.planner.records import digest_of, read_measured

    profile = read_measured(Profile, path)
    check_model(profile, plan.model)
    if plan.provenance.profile not in (None, digest_of(profile)):
        tell(
            f"{path}: another profile than the plan was compiled from, or more of it; patterns it lacks have no damage"
        )
    return profile


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help=PLACE, show_default=False)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help=PLACE, show_default=False)],
    as_json: Json = False,
) -> None:
    """Print what changed between two plans, as a unified diff of both as `plan` writes them. Needs no model.

    Exit 0: nothing did; integrity, comments and layout of a file are no change. Exit 1: something did. Exit 2: a file
    is no plan.
    """
    before, after = (dump_plan(_edited(place)).splitlines()[:-1] for place in (old, new))  # the last is the integrity
    lines = [_with_keys(line, before) for line in unified_diff(before, after, str(old), str(new), lineterm="")]
    if as_json:
        emit_json({"changed": bool(lines), "diff": "\n".join(lines)})
    else:
        emit("\n".join(lines) or f"no change: {new} says what {old} says")
    if lines:
        raise typer.Exit(FAILED)


def _with_keys(line: str, before: Sequence[str]) -> str:
    """A line of a diff; the head of a hunk with the keys around its first change, as `prefill: lengths: up_to: 8k`."""
    head = re.match(r"@@ -(\d+)", line)
    keys: list[str] = []
    indent = None
    for above in reversed(before[: int(head[1]) + 3] if head else ()):
        depth = len(above) - len(above.lstrip())
        if indent is None or depth < indent:
            keys, indent = [above.strip(" -"), *keys], depth
    return " ".join((line, *keys[:-1]))


def _edited(place: Path) -> Plan:
    """A plan, an edited one too: its changes are what is to be reviewed before it is sealed."""
    path = plan_file(place)
    text = read_text(path)
    try:
        return parse_plan(text, str(path))
    except PlanError:
        plan = parse_plan(text, str(path), sealed=False)
    seal = f"sparsekv seal {shlex.quote(str(path))}"
    tell(f"{path}: its integrity does not fit its content; `{seal}` renews it; the plan is unverified then")
    return plan


Plans = Annotated[list[Path], typer.Argument(metavar="PLAN", help=PLACE, show_default=False)]


def validate(plans: Plans, as_json: Json = False) -> None:
    """Check plan files: schema, consistency, integrity. Needs no model and no GPU.

    Exit 0: all are sound. Exit 1: one is not. Exit 2: there is no such file, or it cannot be read.
    """
    files: list[dict[str, Any]] = []
    errors: list[PlanError | UsageError] = []
    for path in plans:
        try:
            plan = load_plan(plan_file(path))
        except (PlanError, UsageError) as error:
            errors.append(error)
            files.append({"path": str(path), "valid": False})
            continue
        facts = {"status": plan.status, "schema_version": plan.schema_version, "model": plan.model.id}
        files.append({"path": str(path), "valid": True, **facts})
        if not as_json:
            emit(f"{path}: valid, {plan.status_text}, schema {plan.schema_version}, for {plan.model.id}")
    facts_of_files = files[0] if len(files) == 1 else {"valid": not errors, "files": files}
    if errors:
        raise _together(errors).with_facts(**facts_of_files)
    if as_json:
        emit_json(facts_of_files)


def _together(errors: Sequence[PlanError | UsageError]) -> SparseKVError:
    """One error that says all. A file that is no plan is wrong usage elsewhere; here it is what the check found."""
    said = "\n".join(map(str, errors))
    if not any(isinstance(error, PlanError) for error in errors):
        return UsageError(said)
    unsound = PlanError(said)
    unsound.exit_code = FAILED
    return unsound


def seal(plan: PlanArgument, as_json: Json = False) -> None:
    """Renew the digest of an edited plan.

    The plan becomes `unverified` and loses its quality and cost, which were measured before the edit. `verify --write`
    measures quality again; cost comes from `plan` alone.
    """
    sealed = seal_file(plan)
    if as_json:
        facts = {"status": sealed.plan.status, "integrity": sealed.plan.integrity, "changed": sealed.changed}
        emit_json({"path": str(plan), **facts, "notes": list(sealed.notes)})
    else:
        emit(f"{plan}: " + "; ".join(sealed.notes))


def schema() -> None:
    """Print the JSON Schema of the plan file, for editors and other tools."""
    emit_json(json_schema())


app = commands.group()
for run, *examples in (
    (show, "sparsekv show plan.yaml", "sparsekv show ./my-model --full"),
    (report, "sparsekv report plan.yaml -o report.html", "sparsekv report plan.yaml model.profile compare.jsonl"),
    (diff, "sparsekv diff old.yaml new.yaml", "sparsekv diff ./my-model plan.yaml --json"),
    (validate, "sparsekv validate plan.yaml", "sparsekv validate ./my-model other.yaml --json"),
    (seal, "sparsekv seal plan.yaml", "sparsekv seal ./my-model/sparsekv.yaml --json"),
    (schema, "sparsekv schema", "sparsekv schema > plan.schema.json"),
):
    commands.add(app, run, *examples)

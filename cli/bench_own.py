"""`sparsekv bench own`: a model by its own plan beside dense, in transformers and in vLLM."""

from __future__ import annotations

from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sparsekv.cli.arguments import Subject, settings_of
from sparsekv.cli.bench_model import Quantization
from sparsekv.cli.output import emit, tell
from sparsekv.cli.plan_files import check_replaceable, default_plan, only_writer
from sparsekv.planner.flags import Flag, Key, Options
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import GateError, UsageError, install_command
from sparsekv.plans.schema import Plan

if TYPE_CHECKING:
    from sparsekv.bench.own_file import OwnFile

_BESIDE = {".md": "the page", ".svg": "the picture", ".log": "vLLM's log"}


class OwnFlags(Options):
    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file.", metavar="MODEL", is_argument=True)]
    plan: Annotated[
        Path | None,
        Flag("The plan; by default that beside the model, made and tested where there is none.", metavar="FILE"),
    ] = None
    vllm_python: Annotated[
        Path | None,
        Flag(
            "The Python of an environment with vLLM and sparsekv; without it the half in vLLM is left.", metavar="PATH"
        ),
    ] = None
    out: Annotated[
        Path,
        Flag(
            "The file of figures, a page (.md) and a picture (.svg) beside it; what is in it is not measured again.",
            ("--out", "-o"),
            "FILE",
        ),
    ] = Path("own.json")
    quantization: Quantization = None
    half: Annotated[
        Literal["both", "transformers", "vllm"],
        Key("Measure in both hosts, or in one of them.", "both|transformers|vllm"),
    ] = "both"
    sparse: Annotated[Literal["auto", "never"], Key("never: cost and noise alone.", "auto|never")] = "auto"


def own(flags: OwnFlags) -> None:
    """A model by its own plan beside dense: prompt, token, requests and a session of turns, and what the plan loses.

    Makes the plan by defaults and tests it, unless there is one. Halves that ran at different times join in the file
    by the plan. A plan that gains nothing says so.
    """
    _check_python(flags)
    _check_out(flags.out)
    with only_writer(flags.out):
        path = flags.plan or default_plan(flags.model)
        subject = _planned(flags, path)
        plan = _tested(subject, path)
        if plan.is_dense:
            emit("the plan is dense: nothing to measure")
            return
        from sparsekv.bench.own_file import OwnPlan, OwnRun
        from sparsekv.planner.records import RunFile

        file: OwnFile = RunFile.of(OwnRun.of(plan, flags.quantization, flags.sparse), flags.out)
        file.add(OwnPlan.of(plan))
        try:
            _measure(flags, subject, plan, file)
        except BaseException as error:
            error.add_note(f"what was measured until then is in {flags.out}; the same command goes on from there")
            raise
        finally:
            _show(file, flags.out)


def _check_python(flags: OwnFlags) -> None:
    python = flags.vllm_python
    if flags.quantization and flags.half == "transformers":
        raise UsageError("expected --quantization with the half in vLLM, found half=transformers; use half=vllm")
    if python is None:
        if asked := flags.quantization or (flags.half == "vllm" and "half=vllm"):
            raise UsageError(f"expected --vllm-python beside {asked}, found none; name the Python that has vLLM")
        if flags.half == "both":
            tell("the half in vLLM is left out: it needs --vllm-python")
    elif which(python) is None:
        raise UsageError(f"expected a Python to run in --vllm-python, found no executable file {python}")


def _check_out(out: Path) -> None:
    """Refuses to write over files of others: new figures have neither page, nor picture, nor log yet."""
    if out.suffix in _BESIDE:
        raise UsageError(f"expected a name of figures such as own.json, found that of {_BESIDE[out.suffix]}, {out}")
    check_replaceable(out, "-o", "own")
    for suffix, what in _BESIDE.items():
        if not out.exists() and (file := out.with_suffix(suffix)).exists():
            raise UsageError(
                f"expected no file yet in {file}, where {what} of {out} is to be written, found one; choose another -o "
                "FILE, or remove it first"
            )


def _planned(flags: OwnFlags, path: Path) -> Subject:
    """The model with its plan, which is made where there is none at the default path."""
    if flags.plan is None and not path.exists():
        from sparsekv.cli.plan import PlanFlags
        from sparsekv.cli.plan import plan as make

        make(PlanFlags(model=flags.model, out=path))
    return Subject.named(flags.model, path)


def _tested(subject: Subject, path: Path) -> Plan:
    """The plan, tested now where it never was; one that missed its test is measured all the same."""
    plan = subject.need_plan()
    if plan.quality is not None or plan.is_dense:
        return plan
    from sparsekv.cli.verify import VerifyFlags, verify
    from sparsekv.plans.files import load_plan

    try:
        verify(VerifyFlags(target=subject.model, plan=path, write=True))
    except GateError as error:
        tell(str(error))
    return load_plan(path)


def _measure(flags: OwnFlags, subject: Subject, plan: Plan, file: OwnFile) -> None:
    from sparsekv.bench.own import OwnBench, in_transformers, in_vllm, request_of
    from sparsekv.runtime.hf.load import load_config, load_tokenizer, torch_dtype
    from sparsekv.runtime.model_config import dtype_name, torch_device

    settings, progress = settings_of(flags), BarProgress()
    device = torch_device(settings.device)
    bench = OwnBench(backend=settings.backend, quantization=flags.quantization, sparse=flags.sparse)
    subject = subject.checked(flags)
    assert subject.source is not None
    if flags.half != "vllm" and flags.quantization is None:
        in_transformers(subject.load(flags), plan, bench, file, progress)
    if flags.vllm_python is not None and flags.half != "transformers":
        dtype = dtype_name(torch_dtype(settings.dtype, load_config(subject.source), device))
        tokenizer: Any = load_tokenizer(subject.source)
        request = request_of(subject.source.path_or_id, plan, tokenizer, device, dtype, bench, file)
        in_vllm(flags.vllm_python, request, plan, file, flags.out.with_suffix(".log"), progress)


def _show(file: OwnFile, out: Path) -> None:
    from sparsekv.bench.own_file import result
    from sparsekv.bench.own_page import page

    picture, text = out.with_suffix(".svg"), out.with_suffix(".md")
    try:
        from sparsekv.bench.own_picture import write_picture
    except ModuleNotFoundError as error:
        tell(f"no picture: it needs {error.name}: {install_command('report')}")
        text.write_text(page(file))
    else:
        write_picture(file, picture)
        text.write_text(page(file, picture.name))
    emit(f"{result(file)}\n{text}")

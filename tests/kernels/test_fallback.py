"""Broken kernels: the next backend computes the same, once with a warning, never where the answer could be wrong."""

import warnings

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.kernels import backends
from sparsekv.kernels.backends import BackendWarning, Fallback, backends_after
from sparsekv.plans.errors import BackendError, ShapeError
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.apply import apply

Q = torch.zeros(1, 1, 4, 64)


class CompilationError(Exception):
    """Like Triton's and the CuTe compiler's: of no class that a caller could name."""


FAULTS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    CompilationError("at 12:3: ptxas died"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    AssertionError("inputs must be on CUDA device"),
    TypeError("_flash_attn_fwd() got an unexpected keyword argument 'mask_mod'"),
    ImportError("libcute_dsl_runtime.so: cannot open shared object file"),
    BackendError("the flash backend needs q at multiples of 16 bytes"),
]


class Calls:
    """A call that raises on some backends, and notes where it ran."""

    def __init__(self, **faults: Exception) -> None:
        self.faults, self.names = faults, []

    def __call__(self, backend: str) -> str:
        self.names.append(backend)
        if backend in self.faults:
            raise self.faults[backend]
        return f"by {backend}"


class Way:
    """One of the calls that fall back: how it is made, where it runs first and then, and what it is told by."""

    def __init__(self, first: str, then: str, by: str) -> None:
        self.first, self.then, self.by = first, then, by

    def run(self, keeper: Fallback, calls: Calls) -> str:
        if self.by == "prefill":
            return keeper.run(calls, Q)
        return keeper.build(calls, Q.device) if self.by == "index" else keeper.decode(calls, "triton", Q.device)


WAYS = [Way("triton", "cpu", "prefill"), Way("auto", "torch", "index"), Way("triton", "reference", "decode")]


@pytest.fixture(params=WAYS, ids=lambda way: way.by)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """On a device on which Triton builds indices."""
    monkeypatch.setattr(backends, "builds_by_triton", lambda device: True)
    return request.param


def is_given_up(way: Way, fault: Exception) -> bool:
    """Wrong input is not the backend's fault, and decode needs no less memory elsewhere."""
    return isinstance(fault, ShapeError) or (way.by == "decode" and isinstance(fault, torch.OutOfMemoryError))


@pytest.mark.parametrize(
    "fault", [*FAULTS, ShapeError("q and k must share batch")], ids=lambda fault: type(fault).__name__
)
def test_next_backend_computes_with_one_warning_and_nothing_does_where_the_input_is_wrong(
    way: Way, fault: Exception
) -> None:
    calls, keeper = Calls(**{way.first: fault}), Fallback("triton")
    if is_given_up(way, fault):
        with pytest.raises(type(fault)):
            way.run(keeper, calls)
        assert (calls.names, keeper.backend) == ([way.first], "triton")
        return
    with pytest.warns(BackendWarning, match="torch" if way.by != "prefill" else "triton.*cpu") as caught:
        assert way.run(keeper, calls) == f"by {way.then}"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert way.run(keeper, calls) == f"by {way.then}"
    assert calls.names == [way.first, way.then, way.then]
    if way.by == "prefill":
        assert keeper.backend == "cpu"
        assert type(fault).__name__ in keeper.failed["triton"]


def test_nothing_else_builds_indices_where_torch_broke() -> None:
    calls = Calls(auto=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        Fallback("cpu").build(calls, Q.device)
    assert calls.names == ["auto"]


def test_last_backend_that_takes_the_tensors_raises_what_it_met() -> None:
    calls, keeper = Calls(triton=FAULTS[0], cpu=FAULTS[1]), Fallback("triton")
    with pytest.warns(BackendWarning), pytest.raises(CompilationError, match="ptxas"):
        keeper.run(calls, Q)
    assert calls.names == ["triton", "cpu"]


def test_interrupts_go_through() -> None:
    def interrupted(backend: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Fallback("triton").run(interrupted, Q)


def test_a_broken_device_computes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_alive", lambda device: False)
    calls = Calls(triton=RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Fallback("triton").run(calls, Q)
    assert calls.names == ["triton"]


def test_tensors_on_a_gpu_are_never_handed_to_the_cpu() -> None:
    on_meta = torch.empty(1, 1, 4, 64, device="meta")  # as good as a GPU: not main memory
    assert backends_after("triton", on_meta) == ()
    assert backends_after("flash", on_meta) == ()
    assert backends_after("triton", Q) == ("cpu",)
    assert backends_after("cpu", Q) == ()


def test_a_run_survives_a_broken_kernel_with_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny_model(layers=2), random_tokens(1, 330)
    plan = plan_for(model, every_head(model, AShape(sink=tokens(10), window=tokens(60))))
    with torch.no_grad(), apply(model, plan, backend="cpu"):
        expected = model(prompt).logits
    tried = []

    def broken(*args: object) -> None:
        tried.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backends, "_obstacle", lambda name, *rest: None if name != "flash" else "not here")
    monkeypatch.setattr("sparsekv.kernels.prefill.triton.prefill", broken)
    with torch.no_grad(), apply(model, plan, backend="triton") as handle:
        with pytest.warns(BackendWarning) as caught:
            torch.testing.assert_close(model(prompt).logits, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(model(prompt).logits, expected)
        assert handle.backend.name == "cpu"
        assert "out of memory" in dict(handle.backend.rejected)["triton"]
    assert len([warning for warning in caught if warning.category is BackendWarning]) == 1
    assert len(tried) == 1
    with torch.no_grad(), apply(model, plan, backend="triton") as another, pytest.warns(BackendWarning):
        model(prompt)
    assert another.backend.name == "cpu"
    assert len(tried) == 2  # another handle tries for itself


def test_a_decode_step_that_torch_begins_again_remembers_its_query_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = segment(0, (1, 2), 30, selector="uniform", window=4)
    model, prompt, new = tiny_model(), random_tokens(1, 100), random_tokens(1, 3, 1)
    plan = plan_for(model, None, decode_plan(part))

    def steps(backend: str) -> torch.Tensor:
        with torch.no_grad(), apply(model, plan, backend=backend):
            cache = model(prompt).past_key_values
            return torch.cat([model(token, past_key_values=cache).logits for token in new.split(1, 1)], 1)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("ptxas died")

    expected = steps("cpu")
    monkeypatch.setattr(backends, "_obstacle", lambda name, *rest: None if name != "flash" else "not here")
    monkeypatch.setattr("sparsekv.kernels.decode.triton.decode", broken)
    with pytest.warns(BackendWarning, match="decode"):
        found = steps("triton")
    torch.testing.assert_close(found, expected)

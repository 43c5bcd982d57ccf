"""What a checkpoint holds comes back as what it was; what it cannot hold is refused, or named and left out."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import logging
import math
import pathlib
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

import ftopt
from ftopt.checkpoint.export import export, state_dict
from ftopt.checkpoint.reader import find
from ftopt.errors import UserError
from ftopt.methods import Method
from tests.checkpoint.conftest import no_waiting_for_the_disk as no_waiting_for_the_disk

EYE = torch.eye(4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Life:
    """One life of a job of one replica, which leaves a checkpoint when it ends."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module | None = None,
        make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        method: Method | None = None,
    ) -> None:
        self.model = nn.Linear(4, 2) if model is None else model
        self.inner = make(self.model)
        method = method or ftopt.DiLoCo(sync_every=2)
        self.optimizer = ftopt.wrap(self.inner, self.model, method, group=ftopt.solo())
        self.checkpoints = ftopt.Checkpoints(folder, self.optimizer, every=1_000)
        self.resumed = self.checkpoints.resume()

    def __enter__(self) -> Life:
        self.optimizer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.optimizer.__exit__(*error)
        self.checkpoints.close()

    def steps(self, count: int, gradient: float = 1.0) -> None:
        for _ in range(count):
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.full_like(p, gradient)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.checkpoints.step()


class Has:
    """Something with that state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5, 9]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, total_iters=7),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=9),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 11),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "swa": lambda o: SWALR(o, 0.01),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [7])]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=8), lr_scheduler.MultiStepLR(o, [2, 4])], [8]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


OF_NUMBERS = ("multiplicative", "constant", "linear", "exponential", "cosine", "restarts", "polynomial", "one_cycle")
"""Schedules whose states are some numbers, as that of ``step``."""


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in OF_NUMBERS else ()) for name in SCHEDULES]
)
def test_every_schedule_of_torch_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    plateau = name == "plateau"

    def rates(life: Life, schedule: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            life.steps(1)
            schedule.step(*([torch.tensor(1.0)] if plateau else []))
            found.append(float(life.optimizer.param_groups[0]["lr"]))
        return found

    with Life(tmp_path / "whole") as life:
        expected = rates(life, SCHEDULES[name](life.optimizer), 12)
    with Life(tmp_path / "c") as life:
        schedule = SCHEDULES[name](life.optimizer)
        life.checkpoints.include(schedule=schedule)
        assert rates(life, schedule, 4) == expected[:4]
        saved = copy.deepcopy(schedule.state_dict())
    with Life(tmp_path / "c") as life:
        schedule = SCHEDULES[name](life.optimizer)
        life.checkpoints.include(schedule=schedule)
        assert schedule.state_dict() == saved
        assert rates(life, schedule, 8) == expected[4:]


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    number: int
    tensor: object


def test_what_is_included_comes_back_as_the_types_that_it_was(tmp_path: Path) -> None:
    state = {
        "counter": collections.Counter("aab"),
        "ordered": nn.BatchNorm1d(2).state_dict(),
        "default": collections.defaultdict(list, {1: [2]}),
        "deque": collections.deque([1.5, math.inf], maxlen=4),
        "sets": [{1, "a", (2, 3)}, frozenset({4})],
        "pair": Pair(1, (torch.ones(2, dtype=torch.float8_e4m3fn), None)),
        "enum": Colour.RED,
        "keys": {1: "int", "1": "str", False: 0, None: b"\0", (1, 2): 3},
        "complex": [1j, torch.tensor([1j, 2]), numpy.complex64(3j)],
        "numbers": [numpy.float64(0.1), numpy.int16(3), numpy.bool_(True), 10**4_000, Decimal("1.10"), Fraction(1, 3)],
        "arrays": [numpy.arange(6).reshape(2, 3), numpy.array("text"), numpy.array(["2026-01-01"], "M8[D]")],
        "times": [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.timedelta(1, 2, 3)],
        "path": pathlib.Path("/a/b"),
        "torch": [torch.Size([2]), torch.bfloat16, torch.device("cuda", 1), EYE.to_sparse(), nn.Parameter(EYE)],
        "same path": [{"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, {1: torch.ones(1), "1": torch.zeros(1)}],
    }
    with Life(tmp_path / "c") as life:
        life.checkpoints.include(it=Has(copy.deepcopy(state)))
        life.steps(2)
    with Life(tmp_path / "c") as life:
        has = Has(None)
        life.checkpoints.include(it=has)
    alike(has.state, state)


def alike(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(b, Tensor):
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
        assert torch.equal(a.to_dense().to(torch.complex128), b.to_dense().to(torch.complex128))
    elif isinstance(b, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        assert getattr(a, "__dict__", None) == getattr(b, "__dict__", None)
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        for key in b:
            alike(a[key], b[key])
    elif isinstance(b, list | tuple | collections.deque):
        assert len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        for one, other in zip(a, b, strict=True):
            alike(one, other)
    elif isinstance(b, set | frozenset):  # in no order
        assert a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    else:
        assert repr(a) == repr(b)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: 0, "it.fn.0 is a function, which a checkpoint cannot hold"),
        (collections.defaultdict(lambda: 0), "it.fn.0 is a collections.defaultdict, which"),
        (
            torch.nested.nested_tensor([EYE], layout=torch.jagged),
            "it.fn.0 is a nested torch.nested._internal.nested_tensor.NestedTensor of torch.float32, which",
        ),
        (EYE.to("meta"), "it.fn.0 is a meta tensor of torch.float32, which"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_when_it_is_included(
    value: object, reason: str, tmp_path: Path
) -> None:
    with Life(tmp_path / "c") as life, pytest.raises(UserError) as refused:
        life.checkpoints.include(it=Has({"fn": [value]}))
    assert f"checkpoints.include(it=...): {reason}" in str(refused.value)


def test_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    with Life(tmp_path / "c") as life, pytest.raises(UserError, match="contains itself"):
        life.checkpoints.include(it=Has(endless))


def test_a_loader_is_not_asked_for_its_state_before_the_first_step(tmp_path: Path) -> None:
    """`torchdata.StatefulDataLoader.state_dict` starts its workers."""

    class Loader(Has):
        asked = 0

        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> object:
            self.asked += 1
            return self.state

    loader = Loader({"sampler": print})
    with Life(tmp_path / "c") as life:
        life.checkpoints.include(loader=loader)
        assert loader.asked == 0
        with pytest.raises(UserError, match=r"include\(loader=...\): loader.sampler is a builtin_function_or_method"):
            life.steps(1)


def test_averaged_models_and_scalers_come_back(tmp_path: Path) -> None:
    def objects(model: nn.Module) -> dict[str, Any]:
        return {"ema": AveragedModel(model, use_buffers=True), "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}

    with Life(tmp_path / "c", nn.BatchNorm1d(4)) as life:
        first = objects(life.model)
        life.checkpoints.include(**first)
        life.steps(2)
        first["ema"].update_parameters(life.model)
        saved = {name: copy.deepcopy(each.state_dict()) for name, each in first.items()}
    with Life(tmp_path / "c", nn.BatchNorm1d(4)) as life:
        second = objects(life.model)
        life.checkpoints.include(**second)
        for name, each in second.items():
            alike(each.state_dict(), saved[name])


def odd_tensors() -> dict[str, Tensor]:
    dtypes = (
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "bfloat16",
    )
    found = {name: (EYE + 1).to(getattr(torch, name)) for name in dtypes}
    return found | {
        "coo": EYE.to_sparse(),
        "csr": EYE.to_sparse_csr(),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(3.0),
        "expanded": torch.ones(1, 4).expand(4, 4),
        "conjugate": torch.full((2,), 1 + 2j).conj(),
    }


CANNOT = {
    "nested": torch.nested.nested_tensor([EYE], layout=torch.jagged),
    "meta": EYE.to("meta"),
}


class Odd(nn.Linear):
    """Has them as buffers, and all but the sparse ones as frozen parameters, too."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(4, 2)
        for name, tensor in tensors.items():
            self.register_buffer(f"b_{name}", tensor.clone() if name != "expanded" else tensor)
            if tensor.layout == torch.strided and not tensor.is_nested:
                self.register_parameter(f"p_{name}", nn.Parameter(tensor.clone(), requires_grad=False))
        self.register_buffer("not_saved", EYE.to_sparse(), persistent=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_frozen_tensors_and_buffers_of_any_dtype_and_layout_are_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Life(tmp_path / "c", Odd(odd_tensors())) as life:
        life.steps(2)
        life.model.b_coo = torch.ones(4, 4).to_sparse() * 2  # training may change buffers
        life.model.b_csr = torch.ones(4, 4).to_sparse_csr()
        life.model.b_float8_e5m2 = torch.zeros(4, 4).to(torch.float8_e5m2)
        expected = {name: tensor.clone() for name, tensor in life.model.state_dict().items()}
    assert caplog.messages == []
    with Life(tmp_path / "c", Odd(odd_tensors())) as life:
        for name, buffer in life.model.named_buffers():
            if name != "not_saved":
                alike(buffer, expected[name])
        life.steps(2)
    found = state_dict(find(tmp_path / "c"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if name not in ("weight", "bias"):
            alike(tensor, expected[name].resolve_conj())
    with pytest.raises(UserError, match="file cannot hold; write a"):
        export(find(tmp_path / "c"), tmp_path / "model.safetensors")
    export(find(tmp_path / "c"), tmp_path / "model.pt")


def test_frozen_tensors_that_cannot_be_saved_are_named_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Life(tmp_path / "c", Odd(CANNOT)) as life:
        life.steps(6)
    (said,) = caplog.messages
    assert said.startswith(
        "replica r0: the checkpoints do without 3 values that they cannot hold, which a resume leaves"
    )
    for name in ("b_nested is a nested", "p_meta is a meta tensor of"):
        assert name in said
    assert state_dict(find(tmp_path / "c")).keys() == {"weight", "bias"}
    with Life(tmp_path / "c", Odd(CANNOT)) as life:
        assert life.resumed
        life.steps(2)


def test_tensors_of_torchao_are_saved(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def model() -> nn.Module:
        base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
        return nn.ModuleDict({"base": base, "head": nn.Linear(4, 2)})

    with Life(tmp_path / "c", model()) as life:
        life.steps(2)
        expected = life.model.state_dict()["base.weight"].dequantize()
    assert torch.equal(state_dict(find(tmp_path / "c"))["base.weight"].dequantize(), expected)


@pytest.mark.parametrize("rate", [numpy.float64(0.1), numpy.float32(0.25), torch.tensor(0.1), torch.tensor([0.1])])
def test_a_rate_is_a_number_whatever_its_type(rate: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inner.param_groups[0] |= {"lr": rate, "betas": (numpy.float64(0.8), 0.9), "weight_decay": numpy.float32(0.5)}
        return inner

    with Life(tmp_path / "c", make=make) as life:
        life.checkpoints.include()
        life.steps(4)
    assert caplog.messages == []
    with Life(tmp_path / "c", make=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)) as life:
        life.checkpoints.include()
        group = life.inner.param_groups[0]
        assert type(group["lr"]) is type(rate) and group["lr"] == rate
        assert [type(group[key]) for key in ("betas", "weight_decay")] == [tuple, numpy.float32]


def test_what_a_group_has_that_cannot_be_saved_is_named_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        inner = sgd(model)
        inner.param_groups[0]["rule"] = print
        return inner

    with Life(tmp_path / "c", make=make) as life:
        life.steps(4)
    (said,) = caplog.messages
    assert "param_groups[0]['rule'] is a builtin_function_or_method" in said
    with Life(tmp_path / "c", make=make) as life:
        life.checkpoints.include()
        assert life.inner.param_groups[0]["rule"] is print


class Counting(torch.optim.SGD):
    """Keeps state beside its parameters, as MADGRAD does."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.state["k"] = torch.tensor([0])
        self.state["more"] = {"seen": 0, "history": [torch.zeros(2), (1.5, None)], 7: "x"}

    def step(self, closure: Any = None) -> Any:
        self.state["k"] += 1
        self.state["more"]["seen"] += 1
        self.state["more"]["history"][0] += 1
        return super().step(closure)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting(model.parameters(), lr=0.1, momentum=0.9)


def test_what_an_optimizer_keeps_beside_its_parameters_is_resumed(tmp_path: Path) -> None:
    with Life(tmp_path / "c", make=counting) as life:
        life.steps(4)
    with Life(tmp_path / "c", make=counting) as life:
        life.checkpoints.include()
        alike(life.inner.state["k"], torch.tensor([4]))
        alike(life.inner.state["more"], {"seen": 4, "history": [torch.full((2,), 4.0), (1.5, None)], 7: "x"})
        life.steps(2)
    assert life.inner.state["more"]["seen"] == 6


def test_steps_that_are_not_finite_leave_what_lies_beside_the_parameters(tmp_path: Path) -> None:
    with Life(tmp_path / "c", make=counting) as life:
        life.steps(3)
        life.steps(1, gradient=math.nan)
        life.steps(4)
        assert life.inner.state["k"] == 8
        assert all(torch.isfinite(p).all() for p in life.model.parameters())


def test_a_reset_of_the_inner_state_begins_with_what_the_optimizer_was_made_with(tmp_path: Path) -> None:
    method = ftopt.SlowMo(sync_every=2, inner_state="reset")
    with Life(tmp_path / "c", make=counting, method=method) as life:
        life.steps(5)
        alike(life.inner.state["k"], torch.tensor([1]))
        alike(life.inner.state["more"], {"seen": 1, "history": [torch.ones(2), (1.5, None)], 7: "x"})


class Noisy(torch.optim.SGD):
    """Keeps a random number generator in its state."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.state["rng"] = torch.Generator().manual_seed(1)

    def step(self, closure: Any = None) -> Any:
        torch.rand(1, generator=self.state["rng"])
        return super().step(closure)


def test_a_generator_in_an_optimizers_state_survives_a_nan_a_reset_and_a_resume(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Noisy(model.parameters(), lr=0.1)

    with Life(tmp_path / "c", make=make, method=ftopt.SlowMo(sync_every=2, inner_state="reset")) as life:
        life.steps(3)
        life.steps(1, gradient=math.nan)
        life.steps(3)
    left = life.inner.state["rng"].get_state()
    with Life(tmp_path / "c", make=make, method=ftopt.SlowMo(sync_every=2, inner_state="reset")) as life:
        assert torch.equal(life.inner.state["rng"].get_state(), left)


def test_several_inner_optimizers_with_state_beside_their_parameters_have_one_state_dict() -> None:
    model = nn.Linear(4, 2)
    inner = [Counting([model.weight], lr=0.1), Counting([model.bias], lr=0.1)]
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=ftopt.solo())
    inner[1].state["k"] += 5
    saved = copy.deepcopy(optimizer.state_dict())
    inner[0].state["k"] += 3
    inner[1].state["k"] += 3
    optimizer.load_state_dict(saved)
    assert [int(each.state["k"]) for each in inner] == [0, 5]


class Seen(nn.Linear):
    """Keeps extra state."""

    def __init__(self, seen: object) -> None:
        super().__init__(4, 2)
        self.seen = seen

    def get_extra_state(self) -> object:
        return self.seen

    def set_extra_state(self, state: object) -> None:
        self.seen = state


def test_the_extra_state_of_modules_comes_back_before_training(tmp_path: Path) -> None:
    with Life(tmp_path / "c", nn.Sequential(Seen({"n": 1}), Seen(None))) as life:
        life.model[0].seen["n"] = 2  # type: ignore[index, operator]
        life.model[1].seen = (torch.ones(2), {3})  # type: ignore[assignment]
        life.steps(2)
    with Life(tmp_path / "c", nn.Sequential(Seen({"n": 0}), Seen(None))) as life:
        alike(life.model[0].seen, {"n": 2})
        alike(life.model[1].seen, (torch.ones(2), {3}))


def test_extra_state_that_cannot_be_saved_is_named_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Life(tmp_path / "c", Seen(print)) as life:
        life.steps(4)
    (said,) = caplog.messages
    assert "_extra_state is a builtin_function_or_method" in said
    with Life(tmp_path / "c", Seen("new")) as life:
        assert life.resumed and life.model.seen == "new"


def test_other_log_lines_of_a_resume_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Life(tmp_path / "c") as life:
        life.steps(2)
    with caplog.at_level(logging.WARNING), Life(tmp_path / "c") as life:
        life.checkpoints.include()
    assert [message for message in caplog.messages if "resuming from" not in message] == []

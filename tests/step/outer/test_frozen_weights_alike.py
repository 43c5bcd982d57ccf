"""Replicas whose frozen weights differ train no common model, although all that trains is equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.errors import Refused, UserError
from ftopt.step.tensors.frozen_weights import frozen_lines
from ftopt.sync.protocol.coordinator.roster.lines import frozen_differ


class Adapted(nn.Module):
    """A frozen base, and a head that trains."""

    def __init__(self, base: float, layers: int = 2) -> None:
        super().__init__()
        self.base = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        for number, parameter in enumerate(self.base.parameters()):
            nn.init.constant_(parameter, base if number == 1 else 1.0).requires_grad_(False)
        self.head = nn.Linear(4, 2)


def joined(group: ftopt.ReplicaGroup, base: float) -> ftopt.ReplicaOptimizer:
    model = Adapted(base)
    inner = torch.optim.SGD(model.head.parameters(), lr=0.1)
    return ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=group)


def test_who_has_another_base_model_is_refused_and_hears_which_weights_differ() -> None:
    first, second = ftopt.local_groups(2, policy=ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0))
    with joined(first, 0.5):
        said = r"replica r1 does not fit .*: frozen weights, 1 of 4, .* than in the job: base\.0\.bias \(another base"
        with pytest.raises(Refused, match=said), joined(second, 0.25):
            pass


@pytest.mark.parametrize(("setting", "base"), [("ignore", 0.25), ("compare", 0.5)])
def test_who_has_the_same_ones_joins_and_any_one_where_that_is_asked_for(setting: str, base: float) -> None:
    policy = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, frozen=setting)
    first, second = ftopt.local_groups(2, policy=policy)
    with joined(first, 0.5), joined(second, base) as optimizer:
        assert optimizer.status.versions == (0,)


def test_many_names_are_told_in_short() -> None:
    lines = frozen_lines(Adapted(0.5, layers=90))
    assert 1 < len(lines) <= 129  # 180 tensors, by module
    other = {name: "x" if name.startswith("frozen.") else line for name, line in lines.items()}
    assert "base.0, base.1, base.10, base.11, base.12 and 85 more" in frozen_differ(lines, other)


def test_a_model_that_trains_as_a_whole_has_nothing_to_compare() -> None:
    assert frozen_lines(nn.Linear(3, 3)) == {}


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def compressed() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a beta state
        return torch.eye(3).to_sparse_csr()


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.quantize_per_tensor(torch.arange(6.0), 0.5, 0, torch.quint8)


KINDS: dict[str, Callable[[], Tensor]] = {
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn), "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "bool": lambda: torch.ones(3, dtype=torch.bool), "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "scalar": lambda: torch.tensor(1.0), "empty": lambda: torch.ones(0), "expanded": lambda: torch.ones(1).expand(5),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(), "sparse": sparse, "compressed": compressed,
    "quantized": quantized,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_of_any_kind_have_a_digest(kind: str) -> None:
    def lines(tensor: Tensor) -> dict[str, str]:
        model = nn.Module()
        model.w = nn.Parameter(tensor, requires_grad=False)
        return frozen_lines(model)

    def changed(tensor: Tensor) -> Tensor:
        if kind in ("sparse", "compressed"):
            return tensor.to_dense() * 2
        return tensor.dequantize() * 2 if kind == "quantized" else (tensor.to(torch.complex64) * 2).to(tensor.dtype)

    made = lines(KINDS[kind]())
    assert made.keys() == {"frozen", "frozen.w"} and made == lines(KINDS[kind]())
    if kind not in ("empty", "bool"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what complex numbers lose
            assert made != lines(changed(KINDS[kind]()))


@pytest.mark.parametrize("module", [nn.Linear(3, 3, device="meta"), nn.LazyLinear(3)])
def test_frozen_weights_without_values_are_not_compared(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad = False
    assert frozen_lines(module).keys() == {"frozen"}


def test_a_checkpoint_of_a_job_with_another_base_model_is_refused(tmp_path: Path) -> None:
    def life(base: float, frozen: str = "compare") -> None:
        (group,) = ftopt.local_groups(1, policy=ftopt.FaultPolicy(start_replicas=1, dead_after_s=60.0, frozen=frozen))
        optimizer = joined(group, base)
        checkpoints = ftopt.Checkpoints(tmp_path, optimizer, every=1)
        checkpoints.resume()
        with optimizer:
            for _ in range(4):
                optimizer.zero_grad()
                model = optimizer._core.model
                assert isinstance(model, Adapted)
                model.head(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                checkpoints.step()
            checkpoints.last()
            checkpoints.close()

    life(0.5)
    life(0.5)
    with pytest.raises(UserError, match=r"other frozen weights: base\.0\.bias have other values here"):
        life(0.25)
    life(0.25, frozen="ignore")

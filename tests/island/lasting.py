"""Ranks of one island alone in its jobs, for tests of single calls; by torchrun: ``python -m tests.island.lasting``.

Each function is a job of its own; what rank 0 and the others found is compared here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt
from ftopt.checkpoint.export import state_dict
from ftopt.checkpoint.reader import find
from ftopt.errors import FtoptError, UserError
from ftopt.methods import Method
from tests.island.training import whole
from tests.step.outer.test_inner_state_of_joiners import Inner


def sharded() -> nn.Module:
    """A model whose root module holds its parameters: FSDP2 keeps them gathered after a forward pass. Rank 1 has no
    part of the last two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 1))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def three() -> nn.Module:
    """A replicated model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 1))


class RoundRobin(torch.optim.Optimizer):
    """SGD with momentum of replicated parameters; each is updated, and has its state, on one rank alone."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Updates this rank's, and gives it to the others."""
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i % dist.get_world_size() == dist.get_rank() and p.grad is not None:
                state = self.state[p]
                state.setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.5).add_(p.grad)
                p.add_(state["momentum_buffer"], alpha=-self.param_groups[0]["lr"])
            dist.broadcast(p, src=i % dist.get_world_size())


class SkipsEmpty(torch.optim.SGD):
    """SGD that keeps no state of empty shards."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        for p in list(self.state):
            if not p.to_local().numel():
                del self.state[p]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see."""
    with TemporaryDirectory() as mine:
        told: list[object] = [mine]
        dist.broadcast_object_list(told)
        yield Path(str(told[0]))
        dist.barrier()


def wrapped(
    name: str,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    method: Method,
) -> ftopt.ReplicaOptimizer:
    """A job of this island alone."""
    policy = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, stragglers="wait")
    return ftopt.wrap(inner, model, method, group=ftopt.connect(job=name, policy=policy))


def train(called: nn.Module, optimizer: ftopt.ReplicaOptimizer, steps: int) -> None:
    """Inner steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        called(torch.ones(2, 7)).square().mean().backward()
        optimizer.step()


def all_alike(value: object) -> bool:
    """Whether all ranks give the same."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(each == found[0] for each in found)


def evaluates() -> None:
    """A forward pass without a backward one, before the start and before calls of the optimizer."""
    model = sharded()
    optimizer = wrapped("evaluates", model, torch.optim.SGD(model.parameters(), lr=0.1), ftopt.DiLoCo(sync_every=4))
    with torch.no_grad():
        model(torch.zeros(1, 7))
    with optimizer:
        train(model, optimizer, 5)
        with torch.no_grad():
            model(torch.zeros(1, 7))
        assert optimizer.sync()
        with optimizer.global_parameters(), torch.no_grad():
            outer = model(torch.ones(1, 7))
        with torch.no_grad():
            assert torch.equal(outer, model(torch.ones(1, 7)))
        train(model, optimizer, 1)


class TwoModes(torch.optim.SGD):
    """In eval mode the parameters are others, as those of a schedule-free optimizer."""

    mode = "eval"

    @torch.no_grad()
    def _turn(self, mode: str, factor: float) -> None:
        if self.mode != mode:
            self.mode = mode
            for p in self.param_groups[0]["params"]:
                p.mul_(factor)

    def eval(self) -> None:
        """As trainers call it."""
        self._turn("eval", 0.3)

    def train(self) -> None:
        """The reverse, but for rounding."""
        self._turn("train", 1 / 0.3)


@torch.no_grad()
def values(model: nn.Module) -> list[torch.Tensor]:
    """All parameters."""
    return [whole(p).clone() for p in model.parameters()]


def evaluates_as_trainers_do() -> None:
    """`eval()` and `train()` on all ranks, also in one that has no part of some parameters."""
    for method in (ftopt.DiLoCo(sync_every=4), ftopt.SyncSGD()):
        model = sharded()
        inner = TwoModes(model.parameters(), lr=0.1)
        optimizer = wrapped(f"turns-{method.name}", model, inner, method)
        optimizer.train()
        optimizer.eval()
        with optimizer:
            assert inner.mode == "train"
            train(model, optimizer, 5)
            own = values(model)
            with optimizer.global_parameters():
                outer = values(model)
            optimizer.eval()
            optimizer.eval()
            assert inner.mode == "eval"
            assert all(map(torch.equal, values(model), outer))
            with pytest.raises(RuntimeError, match=r"optimizer.train\(\) after"):
                optimizer.sync()
            with optimizer.global_parameters():
                pass
            optimizer.train()
            optimizer.train()
            assert inner.mode == "train"
            assert all(map(torch.equal, values(model), own))
            train(model, optimizer, 1)
            optimizer.eval()
        assert inner.mode == "train"
        optimizer.eval()
        assert inner.mode == "train"


def stands() -> None:
    """What loops go by changes within calls alone."""
    model = sharded()
    method = ftopt.StreamingDiLoCo(sync_every=4, fragments=ftopt.fragments.Balanced(n=2), delay=2)
    optimizer = wrapped("stands", model, torch.optim.SGD(model.parameters(), lr=0.1), method)
    with optimizer:
        for _ in range(30):
            train(model, optimizer, 1)
            for _ in range(3):
                dist.barrier()
                assert all_alike((optimizer.status.versions, optimizer.inner_step, optimizer.status.pending_steps))


def measures() -> None:
    """Ranks are due alike by what is measured over all of them, also where rank 1 has moved little or has no part."""
    for trigger in (ftopt.triggers.LocalCondition, ftopt.triggers.LinearFDA):
        for make in (sharded, three):
            model, method = make(), ftopt.LocalSGD(sync_every=100, trigger=trigger(1e-9, check_every=1))
            inner = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = wrapped(f"measures-{trigger.__name__}-{make.__name__}", model, inner, method)
            with optimizer:
                train(model, optimizer, 12)
                assert all_alike((optimizer.status.versions, optimizer.pending_steps))
                # The other one goes by what the job knows of all replicas, which heartbeats tell.
                assert optimizer.status.versions[0] > 1 or trigger is ftopt.triggers.LinearFDA


def loads_alike() -> None:
    """The replicas of a method that exchanges gradients have the inner state alike."""
    model = sharded()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = wrapped("loads", model, inner, ftopt.SyncSGD())
    with optimizer:
        train(model, optimizer, 1)
        former = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.load_state_dict(former)
        assert any("the inner optimizer's state is not loaded" in str(each.message) for each in told)
        assert inner.state[next(iter(model.parameters()))]["step"] == 2


def far(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights that no training leads to."""
    return {name: value + 100.0 for name, value in model.state_dict().items()}


def size(model: nn.Module) -> float:
    """Of the largest parameter."""
    return max(float(value.abs().max()) for value in values(model))


@contextmanager
def told_by_rank_0() -> Iterator[None]:
    """Of loaded weights that are replaced."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    assert sum("weights were loaded" in str(each.message) for each in told) == (dist.get_rank() == 0)


def loads_weights(method: Method, make: Callable[[], nn.Module]) -> None:
    """Weights that are loaded after the join are no training, in no call."""
    model = make()
    name = f"weights-{method.name}-{make.__name__}"
    optimizer = wrapped(name, model, torch.optim.SGD(model.parameters(), lr=0.05), method)
    pending = 0 if method.gradients is not None else 1
    with optimizer:
        train(model, optimizer, 5)
        optimizer.sync()
        train(model, optimizer, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for who in ((0, 1), (0,), (1,)):  # who looks at other weights for a while
                before, own = optimizer.local_steps, copy.deepcopy(model.state_dict())
                if dist.get_rank() in who and (len(who) > 1 or make is three):  # of a sharded model all do
                    model.load_state_dict(far(model))
                    assert size(model) > 50
                    model.load_state_dict(own)
                train(model, optimizer, 1)
                assert optimizer.local_steps == before + 1
            assert optimizer.pending_steps == 5 * pending
            optimizer.sync()
        for call in (lambda: train(model, optimizer, 1), optimizer.sync, lambda: optimizer.sync(propose=False)):
            model.load_state_dict(far(model))
            with told_by_rank_0():
                call()
            assert size(model) < 10
            assert optimizer.pending_steps == 0
            train(model, optimizer, 1)
            assert optimizer.pending_steps == pending
        with torch.no_grad():  # as torch.distributed.checkpoint does
            own = model.state_dict()
            for value in own.values():
                value.add_(100.0)
        model.load_state_dict(own)
        assert size(model) > 50
        with told_by_rank_0(), optimizer.global_parameters():
            assert size(model) < 10
        assert size(model) < 10
        train(model, optimizer, 6)
        optimizer.sync()
        with optimizer.global_parameters():
            assert size(model) < 10
        model.load_state_dict(far(model))
        with told_by_rank_0():
            optimizer.close()
    assert size(model) > 50


def loads_at_any_step(make: Callable[[], nn.Module]) -> None:
    """Also while a fragment is frozen, or its result is awaited."""
    model = make()
    method = ftopt.StreamingDiLoCo(
        sync_every=4, fragments=ftopt.fragments.Balanced(n=2), delay=2, wait_for_result_s=60.0
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with wrapped(f"any-step-{make.__name__}", model, inner, method) as optimizer:
        for trained in range(1, 8):
            train(model, optimizer, trained)
            model.load_state_dict(far(model))
            with told_by_rank_0():
                train(model, optimizer, 1)
            assert size(model) < 10
        optimizer.sync()
        with optimizer.global_parameters():
            assert size(model) < 10


def one_rank_loads() -> None:
    """It is said before they reach another replica."""
    model = three()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = wrapped("one-loads", model, inner, ftopt.DiLoCo(sync_every=4))
    with pytest.raises(UserError, match="rank 1 has loaded weights"), optimizer:
        train(model, optimizer, 2)
        if dist.get_rank() == 1:
            model.load_state_dict(far(model))
        train(model, optimizer, 4)


def groups_differ() -> None:
    """Groups are the same on all ranks."""
    model = nn.Linear(3, 3)
    parameters = list(model.parameters())
    groups = [{"params": parameters}] if dist.get_rank() == 0 else [{"params": [p]} for p in parameters]
    optimizer = wrapped("groups", model, torch.optim.SGD(groups, lr=0.1), ftopt.DiLoCo(sync_every=4))
    with pytest.raises(UserError, match="or has them in other groups"), optimizer:
        pass


def sets_up_without_gradient() -> None:
    """A warm-up from rate 0 is a step on all ranks, or on none, also where one rank's part of the gradient is 0."""
    model = nn.Linear(3, 3)
    optimizer = wrapped("warm_up", model, torch.optim.SGD(model.parameters(), lr=0.0), ftopt.DiLoCo(sync_every=4))
    for p in model.parameters():
        p.grad = torch.full_like(p, float(dist.get_rank() == 0))
    optimizer.step()
    assert optimizer.local_steps == 1
    optimizer.close()


def closure_raises(who: str) -> None:
    """After an error that has left a closure, the ranks need not be alike: nothing goes on, and nobody waits."""
    rank = dist.get_rank()
    model = nn.Linear(3, 3)
    optimizer = wrapped(f"raises-{who}", model, torch.optim.SGD(model.parameters(), lr=0.1), ftopt.DiLoCo(sync_every=9))

    def bad() -> float:
        if who in ("all", str(rank)):
            raise FloatingPointError("a bad batch")
        return 0.0

    optimizer.step(lambda: 0.0)
    with pytest.raises(
        FtoptError,
        match=r"an earlier call .* \(FloatingPointError: a bad|gone: FloatingPointError: a bad|another rank of this",
    ):
        for _ in range(3):
            try:
                optimizer.step(bad)
            except FloatingPointError:
                continue
    optimizer.close()


Made = tuple[nn.Module, torch.optim.Optimizer]


def lives(name: str, make: Callable[[], Made], steps: int, n: int, method: Method) -> list[torch.Tensor]:
    """The parameters after ``steps`` in ``n`` processes' lives: each resumes from the one before."""
    with shared_folder() as folder:
        for life in range(n):
            model, inner = make()
            optimizer = wrapped(f"{name}-{n}-{life}", model, inner, method)
            checkpoints = ftopt.Checkpoints(folder, optimizer, every=1)
            assert checkpoints.resume() == (life > 0)
            with optimizer:
                checkpoints.include()
                train(model, optimizer, steps // n)
                checkpoints.last()
                checkpoints.close()
        return [whole(p).clone() for p in model.parameters()]


def check_lives(name: str, make: Callable[[], Made]) -> None:
    """Resuming twice changes nothing; nor does a method that brings the inner state together in each step."""
    expected = lives(name, make, 12, 1, ftopt.LocalSGD(sync_every=2))
    for n, method in ((3, ftopt.LocalSGD(sync_every=2)), (1, ftopt.SyncSGD()), (3, ftopt.SyncSGD())):
        found = lives(f"{name}-{method.name}", make, 12, n, method)
        assert all(map(torch.equal, found, expected)), (name, n, method)


def owns_some() -> None:
    """A rank has no inner state of a parameter that another rank updates (distributed Muon)."""

    def make() -> Made:
        model = three()
        return model, RoundRobin(list(model.parameters()))

    check_lives("owns_some", make)


def skips_empty() -> None:
    """A rank has no inner state of a shard without elements."""

    def make() -> Made:
        model = sharded()
        return model, SkipsEmpty(model.parameters(), lr=0.1, momentum=0.5)

    check_lives("skips_empty", make)


def counts_elsewhere(kind: str, resumes: int) -> None:
    """An inner optimizer counts in its groups, or under a key of its state that is no parameter."""

    def make() -> Made:
        model = three()
        return model, Inner(model.parameters(), 0.1, kind)

    name = kind.replace(" ", "-")
    expected = lives(name, make, 12, 1, ftopt.LocalSGD(sync_every=2))
    found = lives(f"{name}-together", make, 12, resumes, ftopt.SyncSGD())
    assert all(map(torch.equal, found, expected)), kind


def lacks_a_gradient() -> None:
    """A parameter that has a gradient on one rank only, and a shard without inner state."""
    parameters = list((model := three()).parameters())
    optimizer = wrapped("gradient", model, torch.optim.SGD(parameters, lr=1.0), ftopt.SyncSGD())
    with optimizer:
        before = parameters[1].detach().clone()
        optimizer.zero_grad()
        for p in parameters[: 1 + dist.get_rank()]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert torch.equal(parameters[1], before - 1.0)
        assert all_alike([p.tolist() for p in parameters])


def odd_state() -> None:
    """A state that has no place: all ranks say so, and none waits."""
    inner = torch.optim.SGD((model := sharded()).parameters(), lr=0.1)
    optimizer = wrapped("odd", model, inner, ftopt.SyncSGD())
    if dist.get_rank() == 1:
        inner.state[next(iter(model.parameters()))]["rows"] = torch.zeros(5)
    refused = r"state 'rows' of 0.weight is \(5,\), which is neither a number nor placed"
    with pytest.raises(UserError, match=refused), optimizer:
        train(model, optimizer, 4)


def hides_its_state() -> None:
    """What can be neither saved nor averaged is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = three()
    inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.raises(UserError, match=r"a ZeroRedundancyOptimizer, which keeps .* use the optimizer that it wraps, "):
        wrapped("hides", model, inner, ftopt.DiLoCo(sync_every=2))


def exports() -> None:
    """Whole tensors, in both formats, before and after the end, also if their parts on rank 1 are empty; and a file
    that rank 0 cannot write is an error of all ranks, after which they go on."""
    model = sharded()
    model.register_buffer("own", torch.arange(3))
    optimizer = wrapped("exports", model, torch.optim.SGD(model.parameters(), lr=0.1), ftopt.DiLoCo(sync_every=4))
    with shared_folder() as folder:
        checkpoints = ftopt.Checkpoints(folder / "saved", optimizer, every=1)
        with optimizer:
            train(model, optimizer, 6)
            with optimizer.global_parameters():
                expected = {name: whole(value).clone() for name, value in model.state_dict().items()}
                optimizer.export(folder / "in.pt")
            optimizer.export(folder / "between.safetensors")
            for _ in range(2):
                with pytest.raises(UserError, match=r"cannot be written: .* give another FILE"):
                    optimizer.export(folder / "nowhere" / "model.pt")
            train(model, optimizer, 2)
            checkpoints.last()
        checkpoints.close()
        optimizer.export(folder / "end.safetensors")
        optimizer.export(folder / "end.pt")
        exported = {path.name: read_tensors(path) for path in folder.iterdir() if path.is_file()}
        saved = state_dict(find(folder / "saved"))
        dist.barrier()
    for first, second in (("in.pt", "between.safetensors"), ("end.pt", "end.safetensors")):
        equal(exported[first], exported[second])
    equal(exported["in.pt"], expected)
    equal(exported["end.pt"], saved)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """A file of `export`."""
    read = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return dict(read)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Plain tensors, bit for bit."""
    assert found.keys() == expected.keys()
    assert all(type(found[name]) is torch.Tensor and torch.equal(found[name], expected[name]) for name in found)


RARE = ftopt.DiLoCo(sync_every=100)
STREAMING = ftopt.StreamingDiLoCo(
    sync_every=100, fragments=ftopt.fragments.Balanced(n=2), delay=2, wait_for_result_s=60.0
)
CASES: list[Callable[[], None]] = [
    partial(counts_elsewhere, "count in the group", 3), partial(counts_elsewhere, "list in the group", 3),
    partial(counts_elsewhere, "count among the defaults", 1), partial(counts_elsewhere, "key that is no parameter", 1),
    owns_some, skips_empty, lacks_a_gradient, odd_state, hides_its_state,
    evaluates, evaluates_as_trainers_do, stands, measures, loads_alike, groups_differ, sets_up_without_gradient,
    lambda: closure_raises("all"), lambda: closure_raises("0"), lambda: closure_raises("1"),
    *(
        partial(loads_weights, method, make)
        for method in (RARE, ftopt.SyncSGD(), STREAMING) for make in (sharded, three)
    ),
    *(partial(loads_at_any_step, make) for make in (sharded, three)),
    one_rank_loads, exports,
]  # fmt: skip


def main() -> None:
    """One rank."""
    dist.init_process_group("gloo")
    dist.new_group([0])  # a user's, which only one rank is in
    for case in CASES:
        case()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

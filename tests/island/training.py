"""A small training that a replica of one process and an island of several ranks do alike; run by torchrun.

``python -m tests.island.training OUT CASE [CASE ...]``: each case is JSON, a job of its own of the same coordinator
(``FTOPT_COORDINATOR``). Every rank has the whole batch, so that the mean of the ranks' gradients is its gradient.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ftopt
from ftopt.methods import Method
from tests.problems import seeded

METHODS: dict[str, Callable[[], Method]] = {
    "diloco": lambda: ftopt.DiLoCo(sync_every=4),
    "streaming": lambda: ftopt.StreamingDiLoCo(
        sync_every=6, fragments=ftopt.fragments.Balanced(n=3), delay=2, wait_for_result_s=60.0
    ),
    "streaming_mix": lambda: ftopt.StreamingDiLoCo(
        sync_every=6, fragments=ftopt.fragments.Balanced(n=2), mix=0.5, wait_for_result_s=60.0
    ),
    "localsgd": lambda: ftopt.LocalSGD(sync_every=3),
    "slowmo_moments": lambda: ftopt.SlowMo(sync_every=3, inner_state="average"),
    "slowmo": lambda: ftopt.SlowMo(sync_every=4),
    "syncsgd": lambda: ftopt.SyncSGD(clip_norm=0.5, verify_every=5),
    "paft": lambda: ftopt.PAFT(sync_every=4),
    "decoupled": lambda: ftopt.DecoupledDiLoCo(
        sync_every=6, fragments=ftopt.fragments.Balanced(n=2), delay=2, wait_for_result_s=60.0, adaptive_grace=0.0
    ),
    "buffers": lambda: ftopt.DiLoCo(sync_every=4, buffers="mean"),
    "loss": lambda: ftopt.LocalSGD(sync_every=6, trigger=ftopt.triggers.AdaComm(initial=3, most=6)),
    "ratio": lambda: ftopt.LocalSGD(sync_every=6, trigger=ftopt.triggers.PAFTRatio(initial=3, most=6)),
}
WHOLE = ("syncsgd", "paft", "slowmo_moments", "decoupled", "buffers")
"""Methods for which rank 0 of an island has all of each fragment."""


@dataclass(frozen=True)
class Case:
    """One job. ``layouts``: of each replica: plain, fsdp, hsdp, tp (with FSDP2), ddp. ``saved``: the folder of its
    checkpoints; "": none."""

    name: str
    method: str
    layouts: tuple[str, ...]
    inner: str = "adamw"
    codec: str = "fp32"
    dtype: str = "float32"
    steps: int = 14
    model: str = "mlp"
    calls: bool = False
    device: str = "cpu"
    saved: str = ""

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


WIDTHS = {"mlp": (12, 5), "wide": (512, 200), "uneven": (515, 77), "tied": (0, 0)}
"""Of the hidden layers: a slice is whole blocks of 16,384 elements."""


class Tied(nn.Module):
    """An embedding whose matrix is the last layer's, a frozen layer, and shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.one = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 3).long().clamp(max=6)
        out: Tensor = self.head(torch.tanh(self.frozen(self.embed(tokens)) * self.one)).mean(1)[:, :3]
        return out


def model_of(case: Case) -> nn.Module:
    """The whole model, the same on all ranks of all replicas."""
    with seeded():
        a, b = WIDTHS[case.model]
        model = Tied() if case.model == "tied" else nn.Sequential(
            nn.Linear(7, a), nn.Tanh(), nn.Linear(a, b), nn.Tanh(), nn.Linear(b, 3)
        )  # fmt: skip
    return model.to(case.device, getattr(torch, case.dtype))


def laid_out(model: nn.Module, layout: str) -> tuple[nn.Module, DeviceMesh | None]:
    """The module to call, and the island's mesh. The model's parameters become those of the layout."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain":
        return model, None
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model), None
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(
        device, (size,) if layout == "fsdp" else (2, size // 2), mesh_dim_names=("a", "b")[: 1 + (layout != "fsdp")]
    )
    shards = mesh
    if layout == "tp":
        parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        shards = mesh["a"]
    for module in model.children():
        if isinstance(module, nn.Linear | nn.Embedding) and not isinstance(model, Tied):
            fully_shard(module, mesh=shards)
    fully_shard(model, mesh=shards)
    return model, mesh


def muon(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


INNER: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "muon": muon,
}


def batch(case: Case, replica: int, step: int) -> tuple[Tensor, Tensor]:
    """A replica's batch of a step."""
    x = torch.randn(16, 7, generator=torch.Generator().manual_seed(1000 * replica + step))
    dtype = getattr(torch, case.dtype)
    return x.to(case.device, dtype), torch.sin(x[:, :3]).to(case.device, dtype)


def train(case: Case, replica: int, group: ftopt.ReplicaGroup, layout: str, mesh_of: Any = None) -> dict[str, Any]:
    """Trains; what came of it, with the whole final parameters."""
    model = model_of(case)
    called, mesh = laid_out(model, layout)
    group = group if mesh_of is None else mesh_of(mesh)
    inner = INNER[case.inner]([p for p in model.parameters() if p.requires_grad])
    optimizer = ftopt.wrap(inner, called, replace(METHODS[case.method](), codec=case.codec), group=group)
    if case.saved and mesh_of is not None:
        ftopt.Checkpoints(case.saved, optimizer, every=1_000)
    losses = []
    tokens = 60 // (dist.get_world_size() if dist.is_initialized() else 1)  # of all ranks: weights of Decoupled
    with optimizer:
        for step in range(case.steps):
            x, y = batch(case, replica, step)
            optimizer.zero_grad()
            loss = (called(x) - y).square().mean()
            loss.backward()
            optimizer.log(tokens=tokens, loss=loss.detach())
            optimizer.step()
            losses.append(float(loss.detach()))
            if case.calls and step == 5:
                with optimizer.global_parameters():
                    losses.append(float((called(x) - y).square().mean().detach()))
            if case.calls and step == 6:
                assert optimizer.sync()
            if case.calls and step == 9:
                model.get_parameter("0.weight").requires_grad_(False)
                assert optimizer.sync(propose=False)
        assert optimizer.sync()  # together: who leaves first depends on who is faster
    digest = optimizer.digest() if layout == "plain" or dist.get_rank() == 0 else ""
    return {
        "parameters": {name: whole(p).float().flatten().tolist() for name, p in model.named_parameters()},
        "versions": list(optimizer.status.versions),
        "local_steps": optimizer.local_steps,
        "pending": list(optimizer.status.pending_steps),
        "digest": digest,
        "losses": losses,
    }


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's whole tensor; collective."""
    full = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor.detach() if full is None else full().detach()
    return found


def main(arguments: Sequence[str]) -> None:
    """One rank of one replica, through all cases."""
    out, *lines = arguments
    name = os.environ["FTOPT_REPLICA"]
    replica, found = int(name[1:]), {}
    on_cards = any(json.loads(line)["device"] == "cuda" for line in lines)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cards else "gloo")
    for line in lines:
        case = Case(**json.loads(line))

        def connected(mesh: DeviceMesh | None, case: Case = case) -> ftopt.ReplicaGroup:
            policy = ftopt.FaultPolicy(
                start_replicas=len(case.layouts),
                grace_s=60.0,
                dead_after_s=60.0,
                stragglers="wait",
            )
            return ftopt.connect(job=case.name, policy=policy, mesh=mesh)

        found[case.name] = train(case, replica, None, case.layouts[replica], connected)  # type: ignore[arg-type]
        dist.barrier()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""An island, alone in its job, that is saved and resumed in another size; by torchrun.

``python -m tests.island.resuming FOLDER STEPS OUT METHOD``: trains up to the job's inner step ``STEPS``, from the
newest checkpoint in ``FOLDER`` if there is one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ftopt
from tests.island.training import METHODS, Case, batch, laid_out, model_of, whole

CASE = Case("resuming", "diloco", ("fsdp",), model="uneven")


def run(folder: Path, steps: int, group_of: object, layout: str, method: str) -> dict[str, object]:
    """Trains; the parameters at the end."""
    model: nn.Module = model_of(CASE)
    called, mesh = laid_out(model, layout)
    group: ftopt.ReplicaGroup = group_of(mesh)  # type: ignore[operator]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ftopt.wrap(inner, called, METHODS[method](), group=group)
    checkpoints = ftopt.Checkpoints(folder, optimizer, every=1)
    resumed = checkpoints.resume()
    with optimizer:
        checkpoints.include()
        start = optimizer.start_step + optimizer.pending_steps
        for step in range(start, steps):
            x, y = batch(CASE, 0, step)
            optimizer.zero_grad()
            (called(x) - y).square().mean().backward()
            optimizer.step()
            checkpoints.step()
            checkpoints._writer.wait(30.0)
        parameters = {name: whole(p).flatten().tolist() for name, p in model.named_parameters()}
        checkpoints.close()
    return {"parameters": parameters, "resumed": resumed, "start": start, "versions": list(optimizer.status.versions)}


def main(folder: Path, steps: int, out: Path, method: str) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    policy = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, stragglers="wait")
    several = dist.get_world_size() > 1
    found = run(
        folder, steps, lambda mesh: ftopt.connect(job=f"to-{steps}", policy=policy, mesh=mesh),
        "fsdp" if several else "plain", method,
    )  # fmt: skip
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])

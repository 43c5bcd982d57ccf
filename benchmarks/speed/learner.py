"""A replica of the benchmark of convergence, as a program: it trains all variants in turns and reports the loss over
time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import ftopt
from benchmarks.speed.convergence import ways
from benchmarks.speed.orders import obey
from benchmarks.training import PATIENT, Case, inner_steps, task_for, wrapped
from ftopt.events import Event


class Learner:
    """Trains a case, a part of its inner steps after the other.

    Args:
        case: what is trained.
        told: ``url``, ``replica`` and ``host``.
        job: its name.
    """

    def __init__(self, case: Case, told: dict[str, Any], job: str) -> None:
        self._task = task_for(case)
        self._case = case
        self._sent = 0
        self._seconds = 0.0
        self._seen: list[tuple[int, float, Tensor]] = []
        policy = replace(PATIENT, start_replicas=case.replicas)
        group = ftopt.connect(
            told["url"], told["replica"], job=job, policy=policy, host=told["host"], on_event=self._hear
        )
        self._optimizer = wrapped(case, self._task, group)
        self._steps = inner_steps(case, self._task, self._optimizer, told["replica"])

    def begin(self) -> None:
        """Waits for the others."""
        self._optimizer.__enter__()
        self._look(0)

    def train(self, part: int) -> float:
        """So many inner steps; the seconds of all so far."""
        began = time.perf_counter()
        for _ in range(part):
            step, _ = next(self._steps)
            if step % self._case.eval_every == 0:
                self._seconds += time.perf_counter() - began
                self._look(step)
                began = time.perf_counter()
        self._seconds += time.perf_counter() - began
        return self._seconds

    def end(self, *, evaluate: bool) -> dict[str, Any]:
        """The bytes sent, and points of (inner steps, seconds, held-out loss of the committed parameters)."""
        self._optimizer.sync()
        self._look(self._case.steps)
        return {"sent": self._sent, "curve": [self._loss(*point) for point in self._seen] if evaluate else []}

    def _look(self, step: int) -> None:
        """The committed parameters are kept, and evaluated when all is done."""
        with self._optimizer.global_parameters():
            parameters = nn.utils.parameters_to_vector(self._task.model.parameters()).detach()
        self._seen.append((step, self._seconds, parameters))

    @torch.no_grad()
    def _loss(self, step: int, at_s: float, parameters: Tensor) -> tuple[int, float, float]:
        nn.utils.vector_to_parameters(parameters, self._task.model.parameters())
        return step, at_s, self._task.score(thorough=False).loss

    def _hear(self, event: Event) -> None:
        if event.event == "prepare":
            self._sent = int(event.data["wire_bytes"])


def main() -> None:
    """Orders: ``train WAY STEPS`` and ``end WAY``; a way is named by its number."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    learners = [Learner(case, told, f"way-{i}") for i, case in enumerate(ways(*told["ways"]).values())]
    for learner in learners:
        learner.begin()

    def carry_out(verb: str, number: int, part: int = 0) -> Any:
        if verb == "train":
            return {"seconds": learners[number].train(part)}
        return learners[number].end(evaluate=told["replica"] == "r0")

    obey(carry_out)


if __name__ == "__main__":
    main()

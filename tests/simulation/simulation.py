"""A history in the making: the world, its processes, and the checks of all that they do."""

from __future__ import annotations

from tests.simulation.check import Checks
from tests.simulation.knobs import Knobs
from tests.simulation.replica import Groups, ReplicaProcess
from tests.simulation.second import SecondProcess
from tests.simulation.server import CoordinatorProcess
from tests.simulation.world import World


class Simulation(World):
    """A world with one coordinator, which is not started yet, and without replicas."""

    def __init__(self, seed: int, knobs: Knobs, *, trace: list[str] | None = None) -> None:
        super().__init__(seed, knobs, trace=trace)
        self.checks = Checks(self)
        self.servers.append(CoordinatorProcess(self, self.checks))
        self.processes: dict[str, ReplicaProcess] = {}
        self._groups: Groups = {}

    def add_process(self, name: str, *, initial: str, step_s: float) -> ReplicaProcess:
        """A further replica; it is not started yet."""
        process = ReplicaProcess(self, name, initial=initial, step_s=step_s, checks=self.checks, groups=self._groups)
        self.processes[name] = process
        return process

    def second(self, first: ReplicaProcess, *, stays_s: float, resumes: bool) -> None:
        """A second process under the id of ``first``, for a while; see `SecondProcess`."""
        SecondProcess(self, first, stays_s=stays_s, resumes=resumes)

    def rival(self) -> None:
        """A second coordinator is started on another host, without a journal, while the first one lives."""
        if self.contested or not self.server.up:
            return
        self.contested = True
        self.coverage["two coordinators at once"] += 1
        self.servers.append(CoordinatorProcess(self, self.checks))
        self.server.start()
        for process in self.processes.values():
            if process.alive and process.conn and self.chance(0.6):
                process.conn.cut()

"""Makes Ray Train's workers replicas of a job: the backend of ``TorchTrainer(torch_config=FtoptConfig())``."""

from __future__ import annotations

import datetime
import logging
import math
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2._internal.execution.worker_group import ReplicaGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ftopt.common.paths import user_path
from ftopt.errors import FtoptError, JobFailed, UserError, check_whole
from ftopt.ray.coordinator import CoordinatorActor, url_of

dist: Any = torch.distributed
_log = logging.getLogger("ray.train.ftopt")
"""A child of Ray's logger: shown wherever Ray Train's messages are."""
_MET_S = 60.0
"""Seconds for the ranks of an island to connect to each other after all have been there."""
_ASK_S = 0.2
_ANSWER_S = 60.0
"""A worker that does not answer for this long while another one is replaced is replaced, too."""


@dataclass
class FtoptConfig(TorchConfig):
    """Each worker of a ``TorchTrainer``, or each ``ranks`` of them, is a replica of one job.

    The training function calls `ftopt.connect()` and `ftopt.wrap` as under torchrun; it gets address and id. A worker
    that dies is restarted by itself, as often as ``FailureConfig(max_failures=)`` allows.

    Args:
        backend: of the ranks' process group, as in `TorchConfig`.
        init_method: not used.
        timeout_s: of the ranks' process group. Default 1800 s.
        ranks: the size of an island: the number of workers that share one model. ``torch.distributed`` is initialized
            for these. Default 1.
        journal: file of the coordinator's journal, on the driver's node. Default: ``ftopt.journal`` in the run's
            folder.
        port: the coordinator's port on the driver's node. Default 0: a free one, which it keeps.

    Raises:
        UserError: a setting cannot be used, or the former version of Ray Train is enabled.
    """

    ranks: int = 1
    journal: str | Path | None = None
    port: int = 0

    def __post_init__(self) -> None:
        ranks = check_whole("ranks", self.ranks, 1, of="workers", hint="use FtoptConfig(ranks=8)")
        port = check_whole("port", self.port, 0, of="the port's number", hint="use 0 for a free one")
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "port", port)
        if self.port > 65535:
            raise UserError(f"port={self.port}; must be at most 65535; use 0 for a free one")
        if not isinstance(self.journal, str | Path | None):
            raise UserError(f"journal={self.journal!r:.60}; must be a file, or None for one in the run's folder")

    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(_island, self)

    def to_dict(self) -> dict[str, Any]:
        journal = None if self.journal is None else str(self.journal)
        return {**super().to_dict(), "ranks": self.ranks, "journal": journal, "port": self.port}


class _Backend(Backend):
    """Lives in a run's controller: starts the coordinator, and gives workers its address and their ids."""

    has_replica_groups = True
    """Ray replaces a failed worker and leaves the others alone."""
    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._actor: Any = None
        self._settings: dict[str, str] = {}
        self._workers: Any = None
        self._ends_others = False

    def on_start(self, worker_group: Any, backend_config: FtoptConfig) -> None:
        """Called for all workers, or for one that Ray has restarted."""
        if isinstance(worker_group, ReplicaGroup):
            self._check_job()
            worker_group.execute(_tell, self._settings, self._actor, backend_config.ranks)
            return
        self._workers = worker_group
        try:
            _check(worker_group, backend_config.ranks)
            if self._actor is None:
                self._start(worker_group, backend_config)
            self._check_job()
            worker_group.execute(_tell, self._settings, self._actor, backend_config.ranks)
        except BaseException:
            worker_group.shutdown()  # else Ray (2.60) keeps its place in the cluster until the driver ends
            raise

    def on_shutdown(self, worker_group: Any, backend_config: FtoptConfig) -> None:
        """Called for all workers, or for one that has failed and is about to be replaced.

        In the second case the other ranks of its island end, too, and so does every worker that is already dead: Ray
        (2.60) queries all other workers before it replaces one, and a dead one among them would end the run.
        """
        if not isinstance(worker_group, ReplicaGroup) or self._ends_others:
            return
        self._ends_others = True
        try:
            groups, ranks = self._workers.get_replica_groups(), backend_config.ranks
            island = groups.index(worker_group) // ranks
            for number, other in enumerate(groups):
                if other.is_active() and other is not worker_group and (number // ranks == island or _is_dead(other)):
                    other.shutdown()
        finally:
            self._ends_others = False

    def _check_job(self) -> None:
        """Raises JobFailed, or FtoptError if the job has ended: restarted workers would be refused, as often as
        ``max_failures`` allows. An error here ends the run."""
        if told := ray.get(self._actor.job_ended.remote()):
            raise FtoptError(f"a worker was turned away: {told}")
        if why := ray.get(self._actor.job_failed.remote()):
            raise JobFailed(
                f"the job has failed, since {why}; start the program again, with the same name, to resume from its "
                "newest checkpoint, or use policy.on_loss=go_on, with which the others train on"
            )

    def _start(self, worker_group: Any, config: FtoptConfig) -> None:
        name, folder = worker_group.execute_single(0, _run)
        journal = config.journal if config.journal is not None else folder and Path(folder) / "ftopt.journal"
        if journal is None:
            _log.warning("the run's storage is no folder, so that the coordinator has no journal; give journal=FILE")
        host, token = ray.util.get_node_ip_address(), secrets.token_hex(32)
        port = config.port or _free_port(host)
        # On this node: its loss ends Ray Train's controller and the run in any case.
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": f"ftopt coordinator of {name} {uuid.uuid4().hex[:8]}", "scheduling_strategy": node}
        where = None if journal is None else str(user_path(journal).absolute())
        actor = CoordinatorActor.options(**options).remote(host, port, where, token, name, time.time())
        ray.get(actor.ready.remote())
        url = url_of(host, port)
        self._actor, self._settings = actor, {"FTOPT_COORDINATOR": url, "FTOPT_TOKEN": token}
        _log.info("coordinator at %s; `ftopt status %s` shows the job", url, url)


def _is_dead(worker: ReplicaGroup) -> bool:
    try:
        ray.get(worker.execute_async(_answer), timeout=_ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return True
    return False


def _answer() -> None:
    """Runs on a worker, in parallel with its training function; returning shows that the worker lives."""


def _check(worker_group: Any, ranks: int) -> None:
    if not hasattr(worker_group, "get_replica_groups"):
        raise UserError("FtoptConfig needs Ray Train's version 2; do not set RAY_TRAIN_V2_ENABLED, or set it to 1")
    workers = len(worker_group)
    if workers % ranks:
        raise UserError(
            f"ScalingConfig(num_workers={workers}) and FtoptConfig(ranks={ranks}): an island has {ranks} workers; "
            f"use a multiple of {ranks}"
        )
    run: Any = getattr(worker_group, "_train_run_context", None)
    if run is not None and run.run_config.failure_config.max_failures == 0:
        _log.warning(
            "RunConfig has no failure_config, or one with max_failures=0: the first worker that dies ends the run; use "
            "RunConfig(failure_config=FailureConfig(max_failures=-1))"
        )


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _run() -> tuple[str, str | None]:
    """Runs on a worker: returns the run's name, and its folder if that is in a local file system."""
    context = ray.train.get_context()
    storage = context.get_storage()
    local = storage.storage_filesystem.type_name == "local"
    return context.get_experiment_name(), storage.experiment_fs_path if local else None


_coordinator: Any = None
"""On a worker: the handle of the coordinator's actor."""


def _tell(settings: dict[str, str], actor: Any, ranks: int) -> None:
    """Runs on a worker: sets the variables that `ftopt.connect` and torch read."""
    global _coordinator
    _coordinator = actor
    world_rank = ray.train.get_context().get_world_rank()
    device = ray.train.torch.get_device()
    os.environ.update(
        settings,
        FTOPT_REPLICA=f"r{world_rank // ranks}",
        FTOPT_HOST=ray.util.get_node_ip_address(),
        RANK=str(world_rank % ranks),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(device.index or 0),
        ACCELERATE_TORCH_DEVICE=str(device),
    )


@contextmanager
def _island(config: FtoptConfig) -> Iterator[None]:
    """Runs on a worker, around the training function: sets up its ranks' process group."""
    if (device := ray.train.torch.get_device()).type == "cuda":
        torch.cuda.set_device(device)
    rank, name = int(os.environ["RANK"]), os.environ["FTOPT_REPLICA"]
    dist.init_process_group(
        config.backend,
        store=_meet(name, rank, config.ranks),
        rank=rank,
        world_size=config.ranks,
        timeout=datetime.timedelta(seconds=config.timeout_s),
    )
    yield
    dist.destroy_process_group()
    if rank == 0:
        _warn_if_unknown(name)


def _meet(island: str, rank: int, size: int) -> Any:
    """A store that the ranks of an island share, created anew whenever they restart."""
    if size == 1:
        return dist.HashStore()
    limit, life = datetime.timedelta(seconds=_MET_S), uuid.uuid4().hex
    store, address = None, None
    if rank == 0:
        host = os.environ["FTOPT_HOST"]
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        address = f"{host} {store.port}"
    told_at_s = time.monotonic() + _MET_S
    while True:
        if time.monotonic() > told_at_s:
            told_at_s = math.inf
            _log.warning("%s: rank %d of %d waits for the others of its island to be started", island, rank, size)
        try:
            if (found := ray.get(_coordinator.meet.remote(island, size, rank, life, address))) is not None:
                break
        except ray.exceptions.RayActorError:
            pass  # it is being restarted
        time.sleep(_ASK_S)
    if store is None:
        host, port = found.split()
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    return store


def _warn_if_unknown(replica: str) -> None:
    try:
        seen = ray.get(_coordinator.has_seen.remote(replica))
    except ray.exceptions.RayActorError:
        return
    if not seen:
        _log.warning(
            "the training function has ended, and %s has never been in a job: it has trained alone; call "
            "ftopt.connect() and ftopt.wrap(..., group=group) in it",
            replica,
        )

"""An island: a replica of several ranks, as `torchrun` starts them, and how they talk to each other.

To the job an island is one replica. Its rank 0 *leads*: it alone speaks with the coordinator and the other replicas.
The other ranks *follow*: in each call of the wrapped optimizer, which all ranks make, they do what rank 0 says.
"""

from __future__ import annotations

import atexit
import datetime
import os
import pickle
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftopt.errors import FtoptError, UserError, plain

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ftopt.sync.protocol.policy import FaultPolicy
    from ftopt.sync.replica.units import Units

_MESSAGE = 2048
"""Bytes of a message that go in one broadcast; a longer message takes a second broadcast."""
_LENGTH = 8
_PATIENCE = datetime.timedelta(days=365)
"""No limit in practice: followers wait while rank 0 waits for other replicas. A rank that dies closes its connections,
which ends the wait at once; the launcher ends the others."""
_parted: set[tuple[int, ...]] = set()
"""Islands of this process whose connections were closed."""


class RankLost(FtoptError):
    """Another rank is gone, or cannot go on."""


_islands: weakref.WeakSet[Island] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Ends Gloo's threads before Python ends. Such a thread may release a work's tensors, for which it needs the GIL,
    after `wait` has returned; if Python ends meanwhile, torch 2.13 aborts the finished process by SIGABRT."""
    for island in list(_islands):
        if island.broken is None:  # else a work may be under way, and this would wait for it
            island.part()


class Island:
    """The ranks of one replica. All calls are collective, except ``rank``, ``size``, `send` and `receive`.

    Args:
        ranks: their global ranks; the first one leads.

    Attributes:
        rank: this rank's place among them.
        size: the number of ranks.
        together: set when the island has joined its job: rank 0 does something, and all ranks get the result.
        broken: the error that ended a call halfway on this rank, so that the ranks may differ; None: none did.
    """

    together: Callable[[str, Callable[[], object]], Any] | None = None
    broken: BaseException | None = None

    def __init__(self, ranks: Sequence[int]) -> None:
        import torch.distributed as dist

        some = len(ranks) < dist.get_world_size()  # then the other ranks make no call
        if some and tuple(ranks) in _parted:  # torch would give the new group the former one's name
            raise FtoptError(
                f"ranks {list(ranks)} were a replica in this process before, and have left it at once; start them again"
            )
        # A group of its own: over TCP, whatever the model's ranks use, and patient enough to wait for other replicas.
        made = dist.new_group(
            list(ranks), timeout=_PATIENCE, backend="gloo", use_local_synchronization=some, group_desc="ftopt island"
        )
        self._ranks = tuple(ranks)
        self._group: ProcessGroup | None = made
        self._dist: Any = dist
        self.rank, self.size = dist.get_rank(made), len(ranks)
        self._row = torch.zeros(_MESSAGE, dtype=torch.uint8)
        _islands.add(self)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around what all ranks do, or none. After an error inside, also Ctrl-C, the island is broken: nothing shows
        whether all ranks or only some have taken the step."""
        try:
            yield
        except BaseException as error:
            self.broken = self.broken or error
            raise

    def part(self) -> None:
        """This rank leaves the others; their next call, or the one they wait in, raises FtoptError."""
        self.broken = self.broken or FtoptError("this rank has left the job at once")
        group, self._group = self._group, None
        if group is not None and self._dist.is_initialized():
            _parted.add(self._ranks)
            self._dist.destroy_process_group(group)
        # With the last reference the connections are closed, and Gloo's threads end.

    def check(self) -> None:
        """Raises FtoptError if this rank has left the others."""
        if self._group is None:
            raise FtoptError(
                f"rank {self.rank} of {self.size}: an earlier call of the optimizer ended in its middle, on this rank "
                f"or on rank 0 ({type(self.broken).__name__}: {plain(self.broken)}), and the ranks of this replica "
                "need not be alike any more; start it again, as torchrun --max-restarts does; an error after which the "
                "loop shall go on must not leave the closure"
            ) from self.broken

    def _do(self, call: Callable[..., object], *arguments: object, **more: object) -> None:
        self.check()
        try:
            call(*arguments, group=self._group, **more)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the group: see `part`
            if not isinstance(error, RuntimeError | ValueError):
                raise
            self.broken = self.broken or error
            raise RankLost(
                f"rank {self.rank} of {self.size}: another rank of this replica is gone, or torch.distributed was shut "
                f"down before optimizer.close() ({plain(error)}); a replica is whole or not at all: start it again, as "
                "torchrun --max-restarts does"
            ) from error

    def say(self, what: object) -> None:
        """Rank 0: sends ``what`` to all others. Raises FtoptError if a rank is gone, as all calls do."""
        data = pickle.dumps(what)
        row, length = self._row, len(data)
        row[:_LENGTH] = torch.frombuffer(bytearray(length.to_bytes(_LENGTH, "little")), dtype=torch.uint8)
        body, fits = torch.frombuffer(bytearray(data), dtype=torch.uint8), length <= _MESSAGE - _LENGTH
        if fits:
            row[_LENGTH : _LENGTH + length] = body
        self._do(self._dist.broadcast, row, group_src=0)
        if not fits:
            self._do(self._dist.broadcast, body, group_src=0)

    def hear(self) -> Any:
        """The other ranks: returns what rank 0 says. Raises FtoptError if a rank is gone."""
        row = self._row
        self._do(self._dist.broadcast, row, group_src=0)
        length = int.from_bytes(row[:_LENGTH].numpy().tobytes(), "little")
        body = row[_LENGTH : _LENGTH + length]
        if length > _MESSAGE - _LENGTH:
            body = torch.empty(length, dtype=torch.uint8)
            self._do(self._dist.broadcast, body, group_src=0)
        return pickle.loads(body.numpy().tobytes())

    def share(self, what: object) -> Any:
        """Returns rank 0's value on all ranks."""
        if not self.leads:
            return self.hear()
        self.say(what)
        return what

    def gather(self, what: object) -> list[Any]:
        """Returns all ranks' values on rank 0; [] on the others."""
        found: list[Any] | None = [None] * self.size if self.leads else None
        self._do(self._dist.gather_object, what, found, group_dst=0)
        return found or []

    def share_units(self, units: Units | None) -> RankUnits:
        """Shares rank 0's ``units`` with all ranks."""
        return RankUnits(self, units)

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> None:
        """All to all: the parts for each rank, concatenated in rank order; uint8, on the CPU."""
        self._do(self._dist.all_to_all_single, received, sent, list(received_sizes), list(sent_sizes))

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends a contiguous tensor on the CPU, unless it is empty."""
        if tensor.numel():
            self._do(self._dist.send, tensor, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receives into a contiguous tensor on the CPU, unless it is empty."""
        if tensor.numel():
            self._do(self._dist.recv, tensor, group_src=rank)


class RankUnits:
    """The units of an island's loader, a `UnitSource`: rank 0 takes them, and all ranks load their share of each.

    Args:
        units: the replica's units; None on ranks other than 0.
    """

    def __init__(self, island: Island, units: Units | None) -> None:
        self._island, self._units = island, units
        self.ended = False

    def take(self, timeout_s: float | None = None) -> int | None:
        """See `Units.take`."""

        def take() -> tuple[int | None, bool]:
            assert self._units is not None
            return self._units.take(timeout_s), self._units.ended

        found: tuple[int | None, bool] = self._together(take)
        unit, self.ended = found
        return unit

    def draw(self, unit: int) -> bool:
        """See `UnitQueue.draw`."""

        def draw() -> bool:
            assert self._units is not None
            return self._units.draw(unit)

        return bool(self._together(draw))

    def _together(self, act: Callable[[], object]) -> Any:
        if self._island.together is None:
            raise UserError(
                "a unit was asked for before this replica has joined its job, which hands the units out; put the "
                "training loop inside `with optimizer:`"
            )
        return self._island.together("the loader's next batch", act)


@dataclass(frozen=True)
class Shards:
    """What a group provides to a rank of an island.

    Args:
        host: this machine's address, as peers reach it.
        transport: connects this rank's lanes; see `ftopt.transport.gloo.GlooTransport`.
        fail: ends rank 0's membership with an error. Any thread.
    """

    host: str
    transport: Any
    fail: Callable[[FtoptError], None] = lambda error: None


class Follower:
    """The group of a rank other than 0, whose membership in the job is its island's.

    Attributes:
        replica: the island's id.
        island: its ranks.
        policy: rank 0's settings.
        standby: whether the island is a spare.
        shards: what this rank uses for its slices.
    """

    units = None
    global_batch = None
    joins: Callable[[], object] | None = None

    def __init__(
        self, replica: str, island: Island, policy: FaultPolicy, shards: Shards, *, standby: bool = False
    ) -> None:
        self.replica, self.island, self.policy, self.shards = replica, island, policy, shards
        self.standby = standby

    @property
    def incarnation(self) -> int:
        """0 before the island has joined its job."""
        return int(self.island.together is not None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FtoptError(
            f"rank {self.island.rank} of replica {self.replica} asked its group for {name!r}, which rank 0 alone has"
        )


def ranks_of(mesh: DeviceMesh | ProcessGroup | bool | None) -> list[int] | None:
    """The global ranks of this process' island; None: this process is the replica.

    Raises:
        UserError: ``mesh`` has another type, or leaves open whether this process is one rank of several.
    """
    dist: Any = sys.modules.get("torch.distributed")
    initialized = dist is not None and dist.is_available() and dist.is_initialized()
    if mesh is False:
        return None
    if mesh is None:
        if initialized:
            return list(range(dist.get_world_size())) if dist.get_world_size() > 1 else None
        _check_not_one_of_several()
        return None
    if not initialized:
        raise UserError(
            f"mesh={mesh!r:.60} and no process group; call torch.distributed.init_process_group() before "
            "ftopt.connect(), or leave mesh out for a replica of one process"
        )
    if isinstance(mesh, dist.ProcessGroup):
        found = dist.get_process_group_ranks(mesh)
    elif (inside := getattr(mesh, "mesh", None)) is not None and hasattr(mesh, "get_local_rank"):
        found = [int(rank) for rank in inside.flatten().tolist()]
    else:
        raise UserError(
            f"mesh={mesh!r:.60}; must be the DeviceMesh or the process group of this island's ranks, None for all "
            "ranks of torch.distributed, or False for a replica of this process alone"
        )
    if dist.get_rank() not in found:
        raise UserError(f"mesh={mesh!r:.60} is of other ranks; give the one that this process is in")
    return found if len(found) > 1 else None


def _check_not_one_of_several() -> None:
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        raise UserError(
            f"this process is rank {rank} of {size} (RANK, WORLD_SIZE), and torch.distributed is not initialized: if "
            "the ranks share one model (DDP, FSDP, tensor parallel), call torch.distributed.init_process_group() "
            "before ftopt.connect(), and they are one replica; if each is a replica of its own, give it an id of its "
            "own and say ftopt.connect(..., mesh=False)"
        )

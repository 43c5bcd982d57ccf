"""Creates a replica's group: `connect` over the network, `solo` alone, `local_groups` several in one process."""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit

from ftopt.errors import UserError, check_bool, check_number, check_whole, names_arguments
from ftopt.events import Event, OnEvent, Subscribers, attend, ignore, only_copies
from ftopt.net.interfaces import address_of, host_in, interface_of
from ftopt.net.tls import Tls, find_tls, is_public
from ftopt.net.token import find_token
from ftopt.sync.protocol.limits import wrong_name
from ftopt.sync.protocol.policy import FaultPolicy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ftopt.sync.group import ReplicaGroup

_log = logging.getLogger(__name__)


@names_arguments("ftopt.connect(url, policy=ftopt.FaultPolicy(start_replicas=4))")
def connect(
    url: str | None = None,
    replica: str | None = None,
    *,
    job: str | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    key: str | Path | None = None,
    policy: FaultPolicy | None = None,
    host: str | None = None,
    interface: str | None = None,
    on_event: OnEvent | Sequence[OnEvent] | None = None,
    connect_s: float = 10.0,
    mesh: DeviceMesh | ProcessGroup | bool | None = None,
    standby: bool = False,
) -> ReplicaGroup:
    """This replica's membership in a job. The connection is opened when the wrapped optimizer starts, which raises its
    errors: `ftopt.errors.Unreachable`, `ftopt.errors.Refused`.

    Args:
        url: the coordinator, ``http://host:port``, or ``https://`` if it has a certificate. Default:
            ``FTOPT_COORDINATOR``.
        replica: this replica's id, unique in the job, and the same when it is started again. Default:
            ``FTOPT_REPLICA``, else from the index of a SLURM array (``SLURM_ARRAY_TASK_ID``) or of a Kubernetes Job
            (``JOB_COMPLETION_INDEX``), else host name and process id, which a restart changes.
        job: the job's name. Default: ``FTOPT_JOB``, else ``default``.
        token: the job's token. Default: ``FTOPT_TOKEN``, else none.
        ca: file of the only certificates to trust. Default: ``FTOPT_CA``, else the system's.
        cert: this replica's certificate; with it, its state is served to peers over TLS. It must name ``host``.
            Default: ``FTOPT_CERT``, else none.
        key: the certificate's key. Default: ``FTOPT_KEY``.
        policy: settings of the outer-sync layer; the first replica of a job defines them. Default: ``FaultPolicy()``.
        host: this machine's address as peers reach it. Default: ``FTOPT_HOST``, else the one that reaches the
            coordinator.
        interface: name of the network interface whose address is ``host``, as in ``"eth1"``: payloads and states use
            it, while control goes to ``url``. Peers must reach that address. Give it or ``host``. Default:
            ``FTOPT_INTERFACE``, else ``host``.
        on_event: called with each event, on several threads, which wait for it: it must return at once. If it never
            returns, this replica hangs. `ftopt.Wandb`, `ftopt.TensorBoard`, a function of your own, or a list of them.
            With a function of your own the log does not report the events ``hold`` (what this replica waits for),
            ``reset`` and ``fetch_failed``: tell your user. Default: none, and the log reports them.
        connect_s: seconds to wait for a coordinator that does not answer. Default 10.
        mesh: the ranks that together are this replica, with one model between them (DDP, FSDP2, tensor parallel): their
            `DeviceMesh` or process group. Each of them calls this; rank 0's arguments count. Default None: all ranks of
            ``torch.distributed`` if it is initialized, else this process. False: only this process.
        standby: join as a spare: the optimizer's start, or ``with optimizer:``, waits with the job's newest state at
            hand, and returns when a replica is lost, whose place this one then takes. If the job ends first, it raises
            `ftopt.errors.JobOver`, a ``SystemExit`` of status 0. Default False.

    Raises:
        UserError: the address is missing or invalid; a name, the token, the interface, or a TLS file cannot be used;
            this process is one rank of several, and ``mesh`` does not say of which.
    """
    # Imported here: `import ftopt` must import neither torch nor aiohttp.
    from ftopt.sync.island import Follower, Island, Shards, ranks_of
    from ftopt.sync.replica.client import Client
    from ftopt.sync.replica.loop import LoopThread
    from ftopt.sync.replica.session import Session
    from ftopt.sync.replica.websocket import WebSocketLink
    from ftopt.transport.gloo import GlooTransport
    from ftopt.transport.state_transfer import HttpState

    ranks = ranks_of(mesh)
    url = str(url or os.environ.get("FTOPT_COORDINATOR") or "").rstrip("/")
    if not url:
        raise UserError(
            "no coordinator: start the script with `ftopt launch -n 3 SCRIPT`, train alone with ftopt.solo(), or give "
            "url=, or set FTOPT_COORDINATOR, to the address that `ftopt coordinator` prints"
        )
    if not (address := host_in(url)):
        raise UserError(
            f"coordinator {url!r}; must be http://HOST:PORT or https://HOST:PORT; give url=, or set FTOPT_COORDINATOR, "
            "to the address that `ftopt coordinator` prints"
        )
    parts = urlsplit(url)
    replica = replica or os.environ.get("FTOPT_REPLICA") or _id_of(os.environ)
    job = job or os.environ.get("FTOPT_JOB") or "default"
    for what, name in (("replica", replica), ("job", job)):
        _check_name(what, name)
    _check_policy(policy)
    on_event = _one_on_event(on_event)
    connect_s = check_number("connect_s", connect_s, "[0, inf)", of="seconds")
    if host is not None and not isinstance(host, str):
        raise UserError(f"host={host!r:.60}; must be this machine's name or address, or None")
    standby = check_bool("standby", standby, "True joins as a spare")
    if interface is not None and not isinstance(interface, str):
        raise UserError(f"interface={interface!r:.60}; must be the name of a network interface, as 'eth1', or None")
    island = Island(ranks) if ranks is not None else None
    if island is not None and not island.leads:
        replica, policy = island.hear()
        host = _chosen_address(host, interface) or _own_address(address, parts.port or 80)
        shards = Shards(host, GlooTransport(host, policy.dead_after_s))
        return cast("ReplicaGroup", Follower(replica, island, policy, shards, standby=standby))
    token = find_token(token)
    tls = find_tls(cert, key, ca)
    policy = policy or FaultPolicy()
    host = _chosen_address(host, interface) or _own_address(address, parts.port or 80)
    context = tls.client() if parts.scheme == "https" else None
    if context is not None and is_public(host):
        _warn_of_open_payloads(host, tls)
    way = f"{host} ({interface_of(host) or 'the interface is unknown'})"
    _log.info("replica %s: payloads and states go by %s", replica, way)
    if on_event is ignore:
        on_event = _Log(way, job)
    elif only_copies(on_event):
        on_event = Subscribers([_Log(way, job), on_event])
    attend(on_event, job, replica)
    transport = GlooTransport(host, policy.dead_after_s)
    session = Session(
        replica,
        job,
        policy,
        link=WebSocketLink(url, token=token, dead_after_s=policy.dead_after_s, tls=context),
        transport=transport,
        state=HttpState(host, token, tls),
        network=LoopThread(),
        on_event=on_event,
        connect_s=connect_s,
        standby=standby,
    )
    client = Client(session)
    if island is not None:
        island.say((replica, policy))
        client.island = island
        client.shards = Shards(host, transport, lambda error: session.fail("another rank of this island", error))
    return client


@names_arguments("ftopt.solo()")
def solo(*, on_event: OnEvent | Sequence[OnEvent] | None = None) -> ReplicaGroup:
    """A group of one: every method runs, nothing is sent."""
    return local_groups(1, on_event=on_event)[0]


def from_environment(policy: FaultPolicy | None, on_event: OnEvent | Sequence[OnEvent] | None) -> ReplicaGroup:
    """The job of ``FTOPT_COORDINATOR``; without, a group of one, and the log says so."""
    if os.environ.get("FTOPT_COORDINATOR"):
        return connect(policy=policy, on_event=on_event)
    _check_policy(policy)
    _log.warning(
        "FTOPT_COORDINATOR is not set: this process trains alone; `ftopt launch -n 4 SCRIPT` starts 4 replicas of a "
        "script"
    )
    return solo(on_event=on_event)


@names_arguments("ftopt.local_groups(2, policy=ftopt.FaultPolicy())")
def local_groups(
    n: int,
    *,
    policy: FaultPolicy | None = None,
    on_event: OnEvent | Sequence[OnEvent] | None = None,
    names: Sequence[str] | None = None,
) -> list[ReplicaGroup]:
    """``n`` groups of one job in this process, for ``n`` threads, as in tests and notebooks.

    Payloads are summed in rank order, so that results are bit-equal to a plain loop over the replicas, as long as no
    round goes on without a replica (``policy=FaultPolicy(stragglers="wait", grace_s=60)``).

    Args:
        n: number of replicas.
        policy: settings; ``start_replicas`` is ``n`` unless given.
        on_event: called with each event; it must return at once (see `connect`).
        names: the replicas' ids, default ``r0 .. r{n-1}``. A repeated name is that replica's next incarnation.
    """
    n = check_whole("n", n, 1, of="replicas", hint="use ftopt.local_groups(2)")
    on_event = _one_on_event(on_event)
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise UserError(f"names={names!r:.60}; must be a list of {n} names, one for each group")
    names = [f"r{i}" for i in range(n)] if names is None else list(names)
    if len(names) != n:
        raise UserError(f"names={names!r}; must be {n} names, one for each group")
    for name in names:
        _check_name("replica", name)
    _check_policy(policy)
    from ftopt.sync.local import LocalHub, LocalLink, LocalState
    from ftopt.sync.replica.client import Client
    from ftopt.sync.replica.loop import LoopThread
    from ftopt.sync.replica.session import Session
    from ftopt.transport.local import LocalTransport

    policy = policy or FaultPolicy()
    if policy.start_replicas is None:
        policy = replace(policy, start_replicas=n)
    hub, network = LocalHub("local", on_event, names), LoopThread()
    transport = LocalTransport(policy.dead_after_s)

    for name in names:
        attend(on_event, "local", name)

    def group(number: int, name: str) -> ReplicaGroup:
        link, state = LocalLink(hub), LocalState(hub, f"{name} of group {number}")
        return Client(
            Session(
                name, "local", policy, link=link, transport=transport, state=state, network=network, on_event=on_event
            )
        )

    return [group(number, name) for number, name in enumerate(names)]


def _id_of(environment: Mapping[str, str]) -> str:
    """A replica's id that survives its restart, where a scheduler gives it a number."""
    for name in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"):
        if number := environment.get(name):
            several = name.startswith("SLURM") and environment.get("SLURM_NTASKS", "1") != "1"
            return f"r{number}-{environment.get('SLURM_PROCID', '0')}" if several else f"r{number}"
    return f"{socket.gethostname()}-{os.getpid()}"


def _check_name(what: str, name: object) -> None:
    if wrong := wrong_name(name) if isinstance(name, str) else "it is no string":
        raise UserError(f"{what} {name!r:.60}: {wrong}; give it a short name")


def _one_on_event(on_event: OnEvent | Sequence[OnEvent] | None) -> OnEvent:
    if on_event is None:
        return ignore
    several = isinstance(on_event, list | tuple)
    for each in on_event if isinstance(on_event, list | tuple) else [on_event]:
        if isinstance(each, type):
            raise UserError(f"on_event={each.__name__}, a class; give an object: {each.__name__}(...)")
        if not callable(each):
            raise UserError(
                f"on_event={on_event!r:.60}; must be a function of an Event, a list of such functions, or None"
            )
    if not several:
        return cast(OnEvent, on_event)
    return Subscribers(cast("Sequence[OnEvent]", on_event)) if on_event else ignore


def _check_policy(policy: object) -> None:
    if not isinstance(policy, FaultPolicy | None):
        raise UserError(f"policy={policy!r:.60}; must be settings of ftopt; use ftopt.FaultPolicy(start_replicas=3)")


_TOLD = {
    "hold": "",
    "reset": "starts again from the job's state: ",
    "fetch_failed": "fetching the committed state failed: ",
}
"""Event -> prefix of the event's own text in the log."""


_TRANSFERS = {"prepare": "payloads", "fetched": "a fetched state"}
_LEAST_BYTES, _CHANGED = 1 << 20, 2.0
"""Smaller transfers say nothing about the network; a rate that has changed by less than this factor is not logged."""


class _Log:
    """Used without an ``on_event`` that informs the user: logs what a user must know, without repeats in a row.

    Args:
        way: this replica's address and interface.
        job: named in each line while this process also takes part in another job.
    """

    every_step = False
    _last = ""
    _all: ClassVar[weakref.WeakSet[_Log]] = weakref.WeakSet()

    def __init__(self, way: str, job: str = "default") -> None:
        self._way, self._job = way, job
        self._rates: dict[str, float] = {}
        self._all.add(self)

    def _named(self, replica: str | None) -> str:
        several = any(log._job != self._job for log in list(self._all))
        return f"{self._job}/{replica}" if several else str(replica)

    def __call__(self, event: Event) -> None:
        if event.event in _TOLD:
            text = str(event.data.get("text") or event.data.get("reason") or "")
            if text != self._last:
                self._last = text
                _log.warning("%s: %s%s", self._named(event.replica), _TOLD[event.event], text)
        elif event.event in _TRANSFERS:
            self._tell_rate(event.replica, _TRANSFERS[event.event], event.data)

    def _tell_rate(self, replica: str | None, what: str, data: Mapping[str, Any]) -> None:
        sent, seconds = data.get("bytes", 0), data.get("seconds", 0.0)
        if sent < _LEAST_BYTES or seconds <= 0:
            return
        rate, before = sent / seconds, self._rates.get(what)
        if before is None or not 1 / _CHANGED < rate / before < _CHANGED:
            self._rates[what] = rate
            _log.info(
                "replica %s: %s: %.1f MB in %.2f s, %.1f MB/s, by %s",
                self._named(replica), what, sent / 1e6, seconds, rate / 1e6, self._way,
            )  # fmt: skip


@cache
def _warn_of_open_payloads(host: str, tls: Tls) -> None:
    """Warns once per process: TLS for control suggests that the network is not trusted, and Gloo has no TLS."""
    state = "" if tls.cert else ", and so does the model's state that newcomers fetch (no cert= is given)"
    _log.warning(
        "the coordinator is reached over TLS, but payloads leave the public address %s in the clear%s: Gloo in torch's "
        "wheels has no TLS; put the replicas on a private network or a tunnel (WireGuard), and give host= its address",
        host,
        state,
    )


def _chosen_address(host: str | None, interface: str | None) -> str | None:
    """The address from the arguments, else from the environment, else None. UserError: it is given twice, or
    invalid."""
    if host is None and interface is None:
        host, interface = os.environ.get("FTOPT_HOST") or None, os.environ.get("FTOPT_INTERFACE") or None
        names = "FTOPT_HOST", "FTOPT_INTERFACE"
    else:
        names = "host", "interface"
    if host is not None and interface is not None:
        raise UserError(f"{names[0]}={host!r:.60} and {names[1]}={interface!r:.60}; give one of them")
    return address_of(interface) if interface is not None else host


def _own_address(host: str, port: int) -> str:
    """The address of the interface that reaches ``host``; nothing is sent."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"coordinator host {host!r}: {error.strerror or error}; check the address") from None

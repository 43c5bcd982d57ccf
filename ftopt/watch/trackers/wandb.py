"""`Wandb`: a replica's metrics in Weights & Biases. Only this file imports wandb, in a process of its own."""

from __future__ import annotations

import json
import netrc
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ftopt.common.paths import user_path
from ftopt.errors import UserError, check_choice, lacking, names_arguments
from ftopt.watch.trackers.mirror import Mirror
from ftopt.watch.trackers.mirror_process import Sink

MODES = ("auto", "online", "offline")
_FLUSH_S = 1.0
"""wandb's own 15 s would save nothing of a node that dies earlier."""
_INIT_S = 60.0
_TABLE_EVERY_S, _MOST_ROWS = 60.0, 1000
_ALERT_AGAIN_S = 3600
_ID = 128
"""Maximum characters of an id."""


def of_recipe(mode: str) -> tuple[str, str]:
    """The mode for a recipe's ``log.wandb``, and a sentence if ``auto`` has turned wandb off without the user's will.

    ``auto`` is `resolve`'s, but ``off`` where there is no key or wandb is not installed: a recipe has ``auto`` by
    default, which asks for nothing.
    """
    found = resolve(mode, keyless="off")
    if mode != "auto" or os.environ.get("WANDB_MODE") == "disabled":
        return found, ""
    if find_spec("wandb") is None:
        return "off", "wandb is off, since it is not installed: pip install 'ftopt[wandb]'"
    if found == "off":
        return "off", "wandb is off, since this machine has no key; to turn it on: wandb login"
    return found, ""


def resolve(mode: str, *, keyless: str = "offline") -> str:
    """``auto`` as ``WANDB_MODE`` says, else ``online`` with a key or ``keyless`` without. Others are unchanged."""
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted in ("online", "offline"):
        return wanted
    if wanted == "disabled":
        return "off"
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        return "online" if netrc.netrc().authenticators("api.wandb.ai") is not None else keyless
    except (OSError, netrc.NetrcParseError):
        return keyless


def run_id(job: str, replica: str) -> str:
    """The id of a replica's wandb run, the same for each of its incarnations."""
    name = f"{job}-{replica}"
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_ID]
    return plain if plain == name else f"{plain[: _ID - 9]}-{sha256(name.encode()).hexdigest()[:8]}"


class Wandb(Mirror):
    """Copies metrics to wandb: an ``on_event`` of `ftopt.connect`. One run per replica, grouped by job.

    wandb runs in a process of its own: training never waits for it, and does not notice when it fails. A restarted
    replica continues its run.

    With ``run=`` it adds to a run that you have begun, in this process: each point goes with your next ``run.log``, so
    that your steps stay as they are. Log to it yourself at least as often as ``every``; of several points between two
    of your logs, the last one stands.

    Args:
        run: what ``wandb.init()`` has returned, for one replica. Allows only ``every`` as another argument, since the
            run has the others. Call ``close()`` after the loop, and then ``run.finish()``; else the last points are
            missing. Default: a run of its own.
        project: wandb's project. Default: ``WANDB_PROJECT``, else ``ftopt``.
        config: the run's settings; values that JSON does not have become text.
        mode: ``online``, ``offline`` (`wandb sync` uploads it later), or ``auto``: online with a key, else offline.
            ``WANDB_MODE`` decides ``auto``; if it is ``disabled``, nothing is done.
        dir: the folder in which its files go to ``wandb``. Default: ``WANDB_DIR``, else the working directory.
        id: the run's id. Default: made from job and replica, so that later incarnations continue it. Give it, or
            another job name, if you train again under the same names.
        group: the runs' group. Default: ``WANDB_RUN_GROUP``, else the job.
        every: inner steps between two points of the inner metrics. Default 10.
        settings: of ``wandb.Settings``, in addition to ftopt's, such as ``{"entity": "my-team", "run_tags": ["a"]}``.

    Raises:
        UserError: an argument is wrong, or wandb is not installed.
    """

    kind = "wandb"
    sink = "ftopt.watch.trackers.wandb:WandbSink"

    @names_arguments('ftopt.Wandb(project="my-project")')
    def __init__(
        self,
        *,
        run: Any = None,
        project: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: str = "auto",
        dir: str | Path | None = None,
        id: str | None = None,
        group: str | None = None,
        every: int = 10,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._run = run
        if run is not None:
            given: dict[str, object] = {"project": project, "config": config, "dir": dir, "id": id, "group": group}
            given |= {"settings": settings, "mode": mode != "auto"}
            _check_run(run, [what for what, value in given.items() if value])
        check_choice("mode", mode, MODES, "use offline to upload later")
        for what, text in {"project": project, "id": id, "group": group}.items():
            if text is not None and not (isinstance(text, str) and 0 < len(text) <= 128):
                raise UserError(f"{what}={text!r:.60}; must be a string of 1 to 128 characters, or None")
        if id is not None and (len(id) > 128 or re.search(r"[/\\#?%:]", id)):
            raise UserError(f"id={id!r:.60}; must have at most 128 characters, none of them / \\ # ? % :")
        if find_spec("wandb") is None:
            raise UserError(lacking("wandb", "ftopt.Wandb", "wandb"))
        folder = user_path(dir or os.environ.get("WANDB_DIR") or ".").absolute()
        self._off = resolve(mode) == "off" and run is None
        options = {
            "project": project or os.environ.get("WANDB_PROJECT") or "ftopt",
            "config": _plain("config", config),
            "mode": resolve(mode),
            "dir": str(folder),
            "id": id,
            "group": group or os.environ.get("WANDB_RUN_GROUP"),
            "settings": _plain("settings", settings),
        }
        super().__init__(options, every=every)

    def attend(self, job: str, replica: str) -> None:
        if self._run is not None and self._runs and replica not in self._runs:
            raise UserError(
                f"this ftopt.Wandb(run=) has {', '.join(self._runs)} already, and cannot have {replica}, too: a run of "
                "your own is one replica's; make another one, or leave run= out: each replica then has a run of its own"
            )
        if not self._off:
            super().attend(job, replica)

    def here(self, options: Mapping[str, Any]) -> Sink | None:
        return None if self._run is None else _OwnRun(self._run, options)


def _check_run(run: Any, others: Sequence[str]) -> None:
    if not all(callable(getattr(run, name, None)) for name in ("log", "define_metric", "alert")):
        raise UserError(f"run={run!r:.60}; must be what wandb.init() has returned")
    if others:
        raise UserError(f"run= and {others[0]}=: the run that you have begun has that already; leave {others[0]}= out")


def _plain(what: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """``values`` as JSON values; others as text."""
    if values is None:
        return {}
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise UserError(f"{what}={values!r:.60}; must be a mapping of names to values; of an argparse result vars(...)")
    try:
        return dict(json.loads(json.dumps(dict(values), default=str)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{what}: {error}; give plain values: numbers, strings, lists and mappings") from None


class _Curves:
    """Writes to a run. ``commit``: whether a point is a row of its own; False: it goes with the next one that is."""

    def __init__(self, run: Any, table: Callable[..., Any], replica: str, *, commit: bool) -> None:
        self._run, self._table, self._replica, self._commit = run, table, replica, commit
        self._defined: set[str] = set()
        self._rows: list[list[Any]] = []
        self._table_s, self._news = -_TABLE_EVERY_S, False

    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        for name in values:
            if name not in self._defined:
                self._defined.add(name)
                self._run.define_metric(name, step_metric=axis)
        self._run.log({axis: at, **values}, commit=self._commit)
        self._show()

    def row(self, row: Mapping[str, Any]) -> None:
        names = ("inner_step", "incarnation", "event", "text")
        self._rows = [*self._rows, [time.strftime("%Y-%m-%d %H:%M:%S"), *(row[name] for name in names)]][-_MOST_ROWS:]
        self._news = True
        if row["alert"]:
            level = row["alert"].upper()
            title = f"{self._replica}: {row['event']}"
            self._run.alert(title, row["text"], level=level, wait_duration=_ALERT_AGAIN_S)
        self._show()

    def _show(self, *, at_once: bool = False) -> None:
        """Logs the table of events, if there is news and the last table is a minute old."""
        if not self._news or (not at_once and time.monotonic() < self._table_s + _TABLE_EVERY_S):
            return
        self._news, self._table_s = False, time.monotonic()
        columns: list[str | int] = ["time", "inner_step", "life", "event", "text"]
        self._run.log({"events": self._table(columns=columns, data=self._rows)}, commit=self._commit)

    def close(self, *, killed: bool) -> None:
        self._show(at_once=True)


class _OwnRun(_Curves):
    """Adds to a run of the user's, in this process. If user code ends it first, the log says that the rest is lost."""

    file: Path | None = None

    def __init__(self, run: Any, options: Mapping[str, Any]) -> None:
        import wandb

        super().__init__(run, wandb.Table, options["replica"], commit=False)
        about = {"ftopt_job": options["job"], "ftopt_replica": options["replica"]}
        run.config.update(about, allow_val_change=True)


class WandbSink(_Curves):
    """Writes to wandb, in the other process."""

    def __init__(self, options: Mapping[str, Any], say: Callable[..., None]) -> None:
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        self._wandb, self._say, self._options = wandb, say, options
        self._id = options["id"] or run_id(options["job"], options["replica"])
        before = list(Path(options["dir"]).glob(f"wandb/*run-*-{self._id}"))
        super().__init__(self._init(), wandb.Table, options["replica"], commit=True)
        records = getattr(self._run.settings, "sync_file", None)
        self.file = Path(records).resolve() if records else None
        if self.file is not None and not self.file.is_relative_to(Path(options["dir"]).resolve()):
            say(f"the folder {options['dir']} cannot be written; its files are in {self.file.parent}")
        if options["life"] == 1 and (before or self._run.resumed):
            say(
                f"there was a run {self._id} already, which these curves continue, as is right after a resume; a new "
                "job of the same name has it too: for curves of its own, give it another name, or id="
            )

    def _init(self) -> Any:
        mode = self._options["mode"]
        try:
            return self._init_as(mode)
        except Exception as error:
            if mode != "online":
                raise
            self._wandb.teardown()  # the id is in use until this returns
            text = " ".join(str(error).split())[:300]
            run = self._init_as("offline")
            folder = f"{self._options['dir']}/wandb"
            self._say(
                f"no run could be started online ({text}); it is kept offline: later, wandb sync {folder}/offline-*"
            )
            return run

    def _init_as(self, mode: str) -> Any:
        wandb, options = self._wandb, self._options
        Path(options["dir"]).mkdir(parents=True, exist_ok=True)
        wanted = {"console": "off", "silent": True, "x_disable_stats": True, "init_timeout": _INIT_S}
        wanted |= {"x_transaction_log_flush_interval": _FLUSH_S, "x_stats_pid": os.getppid()}
        known = {name: value for name, value in wanted.items() if name in wandb.Settings.model_fields}
        return wandb.init(
            settings=wandb.Settings(**{**known, **options["settings"]}),
            mode=mode,
            dir=options["dir"],
            project=options["project"],
            group=options["group"] or options["job"],
            job_type="replica",
            name=options["replica"],
            id=self._id,
            resume="allow" if mode == "online" else None,
            config={**options["config"], "ftopt_job": options["job"], "ftopt_replica": options["replica"]},
        )

    def close(self, *, killed: bool) -> None:
        super().close(killed=killed)
        self._run.finish(exit_code=1 if killed else 0)

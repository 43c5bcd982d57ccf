"""How the replicas of a launch have ended, by their exit statuses and by what they say themselves."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftopt.common.launched import read_end
from ftopt.common.plural import count
from ftopt.run.processes import Child, describe_exit
from ftopt.watch.folder import RunFolder
from ftopt.watch.sentences import JOB_ENDED, names

_LAST_BYTES, _MOST_CHARS = 10_000, 300
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?(?!torch\.distributed\.elastic)((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE
)
"""The last line of a traceback; not torchrun's own."""
_KILLED = re.compile(r"^\s*exitcode\s*: -(?!15\b)\d+ ", re.MULTILINE)
"""torchrun says that a signal has killed a rank; it sends SIGTERM itself."""
_TIMES = 3
"""Equal failures in a row that are no accident."""
_WRONG = 2
"""The exit status after a mistake of the user's, as of the command line: a restart cannot mend it."""


class Ends:
    """The ends of one launch's replicas.

    Attributes:
        done: replicas that have come to the end of the script.
        early: replicas that were asked to leave before it; SIGTERM ends one at once that has not joined.
        late: replicas that came when the job had ended, and how many of their steps are in no version.
        mistakes: replica -> the mistake of the user's that has ended it, such as another model than the job's.
        repeated: replicas that have failed three times in a row at the same inner step, by the same error at one line.
    """

    def __init__(self, folder: RunFolder, *, ranks: int = 1) -> None:
        self.done, self.early, self.late = set[str](), set[str](), dict[str, int]()
        self._mistaken = (_WRONG,) if ranks == 1 else (1, _WRONG)  # torchrun ends with status 1
        self.mistakes: dict[str, str] = {}
        self.repeated = set[str]()
        self._failed: dict[str, list[tuple[object, ...]]] = defaultdict(list)
        """Replica -> the type, the place, the version and the inner step of each error."""
        self._reasons: dict[str, str] = {}
        self._folder = folder
        self._steps = self._pending = self._silent = 0

    def begin(self, replica: str) -> Path:
        """A process of the replica is started; returns the file in which it says how it ends."""
        file = self._folder.log(replica).with_suffix(".end").resolve()  # a script may change the folder
        file.unlink(missing_ok=True)
        return file

    def has_left(self, child: Child) -> bool:
        """Whether a process has ended its training; its script may go on."""
        return "steps" in self.said(child.name)

    def said(self, replica: str) -> dict[str, Any]:
        """What the replica's last process has told of itself (`ftopt.common.launched`)."""
        return read_end(self._folder.log(replica).with_suffix(".end"))

    def take(self, child: Child, *, here: bool = False, by: str = "") -> None:
        """Takes up the end of a replica's process. ``here``: it has joined the job, and is not known to have left.
        ``by``: what has made the launch kill it."""
        said, status = self.said(child.name), child.process.poll() or 0
        self._steps, self._pending = self._steps + said.get("steps", 0), self._pending + said.get("pending", 0)
        self._silent += status not in (0, -signal.SIGTERM) and "steps" not in said
        if str(said.get("over")).startswith(JOB_ENDED):
            self.late[child.name] = 0
            return
        died = self._reasons.pop(child.name, None)
        if by and "steps" not in said:
            self._reasons[child.name] = f"killed by {by}"
            return
        if not status and here and "steps" not in said and self._has_room(child.name):
            self._reasons[child.name] = "it ended with status 0 without leaving its job, as by os._exit(0)"
            return
        if status == -signal.SIGTERM and died and "steps" not in said:  # it was on its way back
            self._reasons[child.name] = died
        elif status in (0, -signal.SIGTERM):
            (self.early if status or said.get("early") else self.done).add(child.name)
        if status in (0, -signal.SIGTERM):
            return
        mistake = str(said.get("mistake", "")) if status in self._mistaken else ""
        if status == _WRONG and not mistake:
            last = child.said(at_most=_LAST_BYTES).rpartition("\n")[2]
            mistake = last if "error:" in last else "exit status 2"  # argparse says what is wrong
        if mistake.startswith(JOB_ENDED):
            self.late[child.name] = int(said.get("pending", 0))
        elif mistake:
            self.mistakes[child.name] = mistake
        else:
            text = child.said(at_most=_LAST_BYTES)
            errors = (_ERROR.findall(text) or text.splitlines()) if status > 0 else []
            self._reasons[child.name] = errors[-1][:_MOST_CHARS] if errors else describe_exit(status)
            if "error" in said and "version" in said and not self.was_killed(child):
                self._compare(child.name, said)

    def _compare(self, replica: str, said: Mapping[str, Any]) -> None:
        """Finds whether a replica fails again and again at one step, as an error by chance does not."""
        failed = self._failed[replica]
        failed.append(tuple(said.get(x) for x in ("error", "place", "version", "inner_step")))
        if len(failed) >= _TIMES and len({*failed[-_TIMES:]}) == 1:
            self.repeated.add(replica)
            often = f"({_TIMES} times at inner step {said.get('inner_step')})"
            self.mistakes[replica] = f"{self._reasons[replica]} {often}{said.get('place', '')}"

    def _has_room(self, replica: str) -> bool:
        """Whether a file can be written where the replica says how it ends: on a full disk it cannot."""
        probe = self._folder.log(replica).with_suffix(".probe")
        try:
            probe.write_text("{}", encoding="utf-8")
        except OSError:
            return False
        finally:
            with suppress(OSError):
                probe.unlink()
        return True

    def came_late(self, replica: str) -> str:
        """What is said of a replica that came when the job had ended."""
        lost = self.late[replica]
        steps = f": {count(lost, 'inner step')} of it {'is' if lost == 1 else 'are'} lost" if lost else ""
        return f"{replica} came when the job had ended, and is not started again{steps}"

    def how(self, child: Child) -> str:
        """How the replica's process has ended: ``exit status 1: ValueError: no data``, or ``SIGKILL``."""
        if child.name in self.late:
            return "it came when the job had ended"
        status = describe_exit(child.process.poll() or 0)
        return ": ".join(dict.fromkeys((status, self._reasons.get(child.name, status))))

    @staticmethod
    def was_killed(child: Child) -> bool:
        """Whether a signal has ended the replica's process, or one of its ranks."""
        return (child.process.poll() or 0) < 0 or bool(_KILLED.search(child.said(at_most=_LAST_BYTES)))

    def why_failed(self, script: str, logs: Path, halted: str = "") -> str:
        """Why the launch has failed; "": it has not. ``halted``: why the job made no outer steps at its end."""
        mistakes = {x: why for x, why in self.mistakes.items() if not (self.done and x in self.repeated)}
        other = {replica: why for replica, why in self._reasons.items() if replica not in mistakes}
        none = [] if self.done else [f"no replica came to the end of {script}; their output is in {logs}"]
        none += [f"{names(who)} failed: {why}" for why, who in _by_reason(other) if none]
        told = []
        for why, who in _by_reason(mistakes):
            have, were = ("has", "was") if len(who) == 1 else ("have", "were")
            told.append(f"{names(who)} {have} failed, and {were} not started again, since no restart mends this: {why}")
        told += [f"the job has {halted}: what replicas trained since is in no version"] if halted else []
        return "\n".join([*none, *told])

    def account(self, script: str, replicas: Collection[str], restarts: Mapping[str, int]) -> str:
        """How the ``replicas`` have ended, in a few sentences."""
        rest = {*replicas} - self.done - self.early
        were = "was" if len(rest) == 1 else "were"
        ends = (self.done, "came to"), (self.early, "left before"), (rest, f"failed or {were} ended before")
        left = f", of which {self._pending:,} are in no outer step" if self._pending else ""
        died = f" (without those of {count(self._silent, 'process', 'processes')} that died)" if self._silent else ""
        again = [f"{replica} was started again {count(times, 'time')}" for replica, times in sorted(restarts.items())]
        why = "".join(f" {names(who)} failed: {reason}." for reason, who in _by_reason(self._reasons))
        return (
            f"{'; '.join(f'{names(who)} {how} the end of {script}' for who, how in ends if who)}.{why}\n"
            f"{count(len(replicas), 'replica')} of this launch took {count(self._steps, 'inner step')}{left}{died}. "
            f"{'; '.join(again) or 'No replica was started again'}."
        )


def _by_reason(reasons: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Each reason with its replicas."""
    each = dict.fromkeys(why for _, why in sorted(reasons.items()))
    return [(why, sorted(replica for replica, reason in reasons.items() if reason == why)) for why in each]

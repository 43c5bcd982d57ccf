"""What a replica repeats on each connection, for a coordinator that has not heard it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftopt.sync.protocol import messages as m


@dataclass
class Said:
    """What a replica has said, and repeats.

    Args:
        copied: its newest copy, for a keeper to fetch.
        stopped: the stop of the job: why, and by which replica.
        at_end: END: set when it waits for others that come to their end.
        leaving: whether it leaves, so that no round waits for it.
        finished: END, LOSS: whether it has come to the end of its training.
        bye: whether it has said goodbye, which is repeated until a coordinator hears it.
    """

    copied: m.Copied | None = None
    stopped: m.JobStopped | None = None
    at_end: m.AtEnd | None = None
    leaving: bool = False
    finished: bool = False
    bye: bool = False

    def note(self, message: m.FromReplica) -> m.FromReplica:
        """Keeps messages to repeat; returns what to send now. Of several reasons to stop the first counts."""
        match message:
            case m.Copied():
                self.copied = message
            case m.StopJob(reason=reason, replica=replica):
                self.stopped = self.stopped or m.JobStopped(reason, replica)
                return self._stop(self.stopped)
            case m.AtEnd():
                self.finished, self.at_end = True, message
            case m.Leaving():
                self.leaving = True
            case m.Finished():
                self.finished = True
            case m.Bye():
                self.bye = True
        return message

    def again(self) -> Iterator[m.FromReplica]:
        """All messages to repeat, in the order that a coordinator expects."""
        if self.copied is not None:
            yield self.copied
        if self.stopped is not None:
            yield self._stop(self.stopped)
        if self.at_end is not None and not self.bye:
            yield self.at_end
        if self.leaving:
            yield m.Leaving()
        if self.finished:
            yield m.Finished()
        if self.bye:
            yield m.Bye()

    @staticmethod
    def _stop(stopped: m.JobStopped) -> m.StopJob:
        return m.StopJob(stopped.reason, stopped.replica)

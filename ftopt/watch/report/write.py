"""Writes the report completely or not at all, and never over a file that is not a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ftopt.common.paths import replace_text
from ftopt.errors import UserError
from ftopt.watch.page import MADE_BY, report_page
from ftopt.watch.report.merge import merged
from ftopt.watch.report.record import read, runs_of
from ftopt.watch.report.sections import report
from ftopt.watch.report.stream import Say

NAME = "report.html"


class Report(NamedTuple):
    """A report that was written, and its first run in sentences and in the figures of ``summary.json``."""

    path: Path
    story: list[str]
    summary: dict[str, Any]


class NotWritten(UserError):
    """The file cannot be written. ``report``: its content in sentences and figures."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def write(
    folders: Sequence[Path],
    *,
    job: str | None = None,
    output: Path | None = None,
    force: bool = False,
    over: bool = False,
    say: Say,
) -> Report:
    """Reads the runs, and writes the report.

    Args:
        folders: of runs; folders of one job are merged.
        job: the job to report if a coordinator's folder has several. Default: that of the replicas' folders.
        output: the file. Default: ``report.html`` in the first folder.
        force: write over a file that is not a report.
        over: the run has ended, although not every replica may have said so.
        say: reports the progress of a long reading.

    Raises:
        UserError: a folder is not a run's, or not of one job. NotWritten: the file cannot be written.
    """
    unique = list({folder.resolve(): folder for folder in folders}.values())
    target = output if output is not None else unique[0] / NAME
    runs = runs_of([read(folder, say) for folder in unique], job)
    _check(target, force=force)
    for run in runs if over else ():
        run.summarized = True
    shown = merged(runs)
    data = report(shown)
    written = Report(target, data["runs"][0]["story"], shown[0].summary)
    try:
        replace_text(target, report_page(data, f"{data['title']}: ftopt report"))
    except OSError as error:
        raise NotWritten(str(_cannot(target, error)), written) from error
    return written


def _check(target: Path, *, force: bool) -> None:
    """Refuses to overwrite other files."""
    try:
        if target.is_dir():
            raise UserError(f"{target} is a folder; give a file, e.g. --output {target / NAME}")
        if not target.exists():
            return
        if not target.is_file():
            raise UserError(f"{target} is not a plain file; give another one with --output")
        with target.open("rb") as file:
            ours = MADE_BY.encode() in file.read(1000)
    except OSError as error:
        raise _cannot(target, error) from error
    if not (ours or force):
        raise UserError(
            f"{target} is there already, and is not a report of ftopt; give another file with --output, or --force"
        )


def _cannot(target: Path, error: OSError) -> UserError:
    return UserError(f"{target} cannot be written: {error.strerror}; give a file with --output that you can write")

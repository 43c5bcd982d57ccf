"""``ftopt report RUN...``: writes one HTML file that shows what happened in a run, or compares several."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ftopt.cli.shared.output import explain, say, show_command, tell, working
from ftopt.common.paths import near, user_path

if TYPE_CHECKING:
    from ftopt.watch.report.write import Report

_log = logging.getLogger("ftopt.report")


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Folders that several machines wrote of one job (`ftopt replica` on each) are merged into one run."
    text = "a run's folder, as `ftopt run` prints it; several are compared"
    parser.add_argument("runs", metavar="RUN", type=user_path, nargs="+", help=text)
    text = "the job to report, if a coordinator's folder has several (default: that of the replicas' folders)"
    parser.add_argument("--job", metavar="NAME", help=text)
    parser.add_argument(
        "--output", metavar="FILE", type=user_path, help="file to write (default: report.html in the first RUN)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a file that is not a report")


def run(arguments: argparse.Namespace) -> int:
    from ftopt.watch.report.write import write

    written = write(arguments.runs, job=arguments.job, output=arguments.output, force=arguments.force, say=tell)
    say(str(near(written.path)))
    return 0


def after(folder: Path, state: str = "", told: Callable[[Report], None] | None = None) -> None:
    """Writes the report of a run that is over, and prints its path; any failure becomes one line of the log.

    Args:
        state: how the job is, for a message that Ctrl-C or SIGTERM has ended the report.
        told: called with the report before its path is printed.
    """
    try:
        from ftopt.run.supervised import ended_by, on_signals

        with on_signals(ended_by):
            from ftopt.watch.report.write import NotWritten, write  # may take seconds

            failed = False
            try:
                with working("writing the report ..."):
                    written = write([folder], over=True, say=tell)
            except NotWritten as error:
                written, failed = error.report, True
                _log.warning("no report: %s; what follows is of the events that are on the disk", error)
            if told is not None:
                told(written)
        if not failed:
            explain(f"report: {near(written.path)}")
    except KeyboardInterrupt:
        what = f"{state}the report was interrupted; to write it:"
        show_command(what, shlex.join(["ftopt", "report", str(near(folder))]))
    except Exception as error:
        _log.warning("no report of %s: %s: %s", folder, type(error).__name__, error)

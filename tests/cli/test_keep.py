"""``--keep``: after a run its report is at the live page's address, for this machine's pages alone, until Ctrl-C."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from pathlib import Path

KEEP = """
import sys; from pathlib import Path; from ftopt.cli.shared.keep import keep
keep(sys.argv[1], Path(sys.argv[2]))
"""


def _answer(port: int, path: str, host: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_report_is_shown_until_ctrl_c(tmp_path: Path, port: int) -> None:
    report = tmp_path / "report.html"
    report.write_bytes(b"<p>all of it</p>")
    command = [sys.executable, "-c", KEEP, f"http://0.0.0.0:{port}", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port} until Ctrl-C" in process.stdout.readline()
        assert _answer(port, "/", f"127.0.0.1:{port}") == (200, report.read_bytes())
        assert _answer(port, "/live?job=a", f"127.0.0.1:{port}") == (410, b""), "an open page loads anew"
        assert _answer(port, "/", "pages.example") == (403, b"")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_without_a_report_nothing_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEP, "http://127.0.0.1:1", str(tmp_path / "report.html")]
    assert subprocess.run(command, capture_output=True, timeout=60).stdout == b""

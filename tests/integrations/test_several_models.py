"""``docs/islands.md``: its GAN trains as two replicas, in two jobs of one coordinator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ftopt.checkpoint.reader import whole
from tests.island.running import coordinator
from tests.pages import ROOT, programs

PAGE = ROOT / "docs" / "islands.md"
LIMIT_S = 120.0
ENDS = """
print(generates.status.versions, judges.status.versions, generates.digest()[:8], judges.digest()[:8])
"""


@pytest.mark.long
def test_the_gan_of_the_page_trains_both_models_and_saves_both(tmp_path: Path) -> None:
    [block] = [block for block in programs(PAGE) if "gan-critic" in block.text]
    (tmp_path / "gan.py").write_text(block.text + ENDS, "utf-8")
    with coordinator(tmp_path) as url:
        settings = os.environ | {"FTOPT_COORDINATOR": url, "OMP_NUM_THREADS": "1"}
        replicas = [
            subprocess.Popen(
                [sys.executable, "gan.py"],
                cwd=tmp_path,
                env=settings | {"FTOPT_REPLICA": f"r{m}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for m in range(2)
        ]
        try:
            told = [replica.communicate(timeout=LIMIT_S) for replica in replicas]
        finally:
            for replica in replicas:
                replica.kill()
                replica.communicate()
    assert [replica.returncode for replica in replicas] == [0, 0], told
    assert told[0][0] == told[1][0] != "", "both hold the same versions of both models"
    for job in "gan-generator", "gan-critic":
        assert any(re.search(rf"\b{job}/r\d: all 2 replicas are connected", said) for _, said in told), told
        assert whole(tmp_path / "shared/gan" / job), job

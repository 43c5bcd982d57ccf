"""What is refused before a trainer starts, and what is said where Ray is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest


def test_without_ray_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import ftopt; import ftopt.ray"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert "pip install 'ftopt[ray]'" in got.stderr.strip().splitlines()[-1]


@pytest.mark.ray
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "ranks=0; must be a whole number of workers, at least 1"),
        ({"ranks": 1.5}, "ranks=1.5; must be a whole number of workers"),
        ({"port": -1}, "port=-1; must be"),
        ({"port": 70_000}, "port=70000; must be at most 65535"),
        ({"journal": 3}, "journal=3; must be a file"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from ftopt.ray import FtoptConfig

    with pytest.raises(ValueError, match=re.escape(message)):
        FtoptConfig(**settings)

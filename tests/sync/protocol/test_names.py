"""Which names jobs and replicas may have."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol.limits import wrong_name


@pytest.mark.parametrize(
    "name", ["r0", "node-7.example.com-12345", "my job", "résumé", "हिन्दी", "日本", "a/b", "_", "8"]
)
def test_ordinary_names_are_taken(name: str) -> None:
    assert wrong_name(name) == ""


@pytest.mark.parametrize("name", ["", " ", "r0 ", "\tr0", ".", "..", "-rf", "--id", "\u0301x", "a\nb", "x" * 129])
def test_names_that_mislead_are_refused(name: str) -> None:
    assert wrong_name(name)

"""Counters and fragments are changed in their own files alone, which is what makes an audit of I2 short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import ftopt
from ftopt._connect import solo
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView

PACKAGE = Path(ftopt.__file__).parent
FILES = [path for folder in ("optimizer", "step") for path in (PACKAGE / folder).rglob("*.py")]
OUTER = OuterStep([FlatView(nn.Linear(2, 2))], ftopt.LocalSGD(sync_every=2), solo())
OWNERS = {"counters": OUTER.counters, "fragment": OUTER.fragments[0]}


def _written(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


@pytest.mark.parametrize("owner", OWNERS)
def test_nobody_else_writes_them(owner: str) -> None:
    fields = {name for name in vars(OWNERS[owner]) if not name.startswith("_")}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
        for path in FILES
        for node in _written(ast.parse(path.read_text(encoding="utf-8")))
        if node.attr in fields and ast.unparse(node.value).split(".")[-1] not in ("self", "inner", "optimizer")
    ]
    assert found == []


@pytest.mark.parametrize(("owner", "inside"), [("counters", {"counters.py"}), ("fragment", {"fragment.py"})])
def test_the_fields_of_i2_are_written_in_one_file(owner: str, inside: set[str]) -> None:
    fields = {"counters": {"local_steps"}, "fragment": {"base", "applied", "snapshot"}}[owner]
    found = {
        path.name
        for path in (PACKAGE / "step" / "outer").rglob("*.py")
        for node in _written(ast.parse(path.read_text(encoding="utf-8")))
        if node.attr in fields
    }
    assert found == inside

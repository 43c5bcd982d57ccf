"""The user's own code that a recipe names: where it is found, and how its errors read."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftopt.config import own_code as own
from ftopt.config.data_settings import OwnData
from ftopt.config.loader import dump, load
from ftopt.config.model_settings import FactoryConfig
from ftopt.config.task_settings import CrossEntropyConfig, OwnTask
from ftopt.errors import UserError

CODE = """
import sys

def made(n=3):
    return list(range(n))

def failing():
    return inner()

def inner():
    raise KeyError("no such column")

def leaving():
    sys.exit("bye")

number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with a module ``their_own`` and one of a name that is not English."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("their_own.py", "ihr_größe.py"):
        (tmp_path / name).write_text(CODE, encoding="utf-8")
    yield tmp_path
    theirs = [name for name, module in [*sys.modules.items()] if str(tmp_path) in str(getattr(module, "__file__", ""))]
    for name in theirs:  # of these alone: ftopt's, imported a second time, would have other classes
        del sys.modules[name]


@pytest.mark.parametrize("spec", ["their_own:made", "their_own.py:made", "ihr_größe.py:made", "./their_own.py:made"])
def test_a_function_is_found_in_the_working_folder(spec: str) -> None:
    assert own.call("data.factory", spec, {"n": 2}) == [0, 1]


@pytest.mark.parametrize(
    ("spec", "args", "parts"),
    [
        ("nowhere:made", {}, ["data.factory='nowhere:made' cannot be imported", "No module named", "working folder"]),
        ("their_own:mode", {}, ["their_own has no 'mode'; did you mean made?"]),
        ("nowhere.py:made", {}, ["there is no file", "from the working folder or from the recipe's"]),
        ("their_own:number", {}, ["is a int; must be a function or a class"]),
        ("their_own:made", {"m": 1}, ["with args={'m': 1}: TypeError", "unexpected keyword argument 'm'"]),
        ("their_own:failing", {}, ["KeyError: 'no such column'", "at their_own.py, line 11, in inner: raise KeyError"]),
        ("their_own:leaving", {}, ["it called sys.exit('bye')", "at their_own.py, line 14, in leaving"]),
    ],
)
def test_an_error_of_the_users_is_named_with_the_users_own_line(
    spec: str, args: dict[str, int], parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        own.call("data.factory", spec, args)
    for part in parts:
        assert part in str(caught.value)


def test_a_module_that_fails_or_does_not_parse_is_named_with_its_line(folder: Path) -> None:
    (folder / "broken.py").write_text("x = 1\ny = x +\n", encoding="utf-8")
    (folder / "raising.py").write_text("import no_such_package\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"SyntaxError.*\n.*broken\.py, line 2: y = x \+"):
        own.find("model.factory", "broken:f")
    with pytest.raises(UserError, match=r"No module named 'no_such_package'\n.*raising\.py, line 1"):
        own.find("model.factory", "raising.py:f")


def test_a_file_with_the_name_of_another_module_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text("def f(): pass\n", encoding="utf-8")
    with pytest.raises(UserError, match="Python has another module of the name json"):
        own.find("model.factory", "json.py:f")


def test_a_factory_that_takes_long_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reported = threading.Event()
    monkeypatch.setattr(own, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(own._log, "warning", lambda *_: reported.set())
    with caplog.at_level(logging.WARNING), own.patience("data.factory=a:b"):
        assert reported.wait(30)


def test_a_file_is_found_beside_the_recipe_and_stays_where_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = folder / "jobs"
    jobs.mkdir()
    (jobs / "beside.py").write_text(CODE, encoding="utf-8")
    (jobs / "recipe.yaml").write_text(
        "name: own\nmethod: {name: diloco, sync_every: 5}\nmodel: {factory: 'beside.py:made'}\n"
        "data: {factory: 'their_own.py:made', args: {n: 2}, batch_size: 3}\ntask: {factory: 'their_own:made'}\n",
        encoding="utf-8",
    )
    recipe = load(str(jobs / "recipe.yaml"))
    assert recipe.model == FactoryConfig(factory=f"{jobs}/beside.py:made")
    assert recipe.data == OwnData(factory=f"{folder}/their_own.py:made", args={"n": 2}, batch_size=3)
    assert recipe.task == OwnTask(factory="their_own:made")
    (folder / "resolved.yaml").write_text(dump(recipe), encoding="utf-8")
    monkeypatch.chdir(jobs)
    assert load(str(folder / "resolved.yaml")) == recipe
    assert load("diloco_bytes").task == CrossEntropyConfig()
    with pytest.raises(UserError, match=r"task\.factory='nothing'; must be package\.module:function or FILE\.py"):
        load("diloco_bytes", ["task.factory=nothing"])


def test_an_error_in_a_loaders_worker_process_is_shown_without_its_traceback(folder: Path) -> None:
    traceback = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{own.__file__}", line 3, in fetch\n    data = self.dataset[0]\n           ^^^^\n'
        f'  File "{folder}/theirs.py", line 7, in __getitem__\n    return self.rows[index]\n           ^^^^^\n'
        "KeyError: 'no row'\n"
    )
    said = own.described(RuntimeError(traceback))
    assert said == "KeyError: 'no row'\n    at theirs.py, line 7, in __getitem__: return self.rows[index]"


def test_an_error_of_all_replicas_is_told_once() -> None:
    error = "KeyError: 'prices'\n    at m.py, line 18, in loss: batch['prices']"
    first = f"an evaluation failed (m.py:Task, m.py:data): {error}\nreplica r0 has left"
    second = f"inner step 1 failed (m.py:Task, m.py:data): {error}"
    assert own.failed_in({"r1": second, "r0": first}) == f"your code failed in r0 and r1: {error}"
    other = "inner step 2 failed (m.py:Task): ValueError: no"
    assert own.failed_in({"r0": first, "r1": other}).splitlines()[::2] == [
        "your code failed in r0: KeyError: 'prices'",
        "your code failed in r1: ValueError: no",
    ]
    assert own.failed_in({"r0": first, "r1": "killed"}) == own.failed_in({}) == ""


def test_a_warning_is_told_once_with_the_users_line(folder: Path) -> None:
    (folder / "their_own.py").write_text(
        "import warnings\n\ndef made():\n    warnings.warn('wide')\n", encoding="utf-8"
    )
    made = own.find("data.factory", "their_own:made")
    with own.warned("in a batch") as told:
        made()
        made()
    assert told == [
        "warning: in a batch: UserWarning: wide\n    at their_own.py, line 4, in made: warnings.warn('wide')"
    ]

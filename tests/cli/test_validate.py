"""``ftopt validate`` and ``ftopt run --dry-run``: what they find, and what they show."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from ftopt.checkpoint.reader import Checkpoint
from ftopt.cli.main import main
from ftopt.cli.run import data_ended
from ftopt.config.loader import load
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.protocol.wire import plain

CODE = """
import sys
import torch
from torch import nn

class Ones:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index): return torch.ones(1), torch.ones(1)

class Fit:
    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()

class Broken(Fit):
    def loss(self, model, batch): return model(batch["x"])

def data(count=4):
    print("loading")
    return Ones(count), Ones(2)

def model(): return nn.Linear(1, 1)
def leaving(): sys.exit(3)
"""
RECIPE = """
name: own
replicas: 2
model: {factory: their_parts.py:model}
data: {factory: their_parts.py:data, batch_size: 2}
task: {factory: their_parts.py:Fit}
method: {name: streaming_diloco, sync_every: 6, delay: 1, fragments: {n: 1}}
train: {inner_steps: 12}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "their_parts.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "own.yaml").write_text(RECIPE, encoding="utf-8")
    _forget()  # what another test has imported of a recipe that is copied here
    yield tmp_path
    _forget()


def _forget() -> None:
    for name in [name for name in [*sys.modules] if name.startswith(("own_", "their_parts"))]:
        del sys.modules[name]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["validate", *words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_what_is_wrong_in_values_files_and_factories_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(
        capsys, "own.yaml", "lr=0.1", "eval_every=-1", "data.factory=their_parts:dat", "log.dir=own.yaml/runs",
        "checkpoint.resume=nowhere", "task.factory=their_parts.py:leaving",
        "method.fragments={name: named, patterns: [nothing, '*']}",
    )  # fmt: skip
    for part in (
        "7 errors",
        "lr: unknown key; did you mean inner.lr or method.outer.lr?",
        "eval_every: unknown key; did you mean train.eval_every?",
        "their_parts has no 'dat'; did you mean data?",
        "own.yaml is a file; give a folder",
        "nowhere does not exist",
        "it called sys.exit(3)",
        "nothing is left for 'nothing'",
    ):
        assert part in error


@pytest.mark.parametrize(
    "wrong", ["method.name=dilocoo", "method.sync_every=x", "name=7/7", "replicas=many", "model.name=gptt", "inner=x"]
)
def test_factories_are_called_whichever_section_is_wrong(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    factories = ["data.factory=their_parts:dat", "task.factory=their_parts.py:leaving"]
    if "model" not in wrong:
        factories.append("model.factory=their_parts.py:modell")
    error = refused(capsys, "own.yaml", *factories, wrong)
    assert f"{len(factories) + 1} errors" in error
    assert "has no 'dat'" in error and "it called sys.exit(3)" in error
    assert ("has no 'modell'" in error) == ("model" not in wrong)


def test_parts_that_do_not_suit_each_other_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "own.yaml"]) == 0
    told = capsys.readouterr()
    assert "own.yaml: valid" in told.out and "loading" in told.err, "a factory's own output is no result"
    assert "their_parts.py, line 15, in loss" in refused(capsys, "own.yaml", "task.factory=their_parts.py:Broken")
    assert "to train on is empty" in refused(capsys, "own.yaml", "data.args.count=0")
    assert "leaves no batch at all" in refused(capsys, "own.yaml", "data.args.count=1", "data.drop_last=true")
    assert main(["validate", "own.yaml", "data.args.count=1"]) == 0
    both = refused(capsys, "own.yaml", "task.factory=their_parts.py:Broken", "log.dir=own.yaml")
    assert "2 errors" in both and "in loss" in both and "is a file" in both
    assert "1 error\n" in refused(capsys, "diloco_bytes", "model.name=convnet"), "reported once"
    assert "must be at most 1,000,000" in refused(capsys, "diloco_bytes", "model.width=1000000000")
    assert "must be at most 10,000" in refused(capsys, "diloco_bytes", "model.layers=1000000000")


def test_tokens_are_compared_with_the_vocabulary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.arange(4000, dtype=np.uint16).tofile(folder / "train.bin")
    small = ["model.layers=1", "model.heads=2", "model.width=8", "model.context=16", "data.held_out=null"]
    assert main(["validate", "gpt2_124m", *small, "data.path=train.bin"]) == 0
    assert "below vocab=256" in refused(capsys, "gpt2_124m", *small, "data.path=train.bin", "model.vocab=256")
    assert "data.path='none.bin': no file is there" in refused(capsys, "gpt2_124m", *small, "data.path=none.bin")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n- 2\n", "holds a list; a recipe is a mapping"),
        ("a word", "holds a single value"),
        ("", "name is missing"),
        ("name: a\nname: b\n", "found duplicate key name"),
        ("a: [1\n", "cannot be read as YAML"),
        ("a: &a [*a]\n", "once its aliases (*) are expanded"),
        ("a: &a [x,x]\nb: &b [*a,*a]\nname: &c {d: *b}\nmethod: {name: diloco, sync_every: 3}\n", "unknown key"),
        ("[" * 3000, "cannot be read as YAML"),
        ("a: !!python/object/apply:os.system [id]\n", "cannot be read as YAML"),
        ("x" * (2 << 20), "is this the right file?"),
        ("\udcff", "cannot be read as YAML"),
    ],
)
def test_files_that_are_no_recipes_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (folder / "wrong.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert said in refused(capsys, "wrong.yaml")
    assert "is a folder" in refused(capsys, str(folder))


def test_a_dry_run_shows_the_plan_and_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*.*"))
    assert main(["run", "diloco_bytes", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "name: diloco_bytes\n",
        "parameters: 131,392\n",
        "outer steps: 12 in 600 inner steps, with 4 replicas\n",
        "sent per replica: 9.46 MB in all (fp32)\n",
        "fragment 0: 131,392 parameters, 788 kB per outer step; due at inner step 50, 100, 150, ... (12 times)\n",
        "inner optimizer 1.05 MB",
        "nothing was started or written",
    ):
        assert part in shown
    assert main(["run", "own.yaml", "--dry-run", "method.codec=fp4"]) == 0
    shown = capsys.readouterr().out
    assert "fragment 0: 2 parameters" in shown and "applied 1 step later" in shown
    assert main(["run", "own.yaml", "--dry-run", "train.inner_stpes=3"]) == 2
    assert sorted(folder.rglob("*.*")) == before


def test_a_recipe_is_copied_with_its_python_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "own_images"]) == 0
    assert "own_images.yaml, own_images.py" in capsys.readouterr().out
    assert main(["validate", "own_images.yaml", "data.args.count=40"]) == 0
    sys.modules.pop("own_images", None)
    (folder / "own_images.yaml").unlink()
    assert main(["cp", "own_images"]) == 2, "own_images.py is there"
    assert not (folder / "own_images.yaml").exists()


def test_a_wrong_setting_hides_no_other_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Also not in its own section, and no fault comes of the default in its place."""
    error = refused(
        capsys, "own.yaml", "train={eval_every: -1, accumulate: 0, inner_stpes: 5, device: gpu}", "method.sync_every=0",
        "model={factory: their_parts:modell, contxt: 3}", "data={factory: their_parts:dat, batch_size: 0}",
        "checkpoint={every: -1, resume: nowhere}", "method.weights=heavy", "method.fragments.n=x",
        "inner={name: sgd, lr: -1, momentum: -1, nesterov: true}", "faults=[{replica: 1, at_step: -2, do: kil}]",
        "task={factory: 7}", "replicas=0",
    )  # fmt: skip
    for part in (
        "train.eval_every=-1; must",
        "train.accumulate=0; must",
        "train.inner_stpes: unknown key; did you mean train.inner_steps?",
        "train.device='gpu'; allowed",
        "method.sync_every=0; must",
        "method.weights='heavy'; allowed",
        "method.fragments.n='x' (str); must",
        "model.contxt: unknown key",
        "has no 'modell'",
        "data.batch_size=0; must",
        "has no 'dat'",
        "checkpoint.every=-1; must",
        "nowhere does not exist",
        "inner.lr=-1; must",
        "inner.momentum=-1; must",
        "faults[0].do='kil'",
        "task.factory='7'; must",
        "replicas=0; must",
    ):
        assert part in error
    assert "18 errors" in error or "19 errors" in error
    assert "nesterov" not in error


def test_validate_does_not_import_torchs_compiler() -> None:
    code = "import sys; from ftopt.cli.main import main; main(sys.argv[1:]); print('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-c", code, "validate", "diloco_bytes", "inner.name=torch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    assert said.splitlines()[-1] == "False"


def test_data_that_end_before_the_steps_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["validate", "own.yaml"], ["run", "own.yaml", "--dry-run"], ["validate", "diloco_bytes"]):
        assert main([*words, "replicas=2", "data.epochs=1", "train.inner_steps=1000000"]) == 0
        told = capsys.readouterr().err
        assert re.search(r"samples are enough for about [\d,]+ of train.inner_steps=1,000,000 with replicas=2", told)
        assert ("about 1 of" in told) == ("own.yaml" in words)
    assert main(["validate", "own.yaml", "data.epochs=12"]) == 0
    assert not capsys.readouterr().err.replace("loading\n", "")


def test_float_targets_without_a_task_are_told_of_the_loss_that_is_assumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "no_task.yaml").write_text(re.sub("task: .*", "", RECIPE), encoding="utf-8")
    error = refused(capsys, "no_task.yaml")
    assert "the loss is cross-entropy, as in each recipe without a section task" in error and "task.factory=" in error


def test_of_a_checkpoint_at_the_end_of_the_data_it_is_said_that_none_are_left() -> None:
    samples = Samples(samples=7, batch_size=2, epochs=2)  # 8 units
    note = {"membership": {"samples": plain(samples)}}
    for units, words in ((7, ""), (8, "no data are left: all epochs (data.epochs) are in the model, at inner step 4,")):
        there = SimpleNamespace(
            notes={"r0": note}, record={"done": [[0, units]]}, path=Path("v1"), manifest=SimpleNamespace(inner_step=4)
        )
        said = data_ended(cast(Checkpoint, there))
        assert said.startswith(words) and bool(said) == bool(words)


def test_what_torch_warns_of_in_the_users_loss_is_told_with_their_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own_wide.py").write_text(WIDE, encoding="utf-8")
    assert main(["validate", "own.yaml", "task.factory=own_wide.py:Wide"]) == 0
    told = capsys.readouterr()
    assert "own.yaml: valid" in told.out
    assert told.err.count("Using a target size") == told.err.count("ftopt: warning: while a batch was tried: ") == 1
    assert "at own_wide.py, line 7, in loss: return nn.functional.mse_loss(" in told.err


WIDE = """
from torch import nn

class Wide:
    def loss(self, model, batch):
        out = model(batch["x"]) if isinstance(batch, dict) else model(batch[0])
        return nn.functional.mse_loss(out, out.detach()[..., 0])
"""


def test_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    told, shown = threading.Event(), list[str]()
    monkeypatch.setattr("ftopt.cli.shared.output._LONG_S", 0.0)
    monkeypatch.setattr("ftopt.cli.shared.output.tell", lambda text: (shown.append(text), told.set()))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("ftopt.cli.validate._valid", lambda *_: (told.wait(30.0), load("diloco_bytes"))[1])
    assert main(["validate", "diloco_bytes"]) == 0
    assert shown == ["reading the recipe ..."]

"""Which device a replica trains on, and compiled models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from ftopt.config.loader import load
from ftopt.config.tasks import task_of
from ftopt.errors import UserError
from ftopt.run import devices
from ftopt.run.devices import check_compiler, compile_model, device_of
from tests.run.running import TINY, text
from tests.run.test_task import data_of, trained


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, as far as torch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("setting", "replica", "device"),
    [
        ("auto", "r0", "cuda:0"),
        ("auto", "r5", "cuda:2"),
        ("cuda", "r04", "cuda:1"),
        ("auto", "island", "cuda:0"),
        ("cuda:1", "r0", "cuda:1"),
        ("cpu", "r1", "cpu"),
    ],
)
def test_replicas_of_one_machine_take_its_gpus_in_turn(setting: str, replica: str, device: str) -> None:
    assert device_of(setting, replica) == torch.device(device)


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="there are 3 CUDA devices; use cuda:0 to cuda:2"):
        device_of("cuda:3", "r0")


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto", "r0") == torch.device("cpu")
    for setting in ("cuda", "cuda:0"):
        with pytest.raises(UserError, match=f"train.device={setting}, but torch .* finds no CUDA device here"):
            device_of(setting, "r0")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, and there is no g\+\+ here; install one"):
        check_compiler(torch.device("cpu"))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="on a GPU needs Triton"):
        check_compiler(torch.device("cuda"))


def test_what_cannot_be_compiled_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "check_compiler", lambda device: None)
    task = task_of(load("diloco_bytes", [*TINY, text(tmp_path)]))
    monkeypatch.setattr(task.model, "compile", lambda: None)

    def fails(*, whole: bool) -> None:
        raise RuntimeError("a graph break\nand much more")

    monkeypatch.setattr(task, "try_out", fails)
    with pytest.raises(UserError, match=r"train\.compile=true: RuntimeError: a graph break; use train\.compile=false"):
        compile_model(task)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_trains_as_it_does_without(tmp_path: Path) -> None:
    settings = [*TINY, text(tmp_path), "replicas=1", "train.inner_steps=20"]
    plain, compiled = (
        data_of(trained(load("diloco_bytes", [*settings, *more]), 1)["r0"], "evaluate")
        for more in ([], ["train.compile=true"])
    )
    assert compiled[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_training_and_evaluation_use_what_was_compiled_before_the_replica_joined(tmp_path: Path) -> None:
    task = task_of(load("diloco_bytes", [*TINY, text(tmp_path), "train.autocast=bf16"]))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph

    task.model.compile = partial(task.model.compile, backend=backend)  # type: ignore[method-assign]
    compile_model(task)
    compiled = len(graphs)
    task.model.train()
    samples = task.dataset()
    for start in (0, task.batch_size):
        batch = default_collate([samples[start + place] for place in range(task.batch_size)])
        task.loss(batch).backward()  # type: ignore[no-untyped-call]
    task.score(thorough=False)
    assert len(graphs) == compiled == 2, "one with gradients, one without"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recipe_trains_on_a_gpu(tmp_path: Path) -> None:
    settings = [*TINY, text(tmp_path), "train.inner_steps=40", "train.device=cuda", "train.autocast=bf16"]
    first, *_, last = data_of(trained(load("diloco_bytes", settings), 1)["r0"], "evaluate")
    assert last["loss"] < first["loss"]
    assert torch.cuda.max_memory_allocated() > 0

"""What the tests of trainers share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.forkserver import CONTEXT
from tests.integrations.running import PACKAGES

# Seconds for each process, otherwise. Whoever else uses this fork server needs torch and ftopt alone.
LOADED = [
    "torch._dynamo", "torch.distributed", "aiohttp", "ftopt", "ftopt.checkpoint.checkpoints", "ftopt.optimizer",
    "ftopt.sync.replica.client", "ftopt.sync.replica.websocket", "ftopt.transport.gloo", "tests.integrations.running",
    *(name for name in PACKAGES if find_spec(name)),
]  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only a run of these tests alone loads the packages."""
    here = Path(__file__).parent
    if config.option.markexpr == "trainers" or all(here in item.path.parents for item in items):
        CONTEXT.set_forkserver_preload(LOADED)

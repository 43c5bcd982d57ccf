"""What all tests share."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "disabled"


def pytest_collection_finish() -> None:
    """What has been imported lives on to the end: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()

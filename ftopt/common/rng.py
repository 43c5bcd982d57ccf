"""The states of the random number generators that a training loop draws from."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def get_rng_state() -> dict[str, Any]:
    """Returns the states of torch (CPU and, if in use, CUDA), Python, and NumPy if it is loaded, as values and
    tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores the states from `get_rng_state`; CUDA's only if the number of devices is the same."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])

"""Parts of a loader's state: data sets with a state of their own, and settings that must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ftopt.errors import UserError


@runtime_checkable
class StatefulDataset(Protocol):
    """A data set that keeps a state of its own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check_same(now: Mapping[str, Any], was: Mapping[str, Any], why: str) -> None:
    """Raises UserError, which ends with ``why``, if a state was taken with other settings (``was``) than ``now``."""
    if wrong := [f"{name}={value!r}, was {was[name]!r}" for name, value in now.items() if value != was[name]]:
        raise UserError(f"{'; '.join(wrong)}: {why}")


OTHER_DATA = "the state is of other data or another order; give the settings as they were"

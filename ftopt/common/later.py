"""torch, imported when it is first used.

For modules that only describe a computation until it is run: methods, codecs, and checks of a recipe.
torch takes longer to import than a recipe of built-in parts takes to check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later:
        """Stands in for the module."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Later()

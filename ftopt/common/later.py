"""torch, imported when it is first used.

For modules that only describe what is computed until somebody computes it: methods, codecs, and what checks a recipe.
torch takes longer to import than a recipe of built-in parts takes to check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later:
        """Stands for a module."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Later()

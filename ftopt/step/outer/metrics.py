"""The data of events of inner and outer steps.

The outer gradient's norm and cosine are measured only on request, on pieces that the outer step has brought into the
cache, without a sweep over memory. Only a sample of the previous gradient is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftopt.step.outer.usual import Told
from ftopt.step.tensors.pieces import piece_of

MOST_SAMPLED = 1 << 20
"""Elements of a sample. Their cosine has an error of about 0.001."""


class OuterGradient:
    """The norm of one outer gradient, and its cosine to the previous one, measured piece by piece. Reducer thread.

    Args:
        numel: its number of elements.
        values: the mean holds parameters, so that the gradient is ``anchor - mean``.
        before: the gradient of the previous version; None: not known.
    """

    def __init__(self, numel: int, *, values: bool, before: OuterGradient | None) -> None:
        self._values = values
        self._every = -(-numel // MOST_SAMPLED) | 1  # odd, so that rows are sampled at different columns
        self._sample = torch.empty(0)
        self._before = before._sample if before is not None else None
        self._numel = numel
        self._there: list[Tensor] = []

    def see(self, anchor: Tensor, mean: Tensor, start: int) -> None:
        """Measures one piece, which begins at element ``start``: of the anchor and of the mean."""
        if not self._sample.numel():
            self._sample = mean.new_empty(-(-self._numel // self._every))
        gradient = torch.sub(anchor, mean) if self._values else mean
        first = -start % self._every
        drawn = gradient[first :: self._every]
        at = slice((start + first) // self._every, (start + first) // self._every + drawn.numel())
        sample = self._sample[at].copy_(drawn)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64 if gradient.is_cuda else None).double()
        before = self._before[at] if self._before is not None else torch.zeros_like(sample)
        dots = [torch.dot(a, b).double() for a, b in ((sample, before), (sample, sample), (before, before))]
        self._there.append(torch.stack([norm, *dots]))

    def see_all(self, anchor: Tensor, mean: Tensor) -> None:
        """Measures the whole gradient."""
        size = piece_of(mean)
        for number, (a, m) in enumerate(zip(torch.split(anchor, size), torch.split(mean, size), strict=True)):
            self.see(a, m, number * size)

    def measured(self, total: Callable[[float], float] = lambda value: value) -> dict[str, float | None]:
        """``gradient_norm`` and ``cosine``; None: not known. Waits for the device, and forgets the previous gradient.
        ``total``: sums measurements over slices."""
        rows = torch.stack(self._there).tolist() if self._there else []
        known, self._before, self._there = self._before is not None, None, []
        norm = math.sqrt(total(math.fsum(row[0] ** 2 for row in rows)))
        along, own, other = (total(math.fsum(row[column] for row in rows)) for column in (1, 2, 3))
        lengths = math.sqrt(own) * math.sqrt(other)
        cosine = along / lengths if known and lengths > 0 else None
        return {"gradient_norm": finite(norm), "cosine": finite(cosine)}


def divergence(members: Sequence[Told], gradient_norm: float | None) -> float | None:
    """The root mean square distance of the contributions from their mean, by ``sum w |d|^2 - |sum w d|^2``; None: not
    known.

    Args:
        members: what each member has sent about its contribution.
        gradient_norm: the norm of their mean.
    """
    present = [(member.weight, member.sizes.norm) for member in members if member.weight > 0]
    if gradient_norm is None or not present:
        return None
    total = math.fsum(weight for weight, _ in present)
    squares = math.fsum(weight / total * norm**2 for weight, norm in present)
    return finite(math.sqrt(max(0.0, squares - gradient_norm**2))) if len(present) > 1 else 0.0


def finite(value: float | None) -> float | None:
    """``value``; None if JSON cannot represent it."""
    return value if value is not None and math.isfinite(value) else None


def data_of_step(counted: Mapping[str, int] | None, loss: float | Tensor | None, lr: float) -> dict[str, Any]:
    """The data of the event ``stepped``: the counts, the loss and the rate, as far as known.

    A loss on another device stays a tensor: reading it would block training until the device is done.
    """
    data: dict[str, Any] = {**(counted or {}), "lr": lr}
    if loss is not None:
        data["loss"] = float(loss) if not isinstance(loss, Tensor) or loss.device.type == "cpu" else loss
    return data

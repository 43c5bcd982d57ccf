"""Gradients as a fragment, for methods that average them instead of parameters.

To the outer step a `GradientView` is a view like that of parameters: its values are *minus the sum of the gradients
that no round has counted yet*, its anchor is 0. So freezing, counting once and carrying over late work are the same
code for both. Applying a committed state means one step of the inner optimizers with the agreed gradient.

After the gradients comes one element for each parameter: above 0 if any of these backward passes has given it a
gradient, even one of 0. Its mean is above 0 if any member's is. It is agreed like the gradient, so that all replicas
step the same parameters, and weight decay and momentum do not move a parameter that nobody has used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ftopt.errors import UserError
from ftopt.methods.sync_sgd import GRADIENT
from ftopt.step.tensors.flat import FlatView, local
from ftopt.step.tensors.memory import Memory

PRESENT = "present"
"""The outer state's name for those elements."""


def check_dense_gradients(gradients: Iterable[Tensor | None]) -> None:
    """Raises UserError if a gradient is sparse."""
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            raise UserError(
                f"a gradient of shape {tuple(gradient.shape)} is sparse ({gradient.layout}), and a "
                "method that exchanges gradients takes dense ones; compute it densely (sparse=False), or use a "
                "method that exchanges parameters, as ftopt.LocalSGD"
            )


class GradientView(FlatView):
    """Minus the sum of the gradients of the model's trained parameters, flat fp32, for `read` and `write`; after it,
    for each parameter, whether it has a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.numel, self.has_more = self.numel + len(self._parameters), True
        self.carried, self.measured = slice(0, self.numel), self.trained
        self._sum = torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def add(self, times: float = 1.0) -> bool:
        """Adds the present gradients, multiplied by ``times``, to the sum. False: no parameter has one.

        Raises:
            UserError: a gradient is sparse. Nothing is added.
        """
        found = [parameter.grad for parameter in self._parameters]
        check_dense_gradients(found)
        for gradient, place in zip(found, self._views(self._sum[: self.trained]), strict=True):
            if gradient is not None:
                place.sub_(local(gradient), alpha=times)
        present = [float(gradient is not None) for gradient in found]
        self._sum[self.trained :].add_(torch.tensor(present).to(self.device, non_blocking=True))
        return any(present)

    @torch.no_grad()
    def give(self, agreed: Mapping[str, Tensor]) -> None:
        """Writes the agreed gradient into the parameters' gradients: None where nobody had one, unless a codec's
        earlier error is added."""
        parts = self._views(agreed[GRADIENT].to(self.device))
        for parameter, part, present in zip(self._parameters, parts, agreed[PRESENT].tolist(), strict=True):
            if not present > 0 and not bool(part.any()):
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).copy_(part)

    def take_gradients(self) -> list[Tensor | None]:
        """Takes the present gradients away from the parameters, and returns them."""
        found = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return found

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Gives the parameters back the result of `take_gradients`."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def gradients(self) -> list[tuple[Tensor, int] | None]:
        """The parameters' present gradients, and how often each was changed in place."""
        return [None if p.grad is None else (p.grad, local(p.grad)._version) for p in self._parameters]

    @torch.no_grad()
    def multiply_gradients(self, factor: float) -> None:
        """Multiplies the parameters' present gradients."""
        torch._foreach_mul_([local(p.grad) for p in self._parameters if p.grad is not None], factor)

    def read(self, out: Tensor, clones: Sequence[Tensor] | None = None) -> Tensor:
        return out.copy_(self._sum if clones is None else clones[0])

    def parts(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        for part in torch.split(self._sum, size):
            start = part.storage_offset()
            yield part, slice(start, start + part.numel())

    def write(self, flat: Tensor) -> None:
        self._sum.copy_(flat)

    def cast(self, flat: Tensor, memory: Memory | None = None) -> Tensor:
        return flat  # sums are fp32 whatever the parameters are

    def clones(self) -> list[Tensor]:
        return [self._sum.clone()]

    def restore(self, clones: Sequence[Tensor]) -> None:
        self._sum.copy_(clones[0])

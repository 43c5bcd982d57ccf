"""The whole replica on rank 0, for a method that needs more than slices of the parameters.

Such a method exchanges gradients, averages buffers or moments of the inner optimizers, or needs whole tensors. Rank 0
then holds all of each fragment, and does its outer step as a replica of one process does, bit for bit. The other ranks
hold nothing of it, and stay in step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.common.tree import rebuilt
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.optimizer.ranks.inner import groups_of, set_groups
from ftopt.optimizer.ranks.rank_group import portable
from ftopt.optimizer.ranks.rank_model import RankModel
from ftopt.optimizer.ranks.slices import Exchange
from ftopt.step.inner import Inner, beside, put_beside
from ftopt.step.tensors.buffers import averaged
from ftopt.step.tensors.flat import FlatView, Together, trainable
from ftopt.step.tensors.gradients import GradientView
from ftopt.step.tensors.live import Live
from ftopt.step.tensors.views import views_of

_INNER, _BUFFERS = "inner", "buffers"


class WholeModel:
    """The inner state and the buffers beside whole parameters, on rank 0.

    Args:
        ranks: this rank's model.
        exchange: the exchange of parameters that are whole on rank 0, and empty elsewhere.

    Attributes:
        model, parameters: the model with these whole parameters, and the parameters by name.
        shadows: optimizers of ``model``'s parameters that hold the whole inner state, and take no step.
    """

    def __init__(self, ranks: RankModel, exchange: Exchange, method: Method) -> None:
        self.ranks, self._exchange, self._island = ranks, exchange, ranks.island
        self.model = model = exchange.model
        inner = method.gradients is not None or method.inner_state == "average"
        self._kinds = [_INNER] * inner + [_BUFFERS] * (method.buffers == "mean")
        self.parameters = dict(trainable(model))
        self.shadows = Inner([self._shadow(optimizer) for optimizer in ranks.inner.optimizers])
        self._owner = {
            id(p): optimizer
            for optimizer in self.shadows.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._seen: dict[str, list[object]] = {}

    def _shadow(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer of the same class name, with the same groups of whole parameters."""
        names = {id(p): name for name, p in self.ranks.trained.items()}
        groups = [
            {**group, "params": [self.parameters[names[id(p)]] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        made: Optimizer = type(type(optimizer).__name__, (Optimizer,), {})(
            [{"params": group["params"]} for group in groups if group["params"]] or [{"params": []}],
            dict(optimizer.defaults),
        )
        made.param_groups = groups
        return made

    # Exchange.

    def pull(self) -> None:
        """Updates it from the ranks."""
        if _INNER in self._kinds:
            state, unlike = self.ranks.states.pull()
            self.ranks.warn_unlike(unlike)
            self.inner = state if self._island.leads else {}
        if _BUFFERS in self._kinds and self._island.leads:
            self.ranks.pull_buffers(self.model)
        self._note()

    def push_all(self) -> None:
        """Updates the ranks from it, with the parameters."""
        for fragment in range(len(self._exchange.cuts)):
            self._exchange.push(fragment)
        self._seen = {}
        self.push()

    def push(self) -> None:
        """Updates the ranks from it, where the outer step has changed it."""
        changed = [kind for kind in self._kinds if self._seen.get(kind) != self._marks(kind)]
        for kind in self._island.share(changed):
            if kind == _INNER:
                self.push_inner()
            else:
                self.ranks.push_buffers(self.model)
        self._note()

    def push_inner(self) -> None:
        """Gives all ranks the inner state, and the other values of rank 0's inner optimizers."""
        self.ranks.states.push(self.inner)
        real = self.ranks.inner
        shared = self._island.share(([beside(each.state) for each in real.optimizers], groups_of(real)))
        if not self._island.leads:
            for optimizer, values in zip(real.optimizers, shared[0], strict=True):
                put_beside(optimizer, values)
            set_groups(real, shared[1])

    def take_inner(self) -> dict[str, dict[str, Any]]:
        """Takes the inner state, which is kept here only if the outer step uses it."""
        found = self.inner
        if _INNER not in self._kinds:
            self.inner = {}
        return found

    def _note(self) -> None:
        self._seen = {kind: self._marks(kind) for kind in self._kinds}

    def _marks(self, kind: str) -> list[object]:
        """Marks that change whenever a value of this kind is written."""
        if kind == _BUFFERS:
            there = (buffer for module in self.model.modules() for buffer in module._buffers.values())
            return [x for buffer in there if buffer is not None for x in (id(buffer), buffer._version)]
        values: list[Any] = []
        rebuilt(self.inner, lambda value, where: values.append(value), leaves=(Tensor, int, float, str))
        return [x for v in values for x in ((id(v), v._version) if isinstance(v, Tensor) else (v,))]

    @property
    def inner(self) -> dict[str, dict[str, Any]]:
        """The inner state, by parameter."""
        found = {}
        for name, parameter in self.parameters.items():
            owner = self._owner.get(id(parameter))
            if owner is not None and (values := owner.state.get(parameter)):
                found[name] = dict(values)
        return found

    @inner.setter
    def inner(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for optimizer in self.shadows.optimizers:
            optimizer.state.clear()
        for name, values in state.items():
            if values:
                parameter = self.parameters[name]
                self._owner[id(parameter)].state[parameter] = dict(values)

    # The views for the outer step.

    def views(
        self, method: Method, fragments: Sequence[Sequence[str]], together: Together
    ) -> tuple[list[FlatView], tuple[RankGradients, RankLive] | None]:
        """Views of whole fragments on rank 0, empty views elsewhere; and of gradients, if the method exchanges them.
        UserError: as `views_of`."""
        views, error = list[FlatView](), None
        buffers = list[str]()
        if self._island.leads:
            try:
                views = views_of(self.model, method, self.shadows)
                buffers = averaged(self.model) if views and method.buffers == "mean" else []
            except UserError as raised:
                error = raised
        described, error = together(([_Described(view) for view in views], portable(error)))[0]
        if error is not None:
            raise error
        if not self._island.leads:
            views = [Elsewhere(self.model, names, each) for names, each in zip(fragments, described, strict=True)]
        for view in views:
            view.together, view.shared = together, True
        if method.gradients is None:
            return views, None
        return views, (RankGradients(self, together), RankLive(self, together, buffers))


class _Described:
    """The description of rank 0's view for the other ranks."""

    def __init__(self, view: FlatView) -> None:
        self.names, self.text, self.numel, self.has_more = view.names, view.describe(), view.numel, view.has_more


class Elsewhere(FlatView):
    """An empty view: rank 0 has all of the fragment.

    Args:
        names: names of the fragment's parameters.
        whole: rank 0's view of it.
    """

    elsewhere = True

    def __init__(self, model: nn.Module, names: Collection[str], whole: _Described) -> None:
        super().__init__(model, names)
        self._whole, self.names, self.has_more = whole, whole.names, whole.has_more

    def describe(self) -> str:
        return self._whole.text


class RankGradients(GradientView):
    """The gradients of all ranks, on rank 0. Calls are collective."""

    def __init__(self, whole: WholeModel, together: Together) -> None:
        super().__init__(whole.model)
        self._whole, self._ranks = whole, whole.ranks
        self.together, self.shared, self.elsewhere = together, True, not whole.ranks.island.leads
        if self.elsewhere:
            self.numel = self.trained = self.measured = 0
            self.carried, self._sum = slice(0, 0), self._sum[:0]
        self._text: str = together(super().describe())[0]

    def describe(self) -> str:
        return self._text

    def add(self, times: float = 1.0) -> bool:
        self._ranks.pull_gradients(self._whole.parameters)
        return self.elsewhere or super().add(times)

    def give(self, agreed: Mapping[str, Tensor]) -> None:
        """Gives the gradients to rank 0; each rank gets its part when the inner optimizers step."""
        if not self.elsewhere:
            super().give(agreed)

    def take_gradients(self) -> list[Tensor | None]:
        found = [parameter.grad for parameter in self._ranks.trained.values()]
        for parameter in self._ranks.trained.values():
            parameter.grad = None
        return found

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._ranks.trained.values(), gradients, strict=True):
            parameter.grad = gradient


class RankLive(Live):
    """The whole model and inner state on rank 0; elsewhere only their digest.

    Attributes:
        told: rank 0's digest, as of the last `tell`; "": the model has changed since.
    """

    def __init__(self, whole: WholeModel, together: Together, buffers: Sequence[str]) -> None:
        super().__init__(whole.model, whole.ranks.inner, buffers=buffers, states=whole.shadows)
        self._whole, self._together = whole, together
        self._leads = whole.ranks.island.leads
        self.told = ""
        self.tell()

    def tell(self) -> None:
        """Sends the digest to all ranks. Collective."""
        self.told = self._together(super().digest() if self._leads else "")[0]

    def digest(self) -> str:
        if self._leads:
            return super().digest()
        if not self.told:
            raise RuntimeError(
                f"digest() on rank {self._whole.ranks.island.rank} right after step(): rank 0 alone has it then,"
                " since each step changes the whole model; call it on rank 0, or after sync() or close()"
            )
        return self.told

    def check_travels(self) -> None:
        error = None
        if self._leads:
            try:
                super().check_travels()
            except UserError as raised:
                error = raised
        if (error := self._together(portable(error))[0]) is not None:
            raise error

    @torch.no_grad()
    def put(self, fetched: Mapping[str, Tensor]) -> None:
        """Replaces all ranks' models and inner states by a peer's."""
        if self._leads:
            super().put(fetched)
        self._whole.push_all()

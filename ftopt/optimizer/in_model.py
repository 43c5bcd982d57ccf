"""Contents of the model other than this replica's own parameters: the anchor for a while, or loaded weights.

Loading weights does not replace a job's parameters. The difference between a replica's parameters and its anchor counts
as the work of its pending steps, so loaded weights would enter the next anchor of all replicas. So before the next
step, and before anything is handed in or saved, a replica with loaded weights returns to the state that the job knows.
Until then the weights stay in the model: loading others to evaluate them, and then its own back, changes nothing.

`torch.distributed.checkpoint` reads weights into the tensors of a state dict, which are the model's own, before they
are loaded: a model that loads its own tensors has been changed already (*in place*). With an overlap, this also changes
a contribution being frozen at that moment; it is an outlier, or counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ftopt.common.plural import count
from ftopt.common.streams import used_here
from ftopt.errors import warn_user
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView, local
from ftopt.step.tensors.live import Live

_INSTEAD = (
    "to train from these weights, load them before `with optimizer:` (a new job starts from them, one that runs goes "
    "on from its own); to go on with an earlier state of the job, resume it from its checkpoint (ftopt.Checkpoints); "
    "to look at other weights for a while, load the own ones back before the next step(); a change that shall count "
    "as this replica's work is made in place, parameter.copy_(...) under torch.no_grad()"
)


class OuterParameters:
    """The committed anchor in the model, to evaluate and export. Training thread.

    Attributes:
        there: whether the anchor is in the model.
    """

    def __init__(self) -> None:
        self.there = False
        self._own: list[tuple[FlatView, list[Tensor]]] = []
        self._live: Live | None = None

    def put(self, fragments: Sequence[Fragment], live: Live | None) -> None:
        """Puts the anchor into the model, and sets the replica's parameters aside. ``live``: the model that peers
        fetch."""
        if live is not None:
            live.set_aside(live.view.clones())
        self._live = live
        self._own, self.there = [(fragment.view, fragment.view.clones()) for fragment in fragments], True
        for fragment in fragments:
            anchor = fragment.state.anchor
            used_here([anchor])
            fragment.view.write(anchor)

    def take_out(self) -> None:
        """Restores the replica's parameters, bit for bit, unless they are in the model."""
        for view, clones in self._own:
            view.restore(clones)
        self._own, self.there = [], False
        if self._live is not None:
            self._live.are_back()

    def keep(self) -> None:
        """Leaves the anchor in the model for good: the model belongs to the user."""
        self._own, self.there = [], False
        if self._live is not None:
            self._live.are_back()


class LoadedWeights(Protocol):
    """What user code has loaded into the model since the last step.

    Attributes:
        begun: a load has begun, and it is not known yet whether the parameters differ.
    """

    begun: bool

    def loaded(self) -> bool:
        """Whether the parameters are others than before the load."""

    def set_back(self, *, closing: bool) -> None:
        """Replaces what was loaded."""

    def keep(self) -> Callable[[], None] | None:
        """For a replica that leaves with loaded weights: what puts them into the model again."""


class Loads:
    """What user code has loaded into the model since the last step. Training thread.

    Args:
        before: called before a load changes anything.

    Attributes:
        begun: see `LoadedWeights`.
    """

    def __init__(self, model: nn.Module, outer: OuterStep, before: Callable[[], bool]) -> None:
        self._own: list[list[Tensor]] | None = None  # each view's parameters before the load
        self.begun = self._in_place = False
        self._outer, self._before = outer, before
        live = self._live = None if outer.gradients is None else outer.gradients.live
        self._views: list[FlatView] = [f.view for f in outer.fragments] if live is None else [live.view]
        self._handles = watch(model, self)

    def note(self, *, in_place: bool) -> None:
        """Notes that weights are about to be loaded. If agreed weights are changed in place, the comparison finds and
        heals that."""
        if self._own is None and self._before():
            self._own, self.begun = [view.clones() for view in self._views], True
            if self._live is not None:
                self._live.set_aside(self._own[0])
        self._in_place |= in_place and self._own is not None and self._outer.gradients is None

    def loaded(self) -> bool:
        """Whether the parameters are others than before the load."""
        own = self._own
        if own is None or self._in_place:
            return self._in_place
        if all(view.equals(clones) for view, clones in zip(self._views, own, strict=True)):
            own = None
            self._are_back()
        return own is not None

    def set_back(self, *, closing: bool) -> None:
        """Replaces loaded weights. With methods that exchange gradients, by the parameters before the load, which
        replicas share. Else by those before the pending steps, which are dropped, as a user who returns to earlier
        weights wants."""
        assert self._own is not None
        outer, steps = self._outer, 0
        if outer.gradients is None:
            steps = outer.drop_loaded()
        else:
            self._write(self._own)
        self._are_back()
        warn_set_back(steps, closing=closing)

    def keep(self) -> Callable[[], None] | None:
        """For a replica that leaves with loaded weights: a function that puts them into the model again, which then
        belongs to the user."""
        for handle in self._handles:
            handle.remove()
        if not self.loaded():
            return None
        return partial(self._write, [view.clones() for view in self._views])

    def _are_back(self) -> None:
        self._own, self.begun, self._in_place = None, False, False
        if self._live is not None:
            self._live.are_back()

    def _write(self, clones: Sequence[Sequence[Tensor]]) -> None:
        for view, each in zip(self._views, clones, strict=True):
            view.restore(each)


def warn_set_back(steps: int, *, closing: bool) -> None:
    """Warns that loaded weights are replaced, and that ``steps`` are dropped."""
    dropped = f"; {count(steps, 'pending inner step is', 'pending inner steps are')} dropped" if steps else ""
    now = (
        "what is handed in now are the replica's own, and then the loaded ones are in the model again"
        if closing
        else "they are again what the replicas have agreed on, and the gradient at hand is not used"
    )
    warn_user(
        "weights were loaded into the model after this replica had joined its job, whose parameters are not "
        f"replaced by loading: {now}{dropped}; {_INSTEAD}"
    )


class Notes(Protocol):
    """Notes that weights are about to be loaded."""

    def note(self, *, in_place: bool) -> None:
        """Notes that weights are about to be loaded; ``in_place``: they are in the model already."""


def watch(model: nn.Module, loads: Notes) -> list[RemovableHandle]:
    """Notifies ``loads`` of each `load_state_dict` of the model or a part of it, before it changes anything."""
    hook, modules = _Hook(loads), list[Any](model.modules())
    return [module.register_load_state_dict_pre_hook(hook) for module in modules]


class _Hook:
    """A pre-hook of `nn.Module.load_state_dict`. In a copy of the model (deepcopy, pickle), which is in no job, it does
    nothing, even without this package installed."""

    def __init__(self, loads: Notes) -> None:
        self._loads = weakref.ref(loads)

    def __call__(self, module: nn.Module, given: Mapping[str, Any], prefix: str, *_: Any) -> None:
        if (loads := self._loads()) is not None:
            with torch.inference_mode(False), torch.no_grad():
                own = [(name, p) for name, p in module.named_parameters(recurse=False) if p.requires_grad]
                loads.note(in_place=any(_one_memory(given.get(prefix + name), parameter) for name, parameter in own))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, ("", "format")  # accepts any arguments of a hook


def _one_memory(given: object, parameter: nn.Parameter) -> bool:
    """Whether loaded weights lie in the parameter's own memory."""
    if not isinstance(given, Tensor) or not given.numel():
        return False
    theirs, own = local(given), local(parameter)
    plain = type(theirs) is Tensor is type(own)  # other classes may have no memory of their own
    return plain and own.numel() > 0 and theirs.data_ptr() == own.data_ptr()

"""A record of an optimizer's last step, so that it can be undone: settings and counters, no copy of the tensors.

Before a step the log notes the groups' settings (a scheduler changes them right behind it), which moments there are,
and how often each tensor has been changed in place (``Tensor._version``). After it: that it is through, and which
gradients it used. A step that raises leaves a record that is not through; the version counters then tell which
operations were applied to which tensor.

Fused optimizers, and foreach ones on sharded parameters (DTensor), do not count versions (torch 2.13). Of these a few
elements of a few tensors of each group are kept: they change all together or not at all.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.tensors.gradients import local

_INVERTIBLE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
_TENSORS, _ELEMENTS = 4, 16
"""So many tensors of a group, device and dtype are sampled (the first and the last among them), and so many elements
of each."""
_PLAIN = {Tensor, nn.Parameter}
"""Types that are not sharded: no need to ask each parameter."""
_CHANGES = {"exp_avg_sq": 2}
"""How often a step changes a tensor of a state for each change of the state's counter, if not once."""
_version, _gradient = attrgetter("_version"), attrgetter("grad")

Kind = tuple[torch.device, torch.dtype]
"""Tensors of one kind in a group are changed by one operation."""


@dataclass(frozen=True, slots=True)
class ParameterMark:
    """What was noted of one parameter.

    Args:
        parameter: the parameter.
        version: before the step.
        state: versions of its moments before the step; None: it had no state.
        version_after: after the step; None: that was broken off.
        stepped: it had a gradient then.
        gradient: that gradient, if it is there as it was.
    """

    parameter: Tensor
    version: int
    state: Mapping[str, int] | None
    version_after: int | None
    stepped: bool
    gradient: Tensor | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The first elements of a parameter and of its first moment (None: there was none) before a step."""

    parameter: Tensor
    values: Tensor
    moment: Tensor | None


class States:
    """Which states there are, and by how much the versions of their tensors are apart: steps keep these in step, so
    that one of each state tells them all.

    Args:
        states: the optimizer's.
    """

    def __init__(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self.count = len(states)
        self.counters = [(p, c) for p, state in states.items() if (c := _counter(state)) is not None]
        self.whole = len(self.counters) == self.count
        self._apart = {p: _apart(states[p], counter._version) for p, counter in self.counters}
        self.tensors = [counter for _, counter in self.counters]

    def versions(self, noted: Sequence[int]) -> dict[Tensor, dict[str, int]]:
        """Of the tensors of all states, from those of `tensors`."""
        return {
            p: {name: _CHANGES.get(name, 1) * version + apart for name, apart in self._apart[p].items()}
            for (p, _), version in zip(self.counters, noted, strict=True)
        }


class RecordedGradients:
    """The gradients of a step, all but one held: when that one is gone (``zero_grad``), the others are let go of.

    Args:
        gradients: of all parameters; None where there is none.
    """

    __slots__ = ("_held", "_lead", "_place", "versions")

    def __init__(self, gradients: list[Tensor | None]) -> None:
        try:
            self.versions: list[int | None] = list(map(_version, gradients))
        except AttributeError:  # some have none
            self.versions = [None if g is None else g._version for g in gradients]
        self._held, self._lead, self._place = gradients, None, 0
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self._place, gradients[place] = place, None
                self._lead = weakref.ref(gradient, lambda _: gradients.clear())
                break

    def sound(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Those that are there, and as they were."""
        held = list(self._held) or [None] * len(parameters)
        if self._lead is not None:
            held[self._place] = self._lead()
        rows = zip(held, self.versions, parameters, strict=True)
        return [g if g is not None and g is p.grad and g._version == version else None for g, version, p in rows]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step; `marks` sorts out what was noted.

    Args:
        groups: each group's settings.
        sizes: how many parameters each group has.
        parameters: of all groups.
        states: the states there were.
        versions: of the parameters and of `States.tensors`, before the step.
        samples: group -> samples by device and dtype; of groups whose versions do not count.
        found_inf: GradScaler's, for a fused optimizer: not 0 when the step was skipped inside.
        versions_after: the parameters', after the step. None: it was broken off.
        gradients: with which it was taken.
    """

    groups: list[dict[str, Any]]
    sizes: list[int]
    parameters: list[Tensor]
    states: States
    versions: list[int]
    samples: Mapping[int, Mapping[Kind, Sequence[Sample]]]
    found_inf: Tensor | None
    versions_after: list[int] | None = None
    gradients: RecordedGradients | None = None

    def marks(self) -> list[list[ParameterMark]]:
        """Each group's parameters."""
        ps, count = self.parameters, len(self.parameters)
        had = self.states.versions(self.versions[count:])
        nothing = [None] * count
        gradients = self.gradients
        rows = zip(
            ps,
            self.versions[:count],
            self.versions_after or nothing,
            nothing if gradients is None else gradients.versions,
            nothing if gradients is None else gradients.sound(ps),
            strict=True,
        )
        marks = iter([ParameterMark(p, v, had.get(p), after, of_g is not None, g) for p, v, after, of_g, g in rows])
        return [list(islice(marks, size)) for size in self.sizes]


class StepRecorder:
    """Records an optimizer's steps by its hooks.

    Args:
        optimizer: one that `check_invertible` lets pass.

    Attributes:
        why: why there is no record.
        steps: begun since somebody set this to 0.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.why = "none has been taken since its steps are recorded"
        self.steps = 0
        self._states: States | None = None
        # What a `StepRecord` is made of, as noted before and after the step: every step pays for this.
        self._begun: tuple[Any, ...] | None = None
        self._ended: tuple[Any, ...] = ()
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget("its state has been loaded since"))

    @property
    def record(self) -> StepRecord | None:
        """The last step's; None when there is none to be undone."""
        return None if self._begun is None else StepRecord(*self._begun, *self._ended)

    def forget(self, why: str) -> None:
        """There is nothing to undo, since ..."""
        self._begun, self._ended, self.why = None, (), why
        self.look_again()

    def look_again(self) -> None:
        """Something else than a step may have changed the states."""
        self._states = None

    # Both run at every step.

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        states = self._states
        if states is None or states.count != len(optimizer.state) or not states.whole:
            states = self._states = States(optimizer.state)
        groups: list[dict[str, Any]] = []
        sizes: list[int] = []
        parameters: list[Tensor] = []
        fused = False
        for group in optimizer.param_groups:
            kept = group.copy()
            if type(kept["lr"]) is not float and isinstance(kept["lr"], Tensor):
                kept["lr"] = kept["lr"].clone()  # the one setting that may be one, and schedulers then write into it
            own = kept["params"]
            groups.append(kept)
            sizes.append(len(own))
            parameters += own
            fused = fused or kept["fused"]
        versions = list(map(_version, parameters + states.tensors))
        samples, found_inf = {}, None
        if fused or not _PLAIN.issuperset(map(type, parameters)):
            samples = {i: s for i, group in enumerate(groups) if (s := _samples(optimizer, group))}
            found_inf = getattr(optimizer, "found_inf", None)
        self._begun = (groups, sizes, parameters, states, versions, samples, found_inf)
        self._ended = ()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._begun is not None:
            parameters = self._begun[2]
            self._ended = (list(map(_version, parameters)), RecordedGradients(list(map(_gradient, parameters))))


def log_of(optimizer: Optimizer) -> StepRecorder | None:
    """The optimizer's log, if its steps are recorded."""
    return _LOGS.get(optimizer)


def check_invertible(optimizer: Optimizer, what: str) -> None:
    """Raises UserError, which begins with ``what``, if steps of this kind of optimizer cannot be undone."""
    if type(optimizer) not in _INVERTIBLE:
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in _INVERTIBLE)
        raise UserError(
            f"{what}: a step of {type(optimizer).__name__} cannot be inverted; allowed: {names}; "
            "keep a copy of the parameters and of the optimizer's state instead"
        )


def record_steps(optimizer: Optimizer) -> StepRecorder:
    """Records the optimizer's steps from now on."""
    if (log := _LOGS.get(optimizer)) is None:
        log = _LOGS[optimizer] = StepRecorder(optimizer)
    return log


_LOGS: weakref.WeakKeyDictionary[Optimizer, StepRecorder] = weakref.WeakKeyDictionary()


def first_elements(tensor: Tensor) -> Tensor:
    """A copy of a few elements of a tensor's local shard."""
    shard = local(tensor.detach())
    flat = shard.view(-1) if shard.is_contiguous() else shard.reshape(-1)
    return flat[:_ELEMENTS].clone()


def kind_of(tensor: Tensor) -> Kind:
    """Device and dtype."""
    return tensor.device, tensor.dtype


def first_moment(state: Mapping[str, Any]) -> Tensor | None:
    """SGD's buffer, Adam's first moment."""
    found: Tensor | None = state.get("momentum_buffer", state.get("exp_avg"))
    return found


def _counter(state: Mapping[str, Any]) -> Tensor | None:
    """The tensor that tells how often a parameter was stepped: Adam's count, SGD's buffer."""
    found: Tensor | None = state.get("step", state.get("momentum_buffer"))
    return found


def _apart(state: Mapping[str, Any], counted: int) -> dict[str, int]:
    tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
    return {name: value._version - _CHANGES.get(name, 1) * counted for name, value in tensors}


def _samples(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[Kind, list[Sample]] | None:
    if not (group["fused"] or (group["foreach"] is not False and _any_sharded(group["params"]))):
        return None
    alike: dict[Kind, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        alike[kind_of(parameter)].append(parameter)
    found = {}
    for key, parameters in alike.items():
        some = _spread([p for p in parameters if p.grad is not None] or parameters)
        moments = [first_moment(optimizer.state.get(p, {})) for p in some]
        found[key] = [
            Sample(p, first_elements(p), None if m is None else first_elements(m))
            for p, m in zip(some, moments, strict=True)
        ]
    return found


def _any_sharded(parameters: Sequence[Tensor]) -> bool:
    return not _PLAIN.issuperset(map(type, parameters)) and any(hasattr(p, "to_local") for p in parameters)


def _spread(parameters: list[Tensor]) -> list[Tensor]:
    last = len(parameters) - 1
    return [parameters[place] for place in sorted({last * i // (_TENSORS - 1) for i in range(_TENSORS)})]

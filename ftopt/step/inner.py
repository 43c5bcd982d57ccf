"""One interface to one or several inner optimizers: groups, state and state dicts, combined and split again.

With a single inner optimizer all of these are its own objects, untouched. With several (Muon for matrices, AdamW for
the rest) groups follow each other in the order of the list, and parameters are numbered consecutively.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ftopt.common.tree import rebuilt
from ftopt.errors import UserError


class Inner:
    """The inner optimizers as one: at least one, stepped in this order.

    Attributes:
        single: the optimizer, if there is just one.
        stepping: `step` is under way.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.stepping = False
        self.optimizers = list(optimizers)
        self.single: Optimizer | None = self.optimizers[0] if len(self.optimizers) == 1 else None
        # Some, such as Adagrad and MADGRAD, set up state in their constructor, not in their first step.
        self._set_up = [_without_tensors(optimizer.state) for optimizer in optimizers]

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Steps them all. With several, the closure runs once, first."""
        self.stepping = True
        try:
            if self.single is not None:
                # Without a closure, no argument: some optimizers' step() takes none.
                return self.single.step() if closure is None else self.single.step(closure)
            loss = self.evaluate(closure)
            for optimizer in self.optimizers:
                optimizer.step()
            return loss
        finally:
            self.stepping = False

    def evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """The closure's loss, with its gradients; None without one."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    @torch.no_grad()
    def turn(self, to: Literal["eval", "train"], *, keep: bool = False) -> None:
        """Calls ``eval()`` or ``train()`` of the optimizers that have them (schedule-free ones do). ``keep``: their
        changes to the parameters are reverted, bit for bit."""
        for optimizer in self.optimizers:
            call = getattr(optimizer, to, None)
            if not callable(call):
                continue
            parameters = [p for group in optimizer.param_groups for p in group["params"]] if keep else []
            kept = [p.detach().clone() for p in parameters]
            call()
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.copy_(values)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizers' own group dicts at present."""
        if self.single is not None:
            return self.single.param_groups
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        for optimizer, part in zip(self.optimizers, self._split(groups), strict=True):
            optimizer.param_groups = part

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """Parameter -> its inner state."""
        if self.single is not None:
            return self.single.state
        return _States(self.optimizers)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        for optimizer in self.optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            part = state if self.single is not None else {p: s for p, s in state.items() if id(p) in own}
            kept = {} if self.single is not None else beside(optimizer.state)
            optimizer.state = defaultdict(dict, {**kept, **part})

    def largest_lr(self) -> float:
        """The largest rate of all groups; 0 if they have none. UserError: one is not a finite number."""
        largest = 0.0
        for group in self.param_groups:  # no max(), since every step calls this
            rate = group.get("lr")
            if rate is not None:
                largest = max(largest, _finite_rate(rate))
        return largest

    def check_rates(self) -> None:
        """Raises UserError, before a step uses it, if a rate is not a finite number, as a scheduler may leave it. Does
        not wait for a rate that is a tensor on another device: `largest_lr` reads it when it is needed."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                if type(rate) is float and rate - rate == 0.0:
                    continue  # almost always
                if rate is not None and not (isinstance(rate, Tensor) and rate.device.type != "cpu"):
                    _finite_rate(rate)

    @property
    def defaults(self) -> dict[str, Any]:
        """The first optimizer's defaults; schedulers read ``momentum`` and ``betas`` here."""
        return self.optimizers[0].defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizers[0].defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """``{"state", "param_groups"}`` in torch's format; tensors by reference."""
        if self.single is not None:
            return dict(self.single.state_dict())
        state: dict[Any, Any] = {}  # values beside the parameters are under (optimizer's number, their key)
        groups: list[dict[str, Any]] = []
        offset = 0
        for index, optimizer in enumerate(self.optimizers):
            part = optimizer.state_dict()
            others = beside(optimizer.state)
            state |= {offset + number: value for number, value in part["state"].items() if number not in others}
            state |= {(index, key): value for key, value in others.items()}
            groups += [{**g, "params": [offset + number for number in g["params"]]} for g in part["param_groups"]]
            offset += sum(len(group["params"]) for group in optimizer.param_groups)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. UserError: its number of groups differs."""
        if self.single is not None:
            self.single.load_state_dict(state_dict)
            return
        state = state_dict["state"]
        parts = zip(self.optimizers, self._split(state_dict["param_groups"]), strict=True)
        for index, (optimizer, groups) in enumerate(parts):
            keys = [key for group in groups for key in group["params"]]  # numbers, or names of distributed checkpoints
            own: dict[Any, Any] = {number: state[key] for number, key in enumerate(keys) if key in state}
            own |= {key[1]: value for key, value in state.items() if isinstance(key, tuple) and key[0] == index}
            numbers = iter(range(len(keys)))
            local = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
            optimizer.load_state_dict({"state": own, "param_groups": local})

    def is_empty_step(self) -> bool:
        """Whether `step` only sets up state: `torch.distributed.checkpoint.state_dict` calls it, on an optimizer
        without any, at rate 0. Every other call is a training step, whatever it changes."""
        for optimizer in self.optimizers:  # no any(), and no call: this runs before every step
            for key in optimizer.state:
                if isinstance(key, Tensor):
                    return False
        if any(group.get("lr", 1.0) != 0 for group in self.param_groups):
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
            frame = frame.f_back
        return frame is not None

    def forget_nonfinite_state(self) -> None:
        """Resets the inner state of each parameter whose state holds NaN or Inf, and each such value beside the
        parameters. Their tensors become 0, and so do numbers that are not finite."""
        for optimizer in self.optimizers:
            for key, values in list(optimizer.state.items()):
                if not all(map(_finite, _leaves(values))):
                    optimizer.state[key] = rebuilt(values, _zeroed, leaves=(Tensor, float))

    def reset_state(self) -> None:
        """Forgets the inner state of all parameters, so that the next step is like the first. State that the
        constructors set up is restored: tensors as 0, other values as they were."""
        for optimizer, set_up in zip(self.optimizers, self._set_up, strict=True):
            for key in [key for key in optimizer.state if key not in set_up]:
                del optimizer.state[key]
            for key, values in set_up.items():
                optimizer.state[key] = _restarted(optimizer.state.get(key), values)

    def _split(self, groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        counts = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if len(groups) != sum(counts):
            raise UserError(
                f"{len(groups)} parameter groups for {len(counts)} inner optimizers that have {sum(counts)}; "
                "load a state dict of the same optimizers in the same order"
            )
        parts, start = [], 0
        for count in counts:
            parts.append(list(groups[start : start + count]))
            start += count
        return parts


class _States(MutableMapping[Any, Any]):
    """Parameter -> its inner state, in the optimizer that holds it. Like a defaultdict, makes a missing state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners = {p: optimizer for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}

    def _of(self, parameter: Any) -> MutableMapping[Any, Any]:
        owner = self._owners.get(parameter)
        if owner is not None:
            return owner.state
        return next((each.state for each in self._optimizers if parameter in each.state), {})

    def __getitem__(self, parameter: Any) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        if parameter not in self._owners:
            raise KeyError(parameter)
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Like ``dict.get``: makes no state."""
        return self._of(parameter).get(parameter, default)


def _finite_rate(rate: object) -> float:
    try:
        found = math.nan if isinstance(rate, str | bool) else float(rate)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # not a number, or a tensor of several values
        found = math.nan
    if not math.isfinite(found):
        raise UserError(
            f"lr={rate!r:.60} in a parameter group; must be a finite number; mend the scheduler, or whatever "
            "else sets it"
        )
    return found


def _has_steps(optimizer: Optimizer) -> bool:
    """Whether the optimizer has state of a parameter."""
    return any(isinstance(key, Tensor) for key in optimizer.state)


def beside(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values in an optimizer's state whose keys are not parameters."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def put_beside(optimizer: Optimizer, values: Mapping[Any, Any]) -> None:
    """Replaces an optimizer's values beside its parameters by copies of these."""
    now = beside(optimizer.state)
    for key in now:
        del optimizer.state[key]
    for key, value in values.items():
        optimizer.state[key] = like(value, now.get(key))


def like(value: Any, now: Any) -> Any:
    """A copy whose tensors lie on the devices of the ones that are there ``now``, if any, else on their own."""
    there: dict[str, torch.device] = {}
    rebuilt(now, lambda tensor, where: there.setdefault(where, tensor.device))
    return rebuilt(value, lambda tensor, where: tensor.to(there.get(where, tensor.device), copy=True))


def _without_tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: rebuilt(values, lambda tensor, where: None) for key, values in state.items()}


def _restarted(now: Any, set_up: Any) -> Any:
    """The state that was ``set_up``, with the tensors that are there ``now`` set to 0."""
    if isinstance(now, Tensor):
        return _zeroed(now)
    if isinstance(set_up, dict):
        found = now if isinstance(now, dict) else {}
        return {key: _restarted(found.get(key), value) for key, value in set_up.items()}
    if isinstance(set_up, list | tuple) and isinstance(now, list | tuple) and len(now) == len(set_up):
        return type(set_up)(map(_restarted, now, set_up))
    return rebuilt(set_up, _zeroed)


def _leaves(values: Any) -> list[Any]:
    """Tensors and floating-point numbers, at any depth."""
    found: list[Any] = []
    rebuilt(values, lambda value, where: found.append(value), leaves=(Tensor, float))
    return found


def _finite(value: Tensor | float) -> bool:
    if not isinstance(value, Tensor):
        return math.isfinite(value)
    if value.layout != torch.strided:
        value = value.coalesce().values() if value.layout == torch.sparse_coo else value.values()
    try:
        return bool(torch.isfinite(value).all())
    except NotImplementedError:  # a quantized state (torchao's) supports few operations
        return bool(torch.isfinite(value.dequantize()).all())


def _zeroed(value: Any, where: str = "") -> Any:
    """The value with tensors set to 0, and a number that is not finite replaced by 0."""
    if not isinstance(value, Tensor):
        return value if math.isfinite(value) else 0.0
    _clear(value)
    return value


def _clear(tensor: Tensor) -> None:
    try:
        tensor.zero_()
    except NotImplementedError:
        tensor.copy_(torch.zeros(tensor.shape, device=tensor.device))


def device_of(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> torch.device:
    """The device on which torch keeps a value of a parameter's state: step counters of all but fused and capturable
    optimizers are on the CPU."""
    counts = key == "step" and value.dim() == 0 and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if counts else parameter.device

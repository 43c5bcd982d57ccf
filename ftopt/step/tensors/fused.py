"""Outer steps of built-in methods as calls of kernels, with the bits of the methods' own torch operations.

`fused` knows which built-in equations the kernels of `ftopt.kernels.outer_steps` compute. A method with code of its own
in their place (an overridden `outer_step`, another outer optimizer, another schedule) gets None, and is computed by
`Method.outer_step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ftopt.kernels import loader
from ftopt.kernels.loader import Kernel, Loader
from ftopt.methods import Method, Round
from ftopt.methods.diloco import DiLoCo, OuterOptimized
from ftopt.methods.local_sgd import Averaging, LocalSGD
from ftopt.methods.outer_optimizers import SGD, Adam, ConstantRate, CosineRate, LinearRate, OuterOptimizer
from ftopt.methods.slowmo import NO_RATE, SlowMo
from ftopt.step.tensors.digest import block_sums, blocks_of

_OPTIMIZED, _SLOW, _AVERAGED = OuterOptimized.outer_step, SlowMo.outer_step, (Averaging.outer_step, Averaging.average)
_SGD, _ADAM, _SCHEDULES = SGD.step, Adam.step, (ConstantRate, LinearRate, CosineRate)
_NOT_FINITE = 0x7F800000
"""The bits of infinity."""
_WORD_BYTES = 8
ROW, LANES = 1024, 64
"""Elements of a row, whose squares are summed together, and the number of its sums."""
_CHECKED = 16_384 + 1_001
"""Elements of `difference`: more than a block, and too few for torch to use several threads."""


class Kernels(NamedTuple):
    """The kernels of outer steps."""

    displace: Kernel
    average: Kernel
    plain: Kernel
    momentum: Kernel
    adam: Kernel


OUTER_STEPS = Loader("outer steps", "ftopt.kernels.outer_steps", Kernels)


@dataclass(frozen=True, slots=True)
class Fused:
    """One outer step by a kernel.

    Args:
        names: the flat tensors of the outer state, in the kernel's order.
        scalars: the scalars of the next outer state.
        kernel: called with the arrays of the anchor, the mean, the present and the next tensors of the state, then
            with ``arguments``, then with the sums of the next anchor and of the next tensors.
    """

    names: tuple[str, ...]
    scalars: Mapping[str, Tensor]
    kernel: Kernel
    arguments: tuple[Any, ...] = ()

    def step(
        self, anchor: Tensor, mean: Tensor, old: Sequence[Tensor], new: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> tuple[float, bool]:
        """Steps one piece, which begins at a digest's block.

        Args:
            anchor: flat fp32.
            mean: the same; becomes the next anchor.
            old: the present tensors of the state, in the order of ``names``.
            new: memory for the next ones.
            sums: memory for the `block_sums` of the next anchor and of ``new``, int64.

        Returns:
            The largest change of an element of the anchor, inf if one is not finite; whether ``new`` is finite.
        """
        flats = [tensor.numpy() for tensor in (anchor, mean, *old, *new)]
        found = self.kernel(*flats, *self.arguments, *(each.numpy() for each in sums))
        moved, of_new = found if isinstance(found, tuple) else (found, 0)
        return peak_of(moved), of_new < _NOT_FINITE


def peak_of(bits: int) -> float:
    """The largest absolute value that a kernel has found; inf for NaN."""
    return float(numpy.int32(min(bits, _NOT_FINITE)).view(numpy.float32))


def displaced(kernels: Kernels, a: Tensor, b: Tensor, out: Tensor | None, factor: float, squares: Tensor) -> float:
    """``out <- factor * (a - b)``, unless ``out`` is None. Returns the largest absolute element of ``a - b``, inf for
    NaN; adds its squares to the sums ``squares``, see `ftopt.step.tensors.pieces.Measured`."""
    place = a.numpy()[:0] if out is None else out.numpy()
    return peak_of(kernels.displace(a.numpy(), b.numpy(), place, numpy.float32(factor), squares.numpy()))


def fits(*tensors: Tensor) -> bool:
    """Whether these kernels can work on these tensors: flat fp32, and equally long."""
    shape = tensors[0].shape
    alike = all(tensor.shape == shape and tensor.dtype == torch.float32 for tensor in tensors)
    return alike and len(shape) == 1 and loader.fits(*tensors)


def fused(
    kernels: Kernels, method: Method, anchor: Tensor, state: Mapping[str, Tensor], mean: Tensor, round: Round
) -> Fused | None:
    """The method's next outer step by kernels; None: they do not compute it. Arguments as `Method.outer_step`."""
    found = _of(kernels, method, state, round) if anchor.numel() else None
    if found is None or state.keys() != {*found.names, *found.scalars}:
        return None
    flats = [anchor, mean, *(state[name] for name in found.names)]
    return found if fits(*flats) and not any(flat.data_ptr() % _WORD_BYTES for flat in flats) else None


def _of(kernels: Kernels, method: Method, state: Mapping[str, Tensor], round: Round) -> Fused | None:
    step = type(method).outer_step
    if isinstance(method, OuterOptimized) and step is _OPTIMIZED:
        rule = method.outer
        if not isinstance(rule, SGD | Adam) or type(rule.schedule) not in _SCHEDULES:
            return None
        if (isinstance(rule, Adam) or rule.moves) and "step" not in state:
            return None
        if isinstance(rule, SGD) and type(rule).step is _SGD:
            return _of_sgd(kernels, rule, state)
        return _of_adam(kernels, rule, state) if isinstance(rule, Adam) and type(rule).step is _ADAM else None
    if isinstance(method, SlowMo) and step is _SLOW:
        gamma = round.mean(0)
        factors = _in_fp32(1 / gamma, method.slow_momentum, method.slow_lr * gamma) if gamma > NO_RATE else None
        return Fused(("momentum",), {}, kernels.momentum, (factors, False)) if factors is not None else None
    if isinstance(method, Averaging) and (step, type(method).average) == _AVERAGED:
        return Fused((), {}, kernels.plain, (numpy.float32(1),)) if round.lossy else Fused((), {}, kernels.average)
    return None


def _of_sgd(kernels: Kernels, rule: SGD, state: Mapping[str, Tensor]) -> Fused | None:
    if type(rule.momentum_schedule) not in _SCHEDULES:
        return None
    lr, momentum, scalars = rule.factors(state)
    factors = _in_fp32(1.0, momentum, lr)
    if factors is None:
        return None
    if rule.momentum:
        return Fused(("momentum",), scalars, kernels.momentum, (factors, rule.nesterov))
    return Fused((), scalars, kernels.plain, factors[2:])


def _of_adam(kernels: Kernels, rule: Adam, state: Mapping[str, Tensor]) -> Fused | None:
    found, scalars = rule.factors(state)
    factors = _in_fp32(*found)
    return Fused(("m", "v"), scalars, kernels.adam, (factors,)) if factors is not None else None


def _in_fp32(*factors: float) -> tuple[Any, ...] | None:
    """Factors rounded to fp32, as torch rounds them; None: one is beyond its range."""
    found = numpy.array(factors, dtype=numpy.float64)
    if not (numpy.abs(found) <= numpy.finfo(numpy.float32).max).all():
        return None
    return tuple(found.astype(numpy.float32))


def difference(kernels: Kernels) -> str:
    """The name of the first built-in method whose outer step has other bits by kernels than by torch, on random values
    that are the same each time; "": none. It guards against a compiler that reorders or fuses operations."""
    chance = torch.Generator().manual_seed(0)
    anchor, mean = (torch.randn(_CHECKED, generator=chance, dtype=torch.float32, device="cpu") for _ in range(2))
    mean[:8] = mean.new_tensor([0.0, -0.0, 1e-45, -1e-39, 1e15, -3e-38, 1e-20, 1.0])
    for name, method in _methods().items():
        round = Round(0, 2, 1, (), scalars=((0.3,),))
        state = method.init(anchor)
        for each in state.values():
            each.uniform_(generator=chance) if each.dim() else each.fill_(3.0)
        expected, expected_state = method.outer_step(anchor, state, mean.clone(), round)
        made, step = mean.clone(), fused(kernels, method, anchor, state, mean, round)
        if step is None:
            return name
        new = [torch.empty_like(anchor) for _ in step.names]
        sums = [torch.empty(blocks_of(anchor), dtype=torch.int64) for _ in range(1 + len(new))]
        moved, finite = step.step(anchor, made, [state[key] for key in step.names], new, sums)
        wanted = [expected, *(expected_state[key] for key in step.names)]
        same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip([made, *new], wanted, strict=True))
        same = same and all(torch.equal(a, block_sums(b)) for a, b in zip(sums, wanted, strict=True))
        if not (same and finite and moved == float((expected - anchor).abs().max())):
            return name
    left, apart = torch.empty_like(anchor), anchor - mean
    sums_of_squares = torch.zeros(-(-_CHECKED // ROW) * LANES, dtype=torch.float64)
    peak = displaced(kernels, anchor, mean, left, 0.3, sums_of_squares)
    same = torch.equal(_bits(left), _bits(apart * 0.3)) and peak == float(apart.abs().max())
    rows = torch.nn.functional.pad(apart * apart, (0, -_CHECKED % ROW)).view(-1, ROW)
    while rows.shape[1] > LANES:
        rows = rows[:, : rows.shape[1] // 2] + rows[:, rows.shape[1] // 2 :]
    return "" if same and torch.equal(sums_of_squares, rows.double().view(-1)) else "the payload"


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int32)


def _methods() -> dict[str, Method]:
    """A method for each path through the kernels."""
    rules: dict[str, OuterOptimizer] = {
        "SGD": SGD(lr=0.3),
        "SGD with momentum": SGD(momentum=0.9),
        "Nesterov": SGD(momentum=0.9, nesterov=True),
        "Adam": Adam(),
    }
    methods: dict[str, Method] = {name: DiLoCo(sync_every=1, outer=rule) for name, rule in rules.items()}
    return methods | {"SlowMo": SlowMo(sync_every=1), "LocalSGD": LocalSGD(sync_every=1)}

"""`undo_step` reverts the last step of an optimizer without a copy of the parameters."""

from __future__ import annotations

from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.undo.record import record_steps
from ftopt.optimizer.undo.revert import Undone, revert
from ftopt.optimizer.wrapper import ReplicaOptimizer


def undo_step(optimizer: Optimizer) -> Undone:
    r"""Reverts the last ``step()``, or repairs one that raised half-way: parameters, moments and step counts.

    Steps of `torch.optim.SGD` (momentum, dampening, Nesterov), ``Adam`` and ``AdamW`` are inverted without copies:
    including weight decay and ``maximize``, in their for-loop, foreach and fused implementations, also steps that
    raised half-way. Values are restored up to rounding; moments that the step created are removed. Steps of any other
    optimizer, and steps whose settings have no inverse (AMSGrad, betas or momentum between 0 and 0.01, lr * wd above
    0.5), are undone bit for bit by a copy of parameters and inner state that is made before a recorded step
    (`undoable`). An `ftopt.ReplicaOptimizer` around one or several of them must have been made with ``undo=True``.

    The gradients stay, so that ``step()`` takes the same step again. Changes by the backward pass (BatchNorm's
    statistics, the random generators) and schedulers' counts are not restored.

    **Rounding.** With u the unit roundoff of the parameter's dtype (fp32 6e-8, bf16 4e-3, fp64 1e-16), x' the value of
    x after the step, D = \|g\| + wd \|p\|, and U the step's movement of the parameter without weight decay:

        |p found - p|  <=  8 u (|p| + U) / (1 - lr wd)
        |b found - b|  <=  8 u (|b'| + (1 - dampening) D) / momentum      SGD's momentum_buffer
        |m found - m|  <=  8 u (|m'| + (1 - beta1) D) / beta1             Adam's exp_avg
        |v found - v|  <=  8 u (v' + (1 - beta2) D^2) / beta2             Adam's exp_avg_sq

    A second moment far below the step's squared gradient is thus lost in its rounding. Each cycle of ``undo_step`` and
    ``step`` adds the same error again (``docs/checkpoints.md`` has figures).

    **Without a record** (a bare optimizer for which `undoable` has not been called) the present gradients and groups'
    settings are assumed to be the step's, and the state must show which parameters were stepped. A step of Adam counts
    as incomplete if the step counts, in the order of the groups, fall by one once; a step of SGD, if the momentum
    buffers of the later groups do not exist yet. Any other step counts as complete.

    **In a job** (`ReplicaOptimizer`) the step is no longer counted, and the arguments of ``log()`` for it are dropped.
    This is possible while no contribution holds the step: this replica has neither proposed it nor applied an outer
    step since. A step that raised was never counted, and can be repaired at any time.

    Args:
        optimizer: the optimizer that took the step. Call this right after the step: before ``zero_grad``, the next
            ``backward`` and anything else that changes parameters, gradients or (without a record) learning rates.

    Returns:
        What was done.

    Raises:
        ftopt.errors.UserError: this step cannot be undone; the message says why: an unrecorded step without an inverse,
            gradients that are gone or have been changed, NaN or Inf, no step to undo, or a step that is in a
            contribution. Nothing has changed.

    Source: SWIFT (arXiv 2302.06173), section 4. SWIFT marks each layer's update; here version counters and a few
    elements of fused tensors show the updated parts.
    """
    if isinstance(optimizer, ReplicaOptimizer):
        return optimizer._core.undo_step()
    return revert([optimizer])


def undoable(optimizer: Optimizer) -> Optimizer:
    """Records an optimizer's steps, so that `undo_step` knows the last one exactly.

    A wrapped optimizer records its steps if it was made by ``ftopt.wrap(..., undo=True)``.

    Of SGD, Adam and AdamW the record holds the groups' settings, the tensors' version counters, weak references to the
    gradients and (fused or sharded) a few elements, at about 1.5 microseconds per tensor and step. For any other
    optimizer it is a copy of the parameters and the optimizer's state: as much memory again, and a pass over it at each
    step.

    Args:
        optimizer: an optimizer that is not wrapped.

    Returns:
        The same optimizer.

    Raises:
        ftopt.errors.UserError: the optimizer is wrapped without ``undo=True``.
    """
    if isinstance(optimizer, ReplicaOptimizer):
        if optimizer._core.training.last is not None:
            return optimizer
        raise UserError("undoable: this optimizer is wrapped; call ftopt.wrap(..., undo=True)")
    record_steps(optimizer)
    return optimizer

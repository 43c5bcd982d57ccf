"""The link between a method and `torch.optim`: the wrapped optimizer, and its replica's part in the job."""

from ftopt.optimizer.undo.revert import Undone as Undone
from ftopt.optimizer.undo_step import undo_step as undo_step
from ftopt.optimizer.undo_step import undoable as undoable
from ftopt.optimizer.wrapper import OuterOptimizer as OuterOptimizer
from ftopt.optimizer.wrapping import wrap as wrap

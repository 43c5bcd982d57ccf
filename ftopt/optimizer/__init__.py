"""Where a method meets `torch.optim`: the wrapper, flat views of the parameters, and the outer step."""

from ftopt.optimizer.reverting import Undone as Undone
from ftopt.optimizer.undo import undo_step as undo_step
from ftopt.optimizer.undo import undoable as undoable
from ftopt.optimizer.wrapper import OuterOptimizer as OuterOptimizer
from ftopt.optimizer.wrapper import wrap as wrap

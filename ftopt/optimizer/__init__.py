"""Where a method meets `torch.optim`: the wrapper, flat views of the parameters, and the outer step."""

from ftopt.optimizer.wrapper import OuterOptimizer as OuterOptimizer
from ftopt.optimizer.wrapper import wrap as wrap

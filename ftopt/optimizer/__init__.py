"""The link between a method and `torch.optim`: the wrapped optimizer, and its replica's part in the job."""

from ftopt.optimizer.wrapper import ReplicaOptimizer as ReplicaOptimizer
from ftopt.optimizer.wrapping import wrap as wrap

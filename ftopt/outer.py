"""Outer optimizers, for a method's ``outer``, and the schedules of their rate."""

from ftopt.methods.outer_optimizers import SGD as SGD
from ftopt.methods.outer_optimizers import Adam as Adam
from ftopt.methods.outer_optimizers import ConstantRate as ConstantRate
from ftopt.methods.outer_optimizers import CosineRate as CosineRate
from ftopt.methods.outer_optimizers import OuterOptimizer as OuterOptimizer
from ftopt.methods.outer_optimizers import Schedule as Schedule
from ftopt.methods.torch_optimizers import Torch as Torch
from ftopt.methods.values import Execution as Execution

"""What is computed: one frozen dataclass a method, tensors in and tensors out.

A method answers three questions and does no I/O: *is it time?* (`Method.due`), *what do I send?*
(`Method.payload`), *what does the agreed result do to the anchor and the outer state?* (`Method.outer_step`).
When replicas meet, who takes part, retries and joins are written once for all methods, elsewhere.
"""

from ftopt.methods.diloco import DiLoCo as DiLoCo
from ftopt.methods.local_sgd import LocalSGD as LocalSGD
from ftopt.methods.method import Method as Method
from ftopt.methods.method import OuterState as OuterState
from ftopt.methods.outer_optimizers import SGD as SGD
from ftopt.methods.outer_optimizers import OuterOptimizerRule as OuterOptimizerRule
from ftopt.methods.triggers import Progress as Progress

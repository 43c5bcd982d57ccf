"""What is computed: one frozen dataclass a method, tensors in and tensors out.

A method answers three questions and does no I/O: *is it time?* (`Method.due`), *what do I send?*
(`Method.payload`), *what does the agreed result do to the anchor and the outer state?* (`Method.outer_step`).
When replicas meet, who takes part, retries, overlap and joins are written once for all methods, elsewhere.
"""

from ftopt.methods.decoupled import DecoupledDiLoCo as DecoupledDiLoCo
from ftopt.methods.diloco import DiLoCo as DiLoCo
from ftopt.methods.fragments import Layout as Layout
from ftopt.methods.fragments import Parameter as Parameter
from ftopt.methods.fragments import Span as Span
from ftopt.methods.local_sgd import LocalSGD as LocalSGD
from ftopt.methods.method import ContributionStats as ContributionStats
from ftopt.methods.method import Method as Method
from ftopt.methods.method import OuterState as OuterState
from ftopt.methods.method import ReplicaView as ReplicaView
from ftopt.methods.method import Round as Round
from ftopt.methods.paft import PAFT as PAFT
from ftopt.methods.slowmo import SlowMo as SlowMo
from ftopt.methods.streaming import StreamingDiLoCo as StreamingDiLoCo
from ftopt.methods.sync_sgd import GRADIENT as GRADIENT
from ftopt.methods.sync_sgd import SyncSGD as SyncSGD
from ftopt.methods.triggers import Due as Due
from ftopt.methods.triggers import Progress as Progress

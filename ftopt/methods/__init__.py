"""The methods: one frozen dataclass each, tensors in and tensors out.

A method answers three questions and does no I/O: *when?* (`Method.timing`), *what is sent?* (`Method.payload`), *what
does the agreed result do to the anchor and the outer state?* (`Method.outer_step`). Quorums, retries, overlap and joins
are implemented once for all methods, elsewhere.
"""

from ftopt.methods.decoupled import DecoupledDiLoCo as DecoupledDiLoCo
from ftopt.methods.diloco import DiLoCo as DiLoCo
from ftopt.methods.diloco import SparseLoCo as SparseLoCo
from ftopt.methods.fragments import Layout as Layout
from ftopt.methods.fragments import Span as Span
from ftopt.methods.local_sgd import LocalSGD as LocalSGD
from ftopt.methods.method import Method as Method
from ftopt.methods.paft import PAFT as PAFT
from ftopt.methods.slowmo import SlowMo as SlowMo
from ftopt.methods.streaming import StreamingDiLoCo as StreamingDiLoCo
from ftopt.methods.sync_sgd import SyncSGD as SyncSGD
from ftopt.methods.timing import BySpeed as BySpeed
from ftopt.methods.timing import Timing as Timing
from ftopt.methods.values import Aggregation as Aggregation
from ftopt.methods.values import ContributionStats as ContributionStats
from ftopt.methods.values import Execution as Execution
from ftopt.methods.values import OuterState as OuterState
from ftopt.methods.values import Overlap as Overlap
from ftopt.methods.values import ReplicaView as ReplicaView
from ftopt.methods.values import Round as Round

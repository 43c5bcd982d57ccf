"""Rules that partition a model into fragments, for a streaming method's ``fragments``."""

from ftopt.methods.fragments import Balanced as Balanced
from ftopt.methods.fragments import Named as Named
from ftopt.methods.fragments import Parameter as Parameter
from ftopt.methods.fragments import Partition as Partition
from ftopt.methods.fragments import Strided as Strided

"""ftopt on a Ray cluster: Ray Train's ``TorchTrainer`` with `FtoptConfig` (``docs/launching.md``).

Nothing else in ftopt imports ray, and ``import ftopt`` does not import this.
"""

try:
    from ray.train.torch import TorchConfig as _  # noqa: F401
    from ray.train.v2._internal.execution.worker_group import ReplicaGroup as _replica_groups  # noqa: F401
except ImportError as error:
    raise ImportError(f"ftopt.ray needs Ray Train 2.60 ({error}); install it with: pip install 'ftopt[ray]'") from error

from ftopt.ray.config import FtoptConfig

__all__ = ["FtoptConfig"]

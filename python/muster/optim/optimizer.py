"""torch.distributed.optim.optimizer's name."""

from .distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

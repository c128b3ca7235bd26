# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.optim.optimizer's name."""

from .distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

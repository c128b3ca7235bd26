"""torch.distributed.optim's names: an optimizer whose state is divided among the ranks."""

from .zero_redundancy_optimizer import ZeroRedundancyOptimizer  # noqa: F401

"""torch.distributed.optim's names: an optimizer whose state is divided among the ranks, and one over parameters of several workers."""

from .zero_redundancy_optimizer import ZeroRedundancyOptimizer  # noqa: F401


def __getattr__(name):
    # It brings calls to other workers along, which few programs use.
    if name == "DistributedOptimizer":
        from .distributed_optimizer import DistributedOptimizer

        return DistributedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.optim's names: an optimizer whose state is divided among the ranks, one over
parameters of several workers, and one whose parameters are averaged now and then.
"""

from .post_localSGD_optimizer import PostLocalSGDOptimizer  # noqa: F401
from .zero_redundancy_optimizer import ZeroRedundancyOptimizer  # noqa: F401

__all__ = [
    "DistributedOptimizer",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "as_functional_optim",
]


def __getattr__(name):
    # It brings calls to other workers along, which few programs use.
    if name == "DistributedOptimizer":
        from .distributed_optimizer import DistributedOptimizer

        return DistributedOptimizer
    # Torch's, which know of no other rank.
    if name in (
        "as_functional_optim",
        "functional_optim_map",
        "register_functional_optim",
        "_apply_optimizer_in_backward",
        "_get_in_backward_optimizers",
    ):
        import torch.distributed.optim

        return getattr(torch.distributed.optim, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

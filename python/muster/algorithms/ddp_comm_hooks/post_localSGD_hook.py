# SPDX-License-Identifier: BSD-3-Clause
"""Gradients averaged over all ranks at first, and over small groups later (post-local SGD, Lin et
al., ICLR 2020).
"""

import torch

import muster as dist

from .default_hooks import allreduce_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]


class PostLocalSGDState:
    """process_group: of the first start_localSGD_iter passes; None: the model's own. subgroup: of
    those after; None: the ranks of this host, in a group that the first of them makes, on every
    rank. post_local_gradient_allreduce=False: they average nothing. `iter` counts the passes until
    then.
    """

    __slots__ = [
        "process_group",
        "subgroup",
        "start_localSGD_iter",
        "post_local_gradient_allreduce",
        "iter",
    ]

    def __init__(
        self, process_group, subgroup, start_localSGD_iter, post_local_gradient_allreduce=True
    ):
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket):
        """Counts a pass, at its last bucket."""
        if bucket.is_last():
            self.iter += 1


def post_localSGD_hook(state, bucket):
    """For `model.register_comm_hook(PostLocalSGDState(...), post_localSGD_hook)`, beside a model
    averager that brings the groups together after the optimizer's step: `PostLocalSGDOptimizer`
    does both.
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    if state.subgroup is None:
        state.subgroup, _ = dist.new_subgroups()
    return allreduce_hook(state.subgroup, bucket)

# SPDX-License-Identifier: BSD-3-Clause
"""Loss scaling for sharded models."""

import torch

import muster as dist

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler where each rank has its shards of the gradients: if those of one rank
    are not finite, no rank steps, and all go on with the same scale. process_group: the model's;
    None is the default group. The rest is torch's.

    `unscale_`, and `step` where it was not called before, are collective.
    """

    def __init__(
        self,
        device="cuda",
        init_scale=2.0**16,
        backoff_factor=0.5,
        growth_factor=2.0,
        growth_interval=2000,
        enabled=True,
        process_group=None,
    ):
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """By device, 1 where a gradient on any rank is not finite; a rank may have none."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = torch.stack(
            [found_inf, *(each.to(found_inf.device) for each in found.values())]
        ).amax()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.process_group)
        return {device: anywhere.to(device) for device in {found_inf.device, *found}}

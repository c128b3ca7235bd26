# SPDX-License-Identifier: BSD-3-Clause
"""Batch normalisation over the batches of all ranks."""

import torch

import muster as dist

from . import functional

__all__ = ["SyncBatchNorm", "adopt"]


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm on a group of muster's (process_group; None: the default group), for
    tensors on any device. In training mode forward and, where the input needs gradients, backward
    are collective: two all_reduces of a few numbers a channel each. Without a default group, and in
    evaluation mode, it is BatchNorm.

    DistributedDataParallel and FSDP make torch's SyncBatchNorm modules of a model such ones, in
    place.
    """

    def forward(self, input):
        """input: (batch, channels, ...). The same shape, normalised by the mean and variance of
        each channel over all ranks' batches, which may differ in size. Raises ValueError for fewer
        than two dimensions, and what `muster.all_reduce` raises.
        """
        group = self.process_group or dist.group.WORLD
        if not (self.training and group and group.size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        local_count = x.new_tensor([x.numel() // x.size(1)])
        sums = functional.all_reduce(torch.cat([x.sum(dims), local_count]), group=group)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        squares = functional.all_reduce((centred * centred).sum(dims), group=group)
        if self.track_running_stats:
            self._track(mean.detach(), squares.detach() / (count - 1))
        output = centred * torch.rsqrt(squares / count + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape)
        if self.bias is not None:
            output = output + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean, variance):
        self.num_batches_tracked.add_(1)
        by_count = self.momentum is None
        share = 1.0 / self.num_batches_tracked.item() if by_count else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """The module, or what takes its place: every BatchNorm in it is a SyncBatchNorm over that
        group. Parameters and buffers are the same tensors.
        """
        return adopt(torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group))


def adopt(module):
    """Makes torch's SyncBatchNorm modules inside muster's, in place, and returns `module`. Those of
    a torch.distributed group of their own stay, as do all where torch.distributed has a default
    group: there they find their ranks.
    """
    theirs = torch.distributed.is_available() and torch.distributed.is_initialized()
    for each in module.modules():
        if type(each) is not torch.nn.SyncBatchNorm:
            continue
        if isinstance(each.process_group, dist.ProcessGroup) or not (theirs or each.process_group):
            each.__class__ = SyncBatchNorm
    return module

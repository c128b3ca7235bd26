# SPDX-License-Identifier: BSD-3-Clause
"""Each rank its own part of a dataset."""

import torch.utils.data

from muster import _C

__all__ = ["DistributedSampler"]


class DistributedSampler(torch.utils.data.DistributedSampler):
    """torch's, which asks muster how many ranks there are and which one this is.

    num_replicas, rank: None is the default group's. shuffle: in another order every epoch, the same
    on all ranks, where `set_epoch` is called before each. drop_last: leaves out what cannot be
    shared equally; else some samples come twice. Raises ValueError (DistArgumentError) without a
    default group where num_replicas or rank is None, ValueError for a rank that is not there.
    """

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        if num_replicas is None:
            num_replicas = _C.get_world_size()
        if rank is None:
            rank = _C.get_rank()
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)

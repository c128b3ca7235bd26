# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    if rank == 0:
        tensor = torch.tensor([1.0])
    else:
        tensor = torch.tensor([0.0])
    dist.broadcast(tensor, 0)
    print("Rank ", rank, " has data ", tensor)

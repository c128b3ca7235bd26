# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    tensor = torch.tensor([0.0])
    if rank == 0:
        tensor += 1
        # rank 0 sends the tensor to rank 1
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        # rank 1 receives tensor from rank 0
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor)

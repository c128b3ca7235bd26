# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    tensor = torch.tensor([0.0])
    if rank == 0:
        tensor += 1
        # rank 0 sends the tensor to rank 1
        req = dist.isend(tensor=tensor, dst=1)
        print("Rank 0 started sending")
    elif rank == 1:
        # rank 1 receives tensor from rank 0
        req = dist.irecv(tensor=tensor, src=0)
        print("Rank 1 started receiving")
    if rank == 0 or rank == 1:
        req.wait()
    print("Rank ", rank, " has data ", tensor)

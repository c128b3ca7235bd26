# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    tensor = torch.tensor([rank], dtype=torch.float32)
    gather_list = [torch.zeros(1) for _ in range(4)] if rank == 0 else []
    dist.gather(tensor, gather_list=gather_list, dst=0)
    print("Rank ", rank, " has data ", tensor)
    print("Rank ", rank, " has list ", gather_list)

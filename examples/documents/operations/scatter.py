# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    tensor = torch.zeros(1)
    scatter_list = (
        [torch.tensor([i], dtype=torch.float32) for i in range(size)] if rank == 0 else []
    )
    dist.scatter(tensor, scatter_list=scatter_list)
    print("Rank ", rank, " has list ", scatter_list)
    print("Rank ", rank, " has data ", tensor)

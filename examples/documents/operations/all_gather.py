# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    tensor = torch.tensor([rank], dtype=torch.float32)
    tensor_list = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(tensor_list, tensor)
    print("Rank ", rank, " has data ", tensor)
    print("Rank ", rank, " has list ", tensor_list)

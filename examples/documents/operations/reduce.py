# SPDX-License-Identifier: BSD-3-Clause
import torch

import muster as dist


def run(rank, size):
    tensor = torch.tensor([rank], dtype=torch.float32)
    dist.reduce(tensor, 0, op=dist.ReduceOp.SUM)
    print("Rank ", rank, " has data ", tensor)

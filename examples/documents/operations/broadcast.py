import torch

import muster as dist


def run(rank, size):
    if rank == 0:
        tensor = torch.tensor([1.])
    else:
        tensor = torch.tensor([0.])
    dist.broadcast(tensor, 0)
    print('Rank ', rank, ' has data ', tensor)

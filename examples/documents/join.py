# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs, of the training tutorial."""

import os

import torch
import torch.multiprocessing as mp

import muster as dist
from muster.algorithms.join import Join
from muster.nn.parallel import DistributedDataParallel as DDP

BACKEND = "gloo"
WORLD_SIZE = 2
NUM_INPUTS = 5


def worker(rank):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(BACKEND, rank=rank, world_size=WORLD_SIZE)

    model = DDP(torch.nn.Linear(1, 1).to(rank), device_ids=[rank])
    # Rank 1 gets one more input than rank 0
    inputs = [torch.tensor([1]).float() for _ in range(NUM_INPUTS + rank)]

    num_inputs = 0
    with Join([model]):
        for input in inputs:
            num_inputs += 1
            loss = model(input).sum()
            loss.backward()

    print(f"Rank {rank} has exhausted all {num_inputs} of its inputs!")
    dist.destroy_process_group()


def main():
    mp.spawn(worker, nprocs=WORLD_SIZE, join=True)


if __name__ == "__main__":
    main()

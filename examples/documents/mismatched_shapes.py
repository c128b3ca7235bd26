# SPDX-License-Identifier: BSD-3-Clause
"""The reference's all_reduce of tensors of 10 and 20 elements, at DETAIL."""

import os

import torch
import torch.multiprocessing as mp

import muster as dist


def worker(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.accelerator.set_device_index(rank)
    tensor = torch.randn(10 if rank == 0 else 20).to(rank)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize(rank)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29501")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    mp.spawn(worker, nprocs=2, args=())

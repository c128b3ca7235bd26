"""The reference's monitored barrier that one rank does not come to; a rank that waits for nothing stays until the other knows."""

import os
from datetime import timedelta

import torch.multiprocessing as mp

import muster as dist


def worker(rank, told):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group_gloo = dist.new_group(backend="gloo")
    if rank not in [1]:
        try:
            dist.monitored_barrier(group=group_gloo, timeout=timedelta(seconds=2))
        except RuntimeError as error:
            print(error)
        told.set()
    told.wait(60)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29501")
    mp.spawn(worker, nprocs=2, args=(mp.get_context("spawn").Event(),))

# SPDX-License-Identifier: BSD-3-Clause
"""The reference's monitored barriers: rank 1 does not come to the first; nobody comes to the other,
which names all.
"""

import os
from datetime import timedelta

import torch.multiprocessing as mp

import muster as dist


def worker(rank, told):
    dist.init_process_group("gloo", rank=rank, world_size=3)
    # monitored barrier requires gloo process group to perform host-side sync.
    group_gloo = dist.new_group(backend="gloo")
    if rank not in [1]:
        try:
            dist.monitored_barrier(group=group_gloo, timeout=timedelta(seconds=2))
        except RuntimeError as error:
            if rank == 0:
                print(error)
    # Example with wait_all_ranks=True
    if dist.get_rank() == 0:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)
        except RuntimeError as error:
            # indicating that ranks 1, 2, ... world_size - 1 did not call into
            # monitored_barrier.
            print(error)
        told.set()
    told.wait(60)  # a rank that waits for nothing stays until the other knows


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29501")
    mp.spawn(worker, nprocs=3, args=(mp.get_context("spawn").Event(),))

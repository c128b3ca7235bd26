# SPDX-License-Identifier: BSD-3-Clause
"""The reference's program on the streams of an accelerator: what a collective gives is used on
another stream.
"""

import os

import torch
import torch.multiprocessing as mp

import muster as dist


def worker(rank):
    # Code runs on each rank.
    dist.init_process_group("gloo", rank=rank, world_size=2)
    output = torch.tensor([rank]).to(rank)
    s = torch.Stream(device=output.device)
    default_stream = torch.accelerator.current_stream(output.device)
    handle = dist.all_reduce(output, async_op=True)
    # Wait ensures the operation is enqueued, but not necessarily complete.
    handle.wait()
    # Using result on non-default stream.
    with s:
        s.wait_stream(default_stream)
        output.add_(100)
    if rank == 0:
        # if the explicit call to wait_stream was omitted, the output below will be
        # non-deterministically 1 or 101, depending on whether the allreduce overwrote
        # the value after the add completed.
        print(output)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29501")
    mp.spawn(worker, nprocs=2, args=())

# SPDX-License-Identifier: BSD-3-Clause
"""The reference's net of two layers, with everything logged. With the argument `unused` the loss
leaves out what the first layer gives.
"""

import os
import sys

import torch
import torch.multiprocessing as mp

import muster as dist
import muster.nn.parallel


class TwoLinLayerNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(10, 10, bias=False)
        self.b = torch.nn.Linear(10, 1, bias=False)

    def forward(self, x):
        a = self.a(x)
        b = self.b(x)
        return (a, b)


def worker(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.accelerator.set_device_index(rank)
    print("init model")
    model = TwoLinLayerNet().to(rank)
    print("init ddp")
    ddp_model = muster.nn.parallel.DistributedDataParallel(model, device_ids=[rank])

    inp = torch.randn(10, 10).to(rank)
    print("train")

    for _ in range(20):
        output = ddp_model(inp)
        loss = output[1] if sys.argv[1:] == ["unused"] else output[0] + output[1]
        loss.sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29501")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # set to DETAIL for runtime logging.
    mp.spawn(worker, nprocs=2, args=())

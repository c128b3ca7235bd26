"""The reference's net of two layers, with everything logged, on the CPU."""

import os

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
    print("init model")
    model = TwoLinLayerNet()
    print("init ddp")
    ddp_model = muster.nn.parallel.DistributedDataParallel(model)

    inp = torch.randn(10, 10)
    print("train")

    for _ in range(20):
        output = ddp_model(inp)
        loss = output[0] + output[1]
        loss.sum().backward()

    # Where the loss leaves out what the first layer gives, backward or the next forward names its parameters.
    try:
        for _ in range(2):
            ddp_model(inp)[1].sum().backward()
    except dist.DistError as error:
        print("a.weight" in str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29501")
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # set to DETAIL for runtime logging.
    mp.spawn(worker, nprocs=2, args=())

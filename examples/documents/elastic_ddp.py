"""elastic_ddp of the training tutorial, on the CPU: for torchrun or muster run."""

from ddp import ToyModel, train_once

import muster as dist
from muster.nn.parallel import DistributedDataParallel as DDP


def demo_basic():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"Start running basic DDP example on rank {rank}.")
    train_once(DDP(ToyModel()))
    dist.destroy_process_group()


if __name__ == "__main__":
    demo_basic()

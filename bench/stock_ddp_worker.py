# SPDX-License-Identifier: BSD-3-Clause
"""Steps of the model alone, of stock torch's DistributedDataParallel on Gloo and, where asked for,
of the same on muster's engine and in a group of each rank alone, where nothing is sent, in turn;
each rank writes starts and ends of every turn, in milliseconds, to `result.RANK` in the folder.
"""

import argparse
import time

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )

    def forward(self, x):
        return self.layers(x)

    @staticmethod
    def inputs():
        return torch.randn(64, 784)


class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm_first = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm_second = nn.BatchNorm2d(outer)
        self.shortcut = (
            nn.Conv2d(inner, outer, 1, stride, bias=False) if inner != outer else nn.Identity()
        )

    def forward(self, x):
        y = self.norm_second(self.second(torch.relu(self.norm_first(self.first(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks, inner = [], 64
        for outer in (64, 128, 256, 512):
            blocks += [Block(inner, outer, 1 if inner == outer else 2), Block(outer, outer, 1)]
            inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 10)

    def forward(self, images):
        return self.head(self.blocks(torch.relu(self.norm(self.stem(images)))).mean((2, 3)))

    @staticmethod
    def inputs():
        return torch.randn(8, 3, 32, 32)


class Trainer:
    """One model with its optimizer."""

    def __init__(self, options, group):
        module = ResNet() if options.model == "resnet" else Mlp()
        self.model = module
        if group:
            self.model = nn.parallel.DistributedDataParallel(module, process_group=group)
        self.optimizer = torch.optim.SGD(module.parameters(), 0.01)
        self.inputs = module.inputs()
        self.labels = torch.randint(10, (len(self.inputs),))

    def step(self):
        """Start and end, in milliseconds, of a step that all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()
        return start * 1000, time.perf_counter() * 1000


def train(rank, options):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.folder}/stock-store",
        rank=rank,
        world_size=options.ranks,
    )
    trainers = [Trainer(options, None), Trainer(options, dist.new_group(backend="gloo"))]
    if options.muster:
        import muster.torch  # noqa: F401

        alone = [dist.new_group([each], backend="muster") for each in range(options.ranks)]
        trainers += [
            Trainer(options, dist.new_group(backend="muster")),
            Trainer(options, alone[rank]),
        ]
    with open(f"{options.folder}/result.{rank}", "w") as result:
        for turn in range(options.warm + options.steps):
            times = [()] * len(trainers)
            for i in range(len(trainers)):
                which = (turn + i) % len(trainers)
                times[which] = trainers[which].step()
            if turn >= options.warm:
                print(*(each for span in times for each in span), file=result)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--muster", action="store_true", help="its backend is measured too")
    options = parser.parse_args()
    run_ranks(options.ranks, lambda rank: train(rank, options))


if __name__ == "__main__":
    main()

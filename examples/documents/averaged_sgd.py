# SPDX-License-Identifier: BSD-3-Clause
"""Distributed synchronous SGD by hand, of the training tutorial, on digits instead of the
tutorial's own data.
"""

import pathlib
import random
from math import ceil

import torch
import torch.nn.functional as F
import torch.optim as optim

import muster as dist

DIGITS = pathlib.Path(__file__).parents[1] / "data/digits.csv"


def partition_dataset():
    rows = torch.tensor(
        [
            [float(word) for word in line.split(",")]
            for line in DIGITS.read_text().splitlines()
            if line[:1].isdigit()
        ]
    )
    data = torch.utils.data.TensorDataset(rows[:, :-1] / 16, rows[:, -1].long())
    size = dist.get_world_size()
    bsz = 128 // size
    indexes = list(range(len(data)))
    random.Random(1234).shuffle(indexes)
    partition = torch.utils.data.Subset(data, indexes[dist.get_rank() :: size])
    return torch.utils.data.DataLoader(partition, batch_size=bsz, shuffle=True), bsz


def Net():
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 10),
        torch.nn.LogSoftmax(dim=1),
    )


def average_gradients(model):
    """Gradient averaging."""
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1234)
    train_set, bsz = partition_dataset()
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    num_batches = ceil(len(train_set.dataset) / float(bsz))
    for epoch in range(10):
        epoch_loss = 0.0
        for data, target in train_set:
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank ", dist.get_rank(), ", epoch ", epoch, ": ", epoch_loss / num_batches)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()

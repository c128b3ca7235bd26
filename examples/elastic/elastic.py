# SPDX-License-Identifier: BSD-3-Clause
"""Training that goes on when a rank is killed: the other ranks keep their processes.

    muster run --standalone --nproc-per-node 4 --elastic keep --max-restarts 10 --spares 1
        examples/elastic/elastic.py

Rank 1 kills itself in the middle, once. Kill others meanwhile, by `kill -9`. In the end rank 0
compares the network with that of one process that nobody disturbed.
"""

import csv
import os
import pathlib
import signal
import sys

import torch

import muster as dist
from muster import elastic
from muster.nn.parallel import DistributedDataParallel

BATCH, STEPS, DIES = 60, 200, 100
DIGITS = pathlib.Path(__file__).parents[1] / "data/digits.csv"


def load_digits():
    with DIGITS.open() as file:
        rows = torch.tensor([[float(each) for each in row] for row in csv.reader(file)])
    return rows[:, :64].double() / 16, rows[:, 64].long()


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10)
    ).double()


def loss_of(model, data, step, rank, ranks):
    """The loss of one rank's share of the step's batch."""
    share = BATCH // ranks
    begin = step * BATCH % (len(data[1]) - BATCH) + rank * share
    inputs, labels = (each[begin : begin + share] for each in data)
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def distance_from_undisturbed(net, data):
    other = make_net()
    optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(other, data, step, 0, 1).backward()
        optimizer.step()
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def main():
    data = load_digits()
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    state = elastic.State(net=net, optimizer=optimizer, step=0)

    def train():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        print(f"rank {rank} of {ranks} is in epoch {elastic.epoch()} at step {state.step}")
        model = DistributedDataParallel(net)
        while state.step < STEPS:
            optimizer.zero_grad()
            loss_of(model, data, state.step, rank, ranks).backward()
            if rank == 1 and state.step == DIES and elastic.epoch() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.step += 1
            state.commit()

    if elastic.run(state, train) == "preempted" or os.environ["RANK"] != "0":
        return
    distance = distance_from_undisturbed(net, data)
    good = distance < 1e-6
    print(
        f"{'ok     ' if good else 'FAILED '} the network of one process that nobody disturbed: "
        f"they differ by {distance:.1e}"
    )
    sys.exit(0 if good else 1)


main()

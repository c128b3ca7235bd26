# SPDX-License-Identifier: BSD-3-Clause
"""Training that stops and goes on with another number of ranks: a sharded model, its optimizer and
the count of steps in a checkpoint.

    muster run --standalone --nproc-per-node 4 examples/resume/resume.py FOLDER
        begins, trains 20 steps, saves
    muster run --standalone --nproc-per-node 2 examples/resume/resume.py FOLDER
        goes on for 20 more
    muster run --standalone --nproc-per-node 3 examples/resume/resume.py FOLDER
        and 20 more

Every batch of 60 is shared equally, so the losses are those of one process that never stopped: rank
0 is that process too, and compares.
"""

import sys

import torch

import muster as dist
from muster import checkpoint
from muster.fsdp import fully_shard

BATCH, STEPS = 60, 20


def make_net():
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return net.double()


def loss_of(model, step, rank, ranks):
    """The loss of one rank's share of the step's batch: points of a curved surface."""
    points = torch.rand(BATCH, 8, generator=torch.Generator().manual_seed(step)).double()
    points = points.chunk(ranks)[rank]
    return torch.nn.functional.mse_loss(model(points), points.square().sum(1, keepdim=True).sin())


def train(model, optimizer, first, rank, ranks):
    losses = []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, ranks)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def undivided(steps):
    """The losses of one process that never stops, in its last steps."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for first in range(0, steps, STEPS):
        losses = train(net, optimizer, first, 0, 1)
    return losses


def main(folder):
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_net()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    newest = checkpoint.latest(folder)
    if newest is not None:
        checkpoint.load(state, checkpoint_id=newest)
    losses = train(model, optimizer, state["step"], rank, ranks)
    state["step"] += STEPS
    writer = checkpoint.FileSystemWriter(
        f"{folder}/step-{state['step']}", step=state["step"], keep_last=2
    )
    checkpoint.async_save(state, storage_writer=writer).result()
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    good = True
    if rank == 0:
        difference = (losses - undivided(state["step"])).abs().max().item()
        good = difference < 1e-6
        print(
            f"{'ok     ' if good else 'FAILED '} the losses of one process that never stopped: "
            f"they differ by {difference:.1e}"
        )
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

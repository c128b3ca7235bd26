# SPDX-License-Identifier: BSD-3-Clause
"""As elastic_program.py, with parts that no other rank has, for elastic_shards_test.py.

sharded_program.py fsdp|fully_shard|zero STEPS [KILL...]     KILL: STEP:RANK:PHASE, the n-th for
epoch n: that rank ends itself by SIGKILL in that step, after the phase (restore, forward, backward,
update, commit); in place of a phase `node`: all workers of its node at the end of the update.
"""

import os
import pathlib
import signal
import sys

import torch

import muster as dist
from muster import elastic
from muster.fsdp import FSDP, fully_shard
from muster.nn.parallel import DistributedDataParallel
from muster.optim import ZeroRedundancyOptimizer

mode, steps, *kills = sys.argv[1:]
torch.set_num_threads(1)


def new_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 63), torch.nn.BatchNorm1d(63), torch.nn.Dropout(0.2),
        torch.nn.Linear(63, 9),
    )  # fmt: skip


whole = new_net()
things = {"net": whole} if mode == "zero" else {}
state = elastic.State(step=0, losses=[], seed=7, **things)
seen, bits = 0, 0


def dies_after(phase):
    number = elastic.epoch() - 1
    planned = kills[number] if number < len(kills) else ""
    if planned == f"{state.step}:{dist.get_rank()}:{phase}":
        print("dies", flush=True)
        if phase == "node":
            agent = os.getppid()
            for each in pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
                if int(each) != os.getpid():
                    os.kill(int(each), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def made():
    """The model, its optimizer, and what of them each rank has its own part of."""
    if mode == "zero":
        model = DistributedDataParallel(whole)
        adam = ZeroRedundancyOptimizer(whole.parameters(), torch.optim.Adam, lr=0.01)
        return model, adam, {"adam": adam}
    model = FSDP(new_net()) if mode == "fsdp" else fully_shard(new_net())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 5, 0.9)
    return model, adam, {"model": model, "adam": adam, "scheduler": scheduler}


def train():
    global seen, bits
    lost = " LOST" if state.step < seen or len(state.losses) != state.step else ""
    print(f"epoch {elastic.epoch()} from step {state.step} as {os.environ['RANK']}{lost}")
    model, optimizer, parts = made()
    elastic.ShardedState(state, **parts).restore()
    dies_after("restore")
    while state.step < int(steps):
        data = torch.Generator().manual_seed(1000 * state.step + dist.get_rank())
        inputs = torch.randn(16, 32, generator=data)
        targets = torch.randint(8, (16,), generator=data)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        dies_after("forward")
        loss.backward()
        dies_after("backward")
        optimizer.step()
        if "scheduler" in parts:
            parts["scheduler"].step()
        dies_after("update")
        dies_after("node")
        state.losses.append(optimizer.param_groups[0]["lr"])
        state.step += 1
        state.commit()
        dies_after("commit")
        seen = state.step
    # The sum over this rank's parts; all_reduce makes it the sum over the whole parameters.
    own = torch.zeros((), dtype=torch.int64)
    for each in model.parameters():
        flat = each.detach().flatten()
        own += flat.view(torch.int32).to(torch.int64).sum()
    dist.all_reduce(own)
    bits = own.item()


outcome = elastic.run(state, train)
print(f"{outcome} at step {state.step}, weights {bits & (2**64 - 1):016x}")

# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small network as a rank of `muster run --elastic keep`, for elastic_keep_test.py.

elastic_program.py STEPS [KILL...]     KILL: STEP:RANK:PHASE, the n-th for epoch n: that rank ends
itself by SIGKILL in that step, after the phase (forward, backward, update, commit). A single KILL
`after`: rank 1 does so when training has ended. `saves:FOLDER` instead: when training has ended
each rank reads the pipe RANK of the folder to its end before it saves what it has there.
"""

import os
import signal
import sys
import time

import torch

import muster as dist
from muster import elastic
from muster.nn.parallel import DistributedDataParallel

steps, *kills = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
state = elastic.State(
    model=model, optimizer=optimizer, scheduler=scheduler, step=0, losses=[], seed=7
)
seen = 0


def dies_after(phase):
    number = elastic.epoch() - 1
    planned = kills[number] if number < len(kills) else ""
    if planned == f"{state.step}:{dist.get_rank()}:{phase}":
        print("dies at", time.monotonic_ns(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def train():
    global seen
    rank, repaired = dist.get_rank(), elastic.epoch() > 1
    lost = " LOST" if state.step < seen or len(state.losses) != state.step else ""
    print(f"epoch {elastic.epoch()} from step {state.step} as {os.environ['RANK']}{lost}")
    ddp = DistributedDataParallel(model)
    while state.step < int(steps):
        data = torch.Generator().manual_seed(1000 * state.step + rank)
        inputs = torch.randn(16, 32, generator=data)
        targets = torch.randint(8, (16,), generator=data)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(inputs), targets)
        dies_after("forward")
        loss.backward()
        dies_after("backward")
        optimizer.step()
        scheduler.step()
        dies_after("update")
        state.losses.append(scheduler.get_last_lr()[0])
        state.step += 1
        state.commit()
        dies_after("commit")
        seen = state.step
        if repaired:
            print("goes on at", time.monotonic_ns(), flush=True)
        repaired = False


outcome = elastic.run(state, train)
if kills == ["after"] and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if kills and kills[0].startswith("saves:"):
    place = os.path.join(kills[0].removeprefix("saves:"), os.environ["RANK"])
    print("training has ended", flush=True)
    with open(place) as pipe:
        pipe.read()
    torch.save(model.state_dict(), place + ".pt")
total = torch.cat([each.detach().flatten() for each in model.parameters()])
bits = total.view(torch.int32).to(torch.int64).mul(torch.arange(1, len(total) + 1)).sum().item()
print(f"{outcome} at step {state.step}, weights {bits & (2**64 - 1):016x}")

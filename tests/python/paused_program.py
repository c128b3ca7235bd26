# SPDX-License-Identifier: BSD-3-Clause
"""Trains as a rank of `muster run --elastic keep` until the file END exists, for
elastic_pauses_test.py.

paused_program.py END    Prints each epoch's first step, and every 50th step.
"""

import os
import sys
import time

import torch

import muster as dist
from muster import elastic

end = sys.argv[1]
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
state = elastic.State(model=model, step=0)
seen = 0


def train():
    global seen
    lost = " LOST" if state.step < seen else ""
    print(f"epoch {elastic.epoch()} from step {state.step} of {dist.get_world_size()}{lost}")
    ended = torch.zeros(1)
    while not ended.item():
        ended[0] = float(os.path.exists(end))
        dist.all_reduce(ended, op=dist.ReduceOp.MAX)
        with torch.no_grad():
            model.weight += 1.0
        state.step += 1
        state.commit()
        seen = state.step
        if state.step % 50 == 0:
            print(f"step {state.step} of epoch {elastic.epoch()}", flush=True)
        time.sleep(0.002)  # the work of a step


elastic.run(state, train)
changed = (model.weight.detach() - model.weight.detach()[0, 0]).abs().max() < 1
print(f"finished at step {state.step}{'' if changed else ' MIXED'}", flush=True)

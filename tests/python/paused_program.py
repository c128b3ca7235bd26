# SPDX-License-Identifier: BSD-3-Clause
"""Trains as a rank of `muster run --elastic keep` until the file END exists, for
elastic_pauses_test.py.

paused_program.py END    Prints each epoch's first step, and every 50th step with the time. While
                         the file END.hold exists it does not begin.
"""

import hashlib
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
    generator = torch.Generator()
    while not ended.item():
        ended[0] = float(os.path.exists(end))
        dist.all_reduce(ended, op=dist.ReduceOp.MAX)
        change = torch.randn(8, 8, generator=generator.manual_seed(state.step + dist.get_rank()))
        dist.all_reduce(change)
        with torch.no_grad():
            model.weight += change
        state.step += 1
        state.commit()
        seen = state.step
        if state.step % 50 == 0:
            print(f"step {state.step} of epoch {elastic.epoch()} at {time.monotonic()}", flush=True)
        time.sleep(0.002)  # the work of a step


while os.path.exists(end + ".hold"):
    time.sleep(0.01)
elastic.run(state, train)
bits = model.weight.detach().contiguous().numpy().tobytes()
print(f"finished at step {state.step} with {hashlib.sha256(bits).hexdigest()}", flush=True)

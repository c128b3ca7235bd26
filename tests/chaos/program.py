# SPDX-License-Identifier: BSD-3-Clause
"""A rank of the jobs of campaign.py.

program.py MODE STEPS FOLDER

MODE: `sums` (plain sums, equal in bits for any number of ranks), `ddp`, `fsdp`, `zero` under
`--elastic keep`; `local_sgd` too, whose ranks are replicas that meet every MEET steps and commit
what they then have in common; `saved` begins anew in every epoch, from its newest checkpoint below
FOLDER. Each rank says where an epoch begins, every tenth step that is safe, and in the end a
hash.
"""

import hashlib
import os
import pathlib
import select
import sys

import torch

import muster as dist
from muster import checkpoint, elastic, local_sgd
from muster.fsdp import fully_shard
from muster.nn.parallel import DistributedDataParallel
from muster.optim import ZeroRedundancyOptimizer

mode, steps, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SAMPLES = 24
MEET = 10  # steps of a replica alone; only steps that are a multiple of it can be safe
torch.set_num_threads(1)


def say(*words):
    # One write, so that no other line comes between its words.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def works_for(seconds):
    """Not by time.sleep, which libfaketime breaks."""
    select.select([], [], [], seconds)


def new_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 62), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(62, 8)
    )


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator), torch.randint(8, (16,), generator=generator)


def hash_of(tensors):
    bits = b"".join(each.detach().contiguous().numpy().tobytes() for each in tensors)
    return hashlib.sha256(bits).hexdigest()[:16]


def learn(model, optimizer, step):
    inputs, targets = batch(step, dist.get_rank())
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    works_for(0.005)


def begins(step):
    say(f"epoch {os.environ.get('MUSTER_EPOCH', 1)} rank {dist.get_rank()} from step {step}")


def is_safe(step):
    if step % 10 == 0:
        say(f"epoch {os.environ.get('MUSTER_EPOCH', 1)} safe step {step}")


def kept():
    """The modes whose ranks outlive an epoch."""
    net = new_net()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    whole = {each: {"net": net} for each in ("sums", "zero", "local_sgd")}
    whole["ddp"] = {"net": net, "adam": adam}
    state = elastic.State(step=0, seed=7, **whole.get(mode, {}))
    final = []

    def add_samples():
        """Sums of whole numbers have the same bits, whichever rank adds which."""
        with torch.no_grad():
            for weight in net.parameters():
                change = torch.zeros_like(weight)
                for sample in range(dist.get_rank(), SAMPLES, dist.get_world_size()):
                    generator = torch.Generator().manual_seed(SAMPLES * state.step + sample)
                    change += torch.randint(-8, 8, weight.shape, generator=generator)
                dist.all_reduce(change)
                weight.copy_((weight.round() + change).fmod(1024))
        works_for(0.003)

    def train():
        begins(state.step)
        model, optimizer, parts = net, adam, {}
        if mode == "ddp":
            model = DistributedDataParallel(net)
        elif mode == "zero":
            model = DistributedDataParallel(net)
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
            parts = {"adam": optimizer}
        elif mode == "fsdp":
            model = fully_shard(new_net())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            parts = {"model": model, "adam": optimizer}
        elif mode == "local_sgd":
            # Without a state of its own: between meetings it would differ from replica to replica.
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            local_sgd.LocalSgd(net, optimizer, sync_every=MEET)
        if parts:
            elastic.ShardedState(state, **parts).restore()
        while state.step < steps:
            if mode == "sums":
                add_samples()
            else:
                learn(model, optimizer, state.step)
            state.step += 1
            if mode != "local_sgd" or state.step % MEET == 0:
                state.commit()
                is_safe(state.step)
        parameters = model.parameters()
        final[:] = [
            (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
            for each in parameters
        ]

    elastic.run(state, train)
    return state.step, hash_of(final)


def saved():
    """Nothing outlives an epoch but what was saved."""
    dist.init_process_group()
    model = DistributedDataParallel(new_net())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "adam": adam, "step": 0}
    newest = checkpoint.latest(folder)
    if newest:
        checkpoint.load(state, checkpoint_id=newest)
    begins(state["step"])
    while state["step"] < steps:
        torch.manual_seed(state["step"] * 16 + dist.get_rank())  # dropout
        learn(model, adam, state["step"])
        state["step"] += 1
        if state["step"] % 10 == 0:
            place = pathlib.Path(folder, f"step-{state['step']}")
            try:
                writer = checkpoint.FileSystemWriter(place, step=state["step"], keep_last=3)
                checkpoint.save(state, storage_writer=writer)
                is_safe(state["step"])
            except OSError as full:  # the checkpoints before it stay
                say("not saved:", full)
    final = hash_of(model.parameters())
    dist.destroy_process_group()
    return state["step"], final


step, final = saved() if mode == "saved" else kept()
say(f"finished at step {step} with {final}")

# SPDX-License-Identifier: BSD-3-Clause
"""One rank of bench/host_steps.py: steps of every row in turn. It writes `result.RANK` into the
folder.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as stock
from host_steps import ALONE, RANK
from stock_ddp_worker import Block, ResNet
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock_hooks

import muster as dist
from muster import fsdp
from muster.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from muster.nn.parallel import DistributedDataParallel


def muster_ddp(module, hook=None, state=None):
    model = DistributedDataParallel(module)
    if hook:
        model.register_comm_hook(state, hook)
    return model


def gloo_ddp(module, hook=None):
    model = nn.parallel.DistributedDataParallel(module)
    if hook:
        model.register_comm_hook(None, hook)
    return model


def powersgd(module):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    return muster_ddp(module, powerSGD_hook.powerSGD_hook, state)


def gloo_fsdp(module):
    for block in module.blocks:
        stock.fsdp.fully_shard(block)
    return stock.fsdp.fully_shard(module)


MODELS = {
    ALONE: lambda module: module,
    "ddp": muster_ddp,
    "fp16": lambda module: muster_ddp(module, default_hooks.fp16_compress_hook),
    "powersgd": powersgd,
    "fsdp": lambda module: fsdp.FSDP(module, auto_wrap_policy={Block}, forward_prefetch=True),
    "gloo ddp": gloo_ddp,
    "gloo fp16": lambda module: gloo_ddp(module, stock_hooks.fp16_compress_hook),
    "gloo fsdp": gloo_fsdp,
}


class Trainer:
    def __init__(self, row, options):
        torch.manual_seed(1)
        self.model = MODELS[row](ResNet())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.images = torch.randn(options.batch, 3, 32, 32)
        self.labels = torch.randint(10, (options.batch,))

    def step(self):
        """Start and end in milliseconds, and those that the process computed in between."""
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        end = time.perf_counter()
        return (start * 1e3, end * 1e3), (time.process_time() - busy) * 1e3


class TracedTrainer(Trainer):
    """The model alone, and the times of the parts of its steps."""

    def __init__(self, options):
        super().__init__(ALONE, options)
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.blocks = list(self.model.blocks)
        self.events = {}  # names of parameters, in the order of their gradients, and of blocks
        self.steps = []
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(lambda each: self.note(self.names[each]))
        for at, block in enumerate(self.blocks):
            block.register_forward_pre_hook(lambda *_, at=at: self.note(f"begin {at}"))
            block.register_forward_hook(lambda *_, at=at: self.note(f"end {at}"))

    def note(self, name):
        self.events[name] = time.perf_counter()

    def step(self):
        self.events = {}
        span, cpu = super().step()
        last = f"end {len(self.blocks) - 1}"  # backward begins within the head
        self.steps.append(self.parts(span[0] / 1e3, last))
        return span, cpu

    def parts(self, begin, last):
        """Seconds of each part of the step, by its name."""
        at, before = self.events, self.events[last]
        parts = {"forward": before - begin}
        for number in range(len(self.blocks)):
            parts[f"forward {number}"] = at[f"end {number}"] - at[f"begin {number}"]
        for name, time_s in at.items():
            if name in self.names.values():
                parts[name] = time_s - before
                before = time_s
        return parts

    def medians(self, steps):
        """Medians of the last `steps`, as host_steps.py takes them: seconds, shapes, elements."""
        taken = self.steps[-steps:]
        seconds = {name: statistics.median(step[name] for step in taken) for name in taken[0]}
        parameters = {name: parameter for parameter, name in self.names.items()}
        gradients = [
            {"name": name, "shape": list(parameters[name].shape), "seconds": seconds[name]}
            for name in seconds
            if name in parameters
        ]
        units = []
        for number, block in enumerate(self.blocks):
            own = [each for each in gradients if each["name"].startswith(f"blocks.{number}.")]
            units.append(
                {
                    "elements": sum(each.numel() for each in block.parameters()),
                    "forward": seconds[f"forward {number}"],
                    "backward": sum(each["seconds"] for each in own),
                }
            )
        outer = sum(each.numel() for each in parameters.values())
        outer -= sum(unit["elements"] for unit in units)
        forward = seconds["forward"]
        return {"forward": forward, "gradients": gradients, "units": units, "outer": outer}


def train(options):
    """Every row's steps in turn, so that what the machine does meanwhile meets all alike."""
    trainers = {ALONE: TracedTrainer(options)}
    trainers |= {row: Trainer(row, options) for row in options.rows}
    order = list(trainers)
    spans = {row: [] for row in order}
    busy = {row: [] for row in order}
    for turn in range(options.warm + options.rounds):
        for i in range(len(order)):
            row = order[(turn + i) % len(order)]
            span, cpu = trainers[row].step()
            if turn >= options.warm:
                spans[row].append(span)
                busy[row].append(cpu)
    return {"model": trainers[ALONE].medians(options.rounds), "spans": spans, "cpu": busy}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=lambda text: text.split(","), required=True)
    for name in ("rank", "ranks", "batch", "warm", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[options.rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        init_method=f"file://{options.folder}/muster", rank=options.rank, world_size=options.ranks
    )
    if any(row.startswith("gloo") for row in options.rows):
        stock.init_process_group(
            "gloo",
            init_method=f"file://{options.folder}/gloo",
            rank=options.rank,
            world_size=options.ranks,
        )
    found = train(options)
    (options.folder / f"result.{options.rank}").write_text(json.dumps(found))
    if stock.is_initialized():
        stock.destroy_process_group()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: BSD-3-Clause
"""Saving and loading of a sharded model, beside what the disk itself does and stock torch's
distributed checkpoints: MiB/s of all ranks together, and how long asynchronous saving stops a step,
in times of a copy of the same bytes. `muster-lab checkpoint` runs it.

Every figure is the best of the rounds; the kinds take turns. Writing includes fsync. Before reading
the kernel's cache is dropped, which only root may do: without that the figures are of memory.
"""

import argparse
import os
import pathlib
import shutil
import tempfile
import time

import torch
import torch.distributed as stock
import torch.distributed.checkpoint as stock_checkpoint
import torch.distributed.fsdp as stock_fsdp
from forked_ranks import run_ranks
from torch import nn

import muster as dist
from muster import checkpoint, fsdp

MIB = 1 << 20
LAYERS = 8


def model_of(mib, library):
    """Sharded, of so many MiB over all ranks."""
    width = int((mib * MIB / 4 / LAYERS) ** 0.5)
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    for layer in model:
        library.fully_shard(layer)
    library.fully_shard(model)
    return model


def shard_bytes(model):
    return sum(each.numel() * each.element_size() for each in local_tensors(model))


def local_tensors(model):
    for parameter in model.parameters():
        local = getattr(parameter, "to_local", None)
        yield local().detach() if local else parameter.detach()


def drop_caches():
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        pass


class Plain:
    """Each rank writes and reads one file of its own."""

    def __init__(self, folder, rank, size):
        self.path = folder / f"plain-{rank}"
        self.data = torch.ones(size, dtype=torch.uint8)

    def save(self):
        with open(self.path, "wb", buffering=0) as file:
            rest = memoryview(self.data.numpy())
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def load(self):
        with open(self.path, "rb", buffering=0) as file:
            rest = memoryview(self.data.numpy())
            while rest:
                rest = rest[file.readinto(rest) :]


class Muster:
    def __init__(self, folder, model):
        self.path, self.state = folder / "muster", {"model": model}

    def save(self):
        checkpoint.save(self.state, checkpoint_id=self.path)

    def load(self):
        checkpoint.load(self.state, checkpoint_id=self.path)


class Stock:
    def __init__(self, folder, model):
        self.path, self.model = folder / "stock", model

    def save(self):
        stock_checkpoint.save({"model": self.model.state_dict()}, checkpoint_id=self.path)

    def load(self):
        stock_checkpoint.load({"model": self.model.state_dict()}, checkpoint_id=self.path)


def seconds(call):
    """From when all ranks begin until all have ended."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begin


def seconds_stopped(state, folder, tensors):
    """(Of an asynchronous save on this rank, of a copy of the same bytes into warm memory)."""
    copies = [each.clone() for each in tensors]
    dist.barrier()
    begin = time.perf_counter()
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each)
    copied = time.perf_counter() - begin
    dist.barrier()
    begin = time.perf_counter()
    future = checkpoint.async_save(state, checkpoint_id=folder / "async")
    stopped = time.perf_counter() - begin
    future.result()
    return stopped, copied


def run_rank(rank, arguments, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        init_method=f"file://{folder}/meeting", rank=rank, world_size=arguments.ranks
    )
    kinds = {}
    model = model_of(arguments.mib, fsdp)
    size = shard_bytes(model)
    kinds["the disk itself"] = Plain(folder, rank, size)
    kinds["muster"] = Muster(folder, model)
    if arguments.stock:
        store = stock.FileStore(f"{folder}/stock-meeting", arguments.ranks)
        stock.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
        kinds["torch DCP"] = Stock(folder, model_of(arguments.mib, stock_fsdp))
    best = {(name, what): float("inf") for name in kinds for what in ("save", "load")}
    stopped = copied = float("inf")
    for _ in range(arguments.rounds):
        for name, kind in kinds.items():
            best[name, "save"] = min(best[name, "save"], seconds(kind.save))
        for name, kind in kinds.items():
            if rank == 0:
                drop_caches()
            best[name, "load"] = min(best[name, "load"], seconds(kind.load))
        state, tensors = {"model": model}, list(local_tensors(model))
        found = seconds_stopped(state, folder, tensors)
        stopped, copied = min(stopped, found[0]), min(copied, found[1])
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / "async")
        dist.barrier()
    everyone = [None] * arguments.ranks
    dist.all_gather_object(everyone, (size, stopped, copied))
    if rank == 0:
        total = sum(each[0] for each in everyone) / MIB
        print(f"{total:.0f} MiB over {arguments.ranks} ranks, MiB/s{'save':>18}{'load':>10}")
        for name in kinds:
            row = [total / best[name, what] for what in ("save", "load")]
            print(f"  {name:<32}{row[0]:14.0f}{row[1]:10.0f}")
        slowest = max(everyone, key=lambda each: each[1] / each[2])
        print(
            f"  async_save stops the slowest rank {slowest[1] * 1e3:.1f} ms, "
            f"{slowest[1] / slowest[2]:.2f} times a copy of its bytes"
        )
    if arguments.stock:
        stock.destroy_process_group()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(prog="muster-lab checkpoint", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=2048, help="of the model (default: 2048)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--stock", action="store_true", help="torch's DCP on Gloo beside it")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="muster-bench-", dir=arguments.folder)
    try:
        run_ranks(arguments.ranks, lambda rank: run_rank(rank, arguments, pathlib.Path(folder)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

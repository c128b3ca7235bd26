# SPDX-License-Identifier: BSD-3-Clause
"""Sharded training of muster: bytes of every rank beside what 1/n predicts, the order in which
units gather and compute, and the same steps by stock torch's fully_shard on Gloo. `muster-lab
fsdp` runs it.

Bytes are counted where they are allocated and freed, not measured; activations, which depend on the
batch, are not among them. `--cuts` prints the steps of units that are divided flat and by rows,
with blocks and with 1,000 parameters of 1 KiB in a unit. Exits with 1 if a rank's bytes differ from
the plan by more than 10 %, or if losses differ from stock's by more than rounding.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback

import torch
import torch._dynamo  # noqa: F401  optimizers import it, here once for all ranks
import torch.distributed as stock
import torch.distributed.fsdp as stock_fsdp
from torch import nn

import muster as dist
from muster import _C, fsdp

KINDS = ("parameters", "gradients", "optimizer", "gathered_peak", "staging_peak")
TOLERANCE = 0.1

# By name: the fewest ranks, and what fully_shard is given (`mesh`: whether it has two dimensions).
OPTIONS = {
    "full": (1, {}),
    "kept": (1, {"reshard_after_forward": False}),
    "part": (4, {"reshard_after_forward": 2}),
    "hybrid": (4, {"mesh": True}),
    "hybrid-kept": (4, {"mesh": True, "reshard_after_forward": False}),
    "bfloat16": (1, {"narrow": True}),
    "no-prefetch": (1, {"prefetch": False}),
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def shard(module, library, backend, arguments):
    """The module, sharded by `library.fully_shard` with what OPTIONS has."""
    given = dict(arguments)
    size = backend.get_world_size()
    mesh = dist.init_device_mesh if backend is dist else stock.init_device_mesh
    options = {"reshard_after_forward": given.get("reshard_after_forward", True)}
    if given.get("mesh"):
        options["mesh"] = mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    if given.get("narrow"):
        options["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in module.blocks:
        library.fully_shard(block, **options)
    library.fully_shard(module, **options)
    if not given.get("prefetch", True):
        for each in (module, *module.blocks):
            each.set_modules_to_backward_prefetch([])
    return module


def train(model, rank, steps, width):
    """(Losses, seconds of the quickest step, the optimizer)."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, best = [], float("inf")
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, width, generator=generator)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        best = min(best, time.perf_counter() - begin)
        losses.append(loss.item())
    return losses, best, optimizer


def planned(model, arguments, size):
    count = [sum(each.numel() for each in block.parameters()) for block in model.blocks]
    outer = sum(each.numel() for each in model.first.parameters())
    options = {
        "ranks": size // 2 if arguments.get("mesh") else size,
        "keeps_after_forward": arguments.get("reshard_after_forward") is False,
        "part_ranks": arguments.get("reshard_after_forward", False) or 0,
        "gathered_ahead": int(arguments.get("prefetch", True)),
        "gathered_bytes_per_element": 2 if arguments.get("narrow") else 4,
    }
    return _C._plan_memory(outer, count, options)


def local_bytes(dtensors):
    return sum(each.to_local().numel() * each.element_size() for each in dtensors)


def measured(model, optimizer):
    units = fsdp.units.units_in(model)
    memory = units[0].memory()
    found = {kind: sum(unit.memory()[kind] for unit in units) for kind in KINDS[:2]}
    found["gradients"] += local_bytes(
        each.grad for each in model.parameters() if each.grad is not None
    )
    found["optimizer"] = local_bytes(
        each for state in optimizer.state.values() for each in state.values() if each.dim() > 0
    )
    return found | {kind: memory[kind] for kind in KINDS[3:]}


PREFETCH = {"backward_prefetch": "BACKWARD_PRE"}


class Small(nn.Module):
    """A unit of many small parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ParameterList(torch.randn(256) * 0.01 for _ in range(1000))

    def forward(self, x):
        for part in self.parts:
            x = x + part
        return x


class Cut:
    """A model whose units are made without fully_shard, divided flat or by rows."""

    def __init__(self, modules, by_rows):
        self.units = []
        for module in modules:
            named = list(module.named_parameters())
            dims = [0] * len(named) if by_rows else None
            unit = _C._ShardedUnit(
                type(module).__name__, named, [], dist.group.WORLD, PREFETCH, dims
            )
            self.units.append((module, unit))
        parameters = [each for module in modules for each in module.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def step(self, x):
        """(Seconds, loss)."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        for module, unit in self.units:
            (inside,) = unit.before_forward([x])
            x = module(inside)
            unit.after_forward([x])
        loss = x.square().mean()
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - begin, loss.item()


def compare_cuts(rank, size, _name, arguments, folder):
    """Steps of both in turn, so that both see the same machine."""
    dist.init_process_group(init_method=f"file://{folder}/muster", rank=rank, world_size=size)
    failed = False
    for what, width, modules in [
        ("blocks", arguments.width, lambda: list(Model(arguments.width, arguments.layers).blocks)),
        ("1,000 parameters of 1 KiB", 256, lambda: [Small()]),
    ]:
        cuts = {name: Cut(modules(), name == "rows") for name in ("flat", "rows")}
        seconds = {name: [] for name in cuts}
        losses = {name: [] for name in cuts}
        for step in range(arguments.steps):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randn(8, width, generator=generator)
            for name, cut in cuts.items():
                took, loss = cut.step(x)
                seconds[name].append(took)
                losses[name].append(loss)
        failed |= losses["flat"] != losses["rows"]
        if rank == 0:
            flat, rows = (sorted(each)[len(each) // 2] * 1e3 for each in seconds.values())
            print(
                f"{size} ranks, {what}, median step, ms: flat {flat:.2f}, rows {rows:.2f}, "
                f"ratio {rows / flat:.3f}" + ("; losses DIFFER" if failed else "")
            )
    dist.destroy_process_group()
    return int(failed)


def run_rank(rank, size, name, arguments, folder):
    """0 if all is as it should be."""
    _, given = OPTIONS[name]
    dist.init_process_group(init_method=f"file://{folder}/muster", rank=rank, world_size=size)
    plain = Model(arguments.width, arguments.layers)
    plan = planned(plain, given, size)
    timeline = _C._ShardedTimeline()
    with fsdp.units.recorded_in(timeline):
        mine = shard(plain, fsdp, dist, given)
    fsdp.units.unit_of(mine).reset_peak_memory()
    losses, seconds, optimizer = train(mine, rank, arguments.steps, arguments.width)
    if arguments.timeline and rank == 0:
        timeline.clear()
        train(mine, rank, 1, arguments.width)
        events = timeline.entries()
        for unit, event, at in events:
            print(f"  {(at - events[0][2]) * 1e3:9.3f} ms  {unit:<12} {event}")
    elif arguments.timeline:
        train(mine, rank, 1, arguments.width)
    everyone = [None] * size
    dist.all_gather_object(everyone, measured(mine, optimizer))
    failed = False
    if rank == 0:
        print(f"\n{name}, {size} ranks, KiB" + "".join(f"{kind:>16}" for kind in KINDS))
        for label, row in [
            ("planned", plan),
            *((f"rank {at}", each) for at, each in enumerate(everyone)),
        ]:
            print(f"  {label:<18}" + "".join(f"{row[kind] / 1024:16.1f}" for kind in KINDS))
    for row in everyone:
        failed |= any(abs(row[kind] - plan[kind]) > TOLERANCE * plan[kind] for kind in KINDS)
    if failed and rank == 0:
        print("  differs from the plan by more than 10 %")
    if arguments.stock:
        stock.init_process_group(
            "gloo", store=stock.FileStore(f"{folder}/stock", size), rank=rank, world_size=size
        )
        theirs = shard(Model(arguments.width, arguments.layers), stock_fsdp, stock, given)
        other_losses, other_seconds, _ = train(theirs, rank, arguments.steps, arguments.width)
        tolerance = 2e-2 if given.get("narrow") else 1e-4
        differs = any(
            abs(a - b) > tolerance * abs(b) for a, b in zip(losses, other_losses, strict=True)
        )
        failed |= differs
        if rank == 0:
            print(
                f"  quickest step, ms: muster {seconds * 1e3:.2f}, "
                f"stock on gloo {other_seconds * 1e3:.2f}"
            )
        if rank == 0 or differs:
            print(
                f"  losses: muster {losses}, stock {other_losses}" + (" DIFFER" if differs else "")
            )
        stock.destroy_process_group()
    dist.destroy_process_group()
    return int(failed)


def main():
    parser = argparse.ArgumentParser(prog="muster-lab fsdp", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--options", default=",".join(OPTIONS), help="which of %(default)s")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeline", action="store_true", help="print a step's events of rank 0")
    parser.add_argument("--cuts", action="store_true", help="steps of units flat and by rows")
    parser.add_argument("--stock", action="store_true", help="stock fully_shard on Gloo beside it")
    arguments = parser.parse_args()
    unknown = set(arguments.options.split(",")) - set(OPTIONS)
    if unknown:
        parser.error(
            f"no option is called {', '.join(sorted(unknown))}; there are {', '.join(OPTIONS)}"
        )
    torch.set_num_threads(1)
    failed = 0
    for size in map(int, arguments.ranks.split(",")):
        for name in ["full"] if arguments.cuts else arguments.options.split(","):
            if size < OPTIONS[name][0]:
                continue
            sys.stdout.flush()
            with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
                children = []
                for rank in range(size):
                    child = os.fork()
                    if child == 0:
                        status = 1
                        try:
                            run = compare_cuts if arguments.cuts else run_rank
                            status = run(rank, size, name, arguments, folder)
                        except Exception:
                            traceback.print_exc()
                        finally:
                            sys.stdout.flush()
                            sys.stderr.flush()
                            os._exit(status)
                    children.append(child)
                failed |= any([os.waitpid(child, 0)[1] for child in children])
    sys.exit(int(failed))


if __name__ == "__main__":
    main()

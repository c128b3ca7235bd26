# SPDX-License-Identifier: BSD-3-Clause
"""Ranks of stock torch's Gloo that muster-lab measures: read cells from <folder>/to-<rank>,
answer in <folder>/back; without a folder from standard input and on standard output.

The orders, the answers and what is measured are those of src/faces/cli/bench/measurement.h. Every
rank rewrites its buffer before each call; all_reduce and broadcast are in place.
"""

import argparse
import contextlib
import datetime
import statistics
import sys
import time

import torch
import torch.distributed as dist
from forked_ranks import run_ranks

LOOPS = 11
# The loops if one call takes longer than MANY_TIMES the time meant for all: LOOPS of them would
# take minutes.
FEW_LOOPS = 3
MANY_TIMES = 5
MOST_CALLS = 200_000
MOST_SINGLES = 2000


def prepare(cell, rank, size):
    """The call of a cell and the tensor that is rewritten before it; None where Gloo has no such
    operation.
    """
    dtype = getattr(torch, cell["dtype"])
    count = cell["bytes"] // dtype.itemsize
    part = cell["bytes"] // size // dtype.itemsize
    data = torch.ones(count, dtype=dtype)
    whole = data[: part * size]
    given = list(whole.chunk(size)) if part else [whole] * size
    every = torch.empty(part * size, dtype=dtype)
    pieces = list(every.chunk(size)) if part else [every] * size
    out = torch.empty(part, dtype=dtype)
    calls = {
        "all_reduce": lambda: dist.all_reduce(data),
        "broadcast": lambda: dist.broadcast(data, 0),
        "reduce": lambda: dist.reduce(data, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(every, given[0]),
        "gather": lambda: dist.gather(given[0], pieces if rank == 0 else None),
        "scatter": lambda: dist.scatter(out, given if rank == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, whole),
        "all_to_all": lambda: dist.all_to_all_single(every, whole),
        "barrier": dist.barrier,
        "ping_pong": ping_pong(data, rank),
    }
    return data, calls.get(cell["op"])


def ping_pong(data, rank):
    """A message from rank 0 to rank 1 and back."""
    other = torch.empty_like(data)

    def call():
        if rank == 0:
            dist.send(data, 1)
        if rank <= 1:
            dist.recv(other, 1 - rank)
        if rank == 1:
            dist.send(data, 0)

    return call


def stamps_of(start, end, counts_from):
    """The two stamps of a call on this rank. The maximum of each over all ranks gives its span."""
    return {"last": (start, end), "first": (-start, end), "own": (0, end - start)}[counts_from]


def spans_of(latest, counts_from):
    """In microseconds."""
    starts = -latest[::2] if counts_from == "first" else latest[::2]
    return ((latest[1::2] - starts).double() / 1000).tolist()


def loop(data, call, times, counts_from):
    """The same for all ranks: a root that only gives is through long before the others."""
    dist.barrier()
    start = time.monotonic_ns()
    for _ in range(times):
        data.fill_(1)
        call()
    stamps = torch.tensor(stamps_of(start, time.monotonic_ns(), counts_from))
    dist.all_reduce(stamps, op=dist.ReduceOp.MAX)
    return spans_of(stamps, counts_from)[0] / times


def calls_in(seconds, call_us, least, most):
    """How many calls of so many microseconds there is time for, as rank 0 has it."""
    calls = torch.tensor([min(max(int(seconds * 1e6 / max(call_us, 0.05)), least), most)])
    dist.broadcast(calls, 0)
    return int(calls)


def measure(cell, rank, size):
    data, call = prepare(cell, rank, size)
    if call is None:
        return "skip Gloo has no such operation\n"
    counts_from = cell["from"]

    def run_loop(times):
        return loop(data, call, times, counts_from)

    warm = min(run_loop(1), run_loop(1))
    in_time = calls_in(MANY_TIMES * cell["seconds"], warm, 0, 1)
    rounds = LOOPS if in_time else FEW_LOOPS
    for _ in range(2 * in_time):
        warm = run_loop(calls_in(cell["seconds"] / 4, warm, 2, 20))
    settled = 0
    while settled < cell["settling"]:
        more = calls_in(cell["settling"] - settled, warm, 1, MOST_CALLS)
        warm = run_loop(more)
        settled += warm * more / 1e6
    times = calls_in(cell["seconds"] / LOOPS, warm, 1, MOST_CALLS)
    loop_us = statistics.median(run_loop(times) for _ in range(rounds))
    singles = calls_in(cell["seconds"] / 2, warm, rounds, MOST_SINGLES)
    stamps = torch.empty(2 * singles, dtype=torch.int64)
    for i in range(singles):
        data.fill_(1)
        dist.barrier()
        start = time.monotonic_ns()
        call()
        stamps[2 * i : 2 * i + 2] = torch.tensor(stamps_of(start, time.monotonic_ns(), counts_from))
    dist.all_reduce(stamps, op=dist.ReduceOp.MAX)
    spans = sorted(spans_of(stamps, counts_from))
    return (
        f"row {loop_us:.4f} {spans[singles // 2]:.4f} {spans[0]:.4f} "
        f"{spans[singles * 99 // 100]:.4f} "
        f"{times * rounds + singles}\n"
    )


@contextlib.contextmanager
def lines(folder, rank):
    """The streams of orders and answers."""
    if folder is None:
        yield sys.stdin, sys.stdout
        return
    with open(f"{folder}/back", "w") as back, open(f"{folder}/to-{rank}") as orders:
        yield orders, back


def serve(rank, options):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=options.init or f"file://{options.folder}/store",
        rank=rank,
        world_size=options.ranks,
        timeout=datetime.timedelta(seconds=options.timeout),
    )
    # Not bound to a core: Gloo's own threads need the others as well.
    with lines(options.folder, rank) as (orders, back):
        for line in orders:
            words = line.split()
            if words[:1] != ["cell"]:
                break
            cell = dict(
                op=words[1],
                bytes=int(words[2]),
                dtype=words[3],
                memory=words[4],
                seconds=float(words[5]),
                settling=float(words[6]),
            )
            cell["from"] = words[7]
            answer = measure(cell, rank, options.ranks)
            if rank == 0:
                back.write(answer)
                back.flush()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder")
    parser.add_argument("--init", help="where the ranks meet; default: a file in the folder")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds, of a call")
    parser.add_argument("--rank", type=int, help="the only one of them that runs here")
    options = parser.parse_args()
    if options.rank is not None:
        return serve(options.rank, options)
    return run_ranks(options.ranks, lambda rank: serve(rank, options))


if __name__ == "__main__":
    main()

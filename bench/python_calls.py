# SPDX-License-Identifier: BSD-3-Clause
"""An 8-byte all_reduce from Python, 2 ranks of this host: muster directly, stock torch on the
backend muster, stock torch on Gloo, in turn.

Prints microseconds a call (median of loops that begin together) and how many times as long Gloo
takes. For `muster-lab python`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed
from forked_ranks import run_ranks

import muster
import muster.torch

WAYS = {
    "muster": (muster, "cpu:native"),
    "stock torch, muster": (torch.distributed, "muster"),
    "stock torch, Gloo": (torch.distributed, "gloo"),
}


def time_calls(rank, way, options, folder):
    """Rank 0's median loop, written to `folder`."""
    torch.set_num_threads(1)
    dist, backend = WAYS[way]
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.ranks)
    tensor = torch.ones(options.bytes // 4)

    def loop(calls):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            tensor.fill_(1)  # else the sums grow beyond all numbers
            dist.all_reduce(tensor)
        return (time.perf_counter() - start) / calls * 1e6

    loop(options.calls // 10 + 1)
    times = [loop(options.calls) for _ in range(11)]
    assert tensor[0] == options.ranks
    if rank == 0:
        with open(os.path.join(folder, "result"), "w") as file:
            file.write(str(statistics.median(times)))
    dist.destroy_process_group()


def measure(way, options):
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        job = os.fork()
        if job == 0:
            try:
                run_ranks(options.ranks, lambda rank: time_calls(rank, way, options, folder))
            except SystemExit as ended:
                os._exit(ended.code)  # the folder is the parent's
        if os.waitpid(job, 0)[1] != 0:
            sys.exit(f"{way}: a rank failed")
        with open(os.path.join(folder, "result")) as file:
            return float(file.read())


def main():
    parser = argparse.ArgumentParser(
        prog="muster-lab python",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=8)
    parser.add_argument("--calls", type=int, default=2000, help="of a loop")
    parser.add_argument("--rounds", type=int, default=3, help="how often all ways take their turn")
    parser.add_argument(
        "--json", help="also append the figures to this file, one JSON object a line"
    )
    options = parser.parse_args()
    rounds = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, times in rounds.items():
            times.append(measure(way, options))
    medians = {way: statistics.median(times) for way, times in rounds.items()}
    gloo = medians["stock torch, Gloo"]
    print(
        f"{'all_reduce from Python':24} {'bytes':>8} {'ranks':>6} {'us a call':>10} "
        f"{'Gloo takes':>11}"
    )
    for way, median in medians.items():
        print(f"{way:24} {options.bytes:8} {options.ranks:6} {median:10.2f} {gloo / median:9.1f} x")
        if options.json:
            with open(options.json, "a") as file:
                row = {
                    "op": "all_reduce",
                    "from": "python",
                    "way": way,
                    "bytes": options.bytes,
                    "ranks": options.ranks,
                }
                file.write(
                    json.dumps(
                        row | {"us": round(median, 3), "gloo_takes_times": round(gloo / median, 2)}
                    )
                    + "\n"
                )


if __name__ == "__main__":
    main()

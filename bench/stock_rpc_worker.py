# SPDX-License-Identifier: BSD-3-Clause
"""Calls of stock torch's RPC between two processes of this host; writes the cases of rpc_bench.cc
to FOLDER/result.
"""

import argparse
import collections
import os
import statistics
import time

import torch
import torch.distributed.rpc as rpc
from forked_ranks import run_ranks


def nothing():
    pass


def echo(tensor):
    return tensor


def median_us(calls, call):
    for _ in range(min(calls, calls // 10 + 3)):
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def calls_a_second(in_flight, calls):
    def some(count):
        window = collections.deque()
        for _ in range(count):
            if len(window) == in_flight:
                window.popleft().wait()
            window.append(rpc.rpc_async("callee", nothing))
        for future in window:
            future.wait()

    some(calls // 10)
    start = time.perf_counter()
    some(calls)
    return calls / (time.perf_counter() - start)


def measure(quick):
    many = 20 if quick else 1000
    figures = {"empty": median_us(many, lambda: rpc.rpc_sync("callee", nothing))}
    figures["empty, pooled"] = figures["empty"]
    asleep = []
    for _ in range(max(many // 20, 5)):
        time.sleep(0.005)
        start = time.perf_counter()
        rpc.rpc_sync("callee", nothing)
        asleep.append((time.perf_counter() - start) * 1e6)
    figures["empty, asleep"] = statistics.median(asleep)
    for name, size, calls in (
        ("1 KiB", 1 << 10, many),
        ("1 MiB", 1 << 20, many // 3),
        ("64 MiB", 64 << 20, 1 if quick else 10),
    ):
        tensor = torch.ones(size // 4)
        figures[name] = median_us(
            calls, lambda tensor=tensor: rpc.rpc_sync("callee", echo, args=(tensor,))
        )
    for in_flight in (1, 4, 16, 64):
        figures[f"{in_flight} in flight"] = calls_a_second(in_flight, 4 * many)
    return figures


def work(rank, options):
    torch.set_num_threads(1)
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    backend_options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{options.folder}/stock-store"
    )
    rpc.init_rpc(
        "caller" if rank == 0 else "callee",
        rank=rank,
        world_size=2,
        rpc_backend_options=backend_options,
    )
    if rank == 0:
        figures = measure(options.quick)
        with open(f"{options.folder}/result", "w", encoding="utf-8") as out:
            out.writelines(f"{name}\t{figure}\n" for name, figure in figures.items())
    rpc.shutdown()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    run_ranks(2, lambda rank: work(rank, options))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: BSD-3-Clause
"""Stock torch's store, start of a job, groups and launcher, for `muster-lab store|group|launch`;
prints one figure in microseconds.
"""

import argparse
import datetime
import os
import socket
import statistics
import subprocess
import sys
import time

import torch.distributed as dist
from forked_ranks import run_ranks


def microseconds(start):
    return (time.perf_counter() - start) * 1e6


def meet(options, rank):
    """All processes are there before anything is measured."""
    open(f"{options.folder}/ready-{rank}", "w").close()
    while not all(os.path.exists(f"{options.folder}/ready-{r}") for r in range(options.count)):
        time.sleep(0.0005)


def tell(options, rank, figure):
    with open(f"{options.folder}/figure-{rank}", "w") as file:
        file.write(str(figure))


def get(options, rank):
    with open(f"{options.folder}/port") as file:
        port = int(file.read())
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for _ in range(20):
        client.get("key")
    meet(options, rank)
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < options.seconds:
        client.get("key")
        calls += 1
    tell(options, rank, microseconds(start) / calls)


def start_job(options, rank, method=None):
    dist.init_process_group(
        "gloo",
        init_method=method or f"file://{options.folder}/store",
        rank=rank,
        world_size=options.count,
        timeout=datetime.timedelta(minutes=2),
    )


def init(options, rank, method=None):
    meet(options, rank)
    start = time.perf_counter()
    start_job(options, rank, method)
    tell(options, rank, microseconds(start))
    dist.barrier()
    dist.destroy_process_group()


def reserve_port():
    """Kept by a socket that does not listen: only a process that asks for it by its number, with
    SO_REUSEADDR as every server does, gets it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held, held.getsockname()[1]


def init_over_tcp(options, rank):
    init(options, rank, f"tcp://127.0.0.1:{options.port}")


def new_group(options, rank):
    start_job(options, rank)
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.new_group()
        times.append(microseconds(start))
    tell(options, rank, statistics.median(times))
    dist.barrier()
    dist.destroy_process_group()


def launch(options):
    script = f"{options.folder}/nothing.py"
    open(script, "w").close()
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(options.count),
            script,
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    print(microseconds(start))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["get", "init", "init_file", "new_group", "launch"])
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    if options.what == "launch":
        return launch(options)
    body = {"get": get, "init": init_over_tcp, "init_file": init, "new_group": new_group}[
        options.what
    ]
    options.held, options.port = reserve_port() if options.what == "init" else (None, 0)
    ranks = os.fork()
    if ranks == 0:
        while options.what == "get" and not os.path.exists(f"{options.folder}/port"):
            time.sleep(0.001)
        run_ranks(options.count, lambda rank: body(options, rank))
    if options.what == "get":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        server.set("key", "a value")
        with open(f"{options.folder}/port.new", "w") as file:
            file.write(str(server.port))
        os.rename(f"{options.folder}/port.new", f"{options.folder}/port")
    status = os.waitstatus_to_exitcode(os.waitpid(ranks, 0)[1])
    if status == 0:
        print(
            max(
                float(open(f"{options.folder}/figure-{rank}").read())
                for rank in range(options.count)
            )
        )
    sys.exit(status)


if __name__ == "__main__":
    main()

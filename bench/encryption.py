#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The cost of encryption between two hosts: the same calls with all bytes encrypted and with
payloads in the clear, in turn.

    bench/encryption.py                                  (as root, with iproute2; on a machine that
    does nothing else) bench/encryption.py --against ../before/build/release

The hosts are network namespaces joined by a veth pair. Measured in turn, `--rounds` times each:
`full` (MUSTER_TLS is not set), `clear` (MUSTER_TLS=control-plain: payloads of 4 KiB and more are
neither encrypted nor authenticated) and, with --against, `before`: another build, such as one from
before there was any encryption. Lines, medians over the rounds, and each way's ratio to `full`:

    64 MiB        send and receive, GB/s, over an unlimited link
    64 MiB 1G     the same over a link of 1 Gbit/s (tc, token bucket)
    8 B           half of a round trip, us, median
    init 32       init_process_group of 16 ranks on each host, ms, the slowest rank

Required: 64 MiB at least 0.75 of `clear` or `before`; no loss at 1 Gbit/s; 8 B at most 3 us more,
and init at most 30 ms more, than `before`.
"""

import argparse
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PREFIX = f"mb{os.getpid() % 10000}"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
CASES = ("64 MiB", "64 MiB 1G", "8 B", "init 32")
UNITS = {"64 MiB": "GB/s", "64 MiB 1G": "GB/s", "8 B": "us", "init 32": "ms"}


def command(*words):
    subprocess.run([str(word) for word in words], check=True)


class Hosts:
    """Two network namespaces joined by a veth pair."""

    names = (f"{PREFIX}a", f"{PREFIX}b")

    def __enter__(self):
        for name in self.names:
            command("ip", "netns", "add", name)
        command(
            "ip",
            "link",
            "add",
            "wire",
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, ADDRESSES, strict=True):
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                command("ip", "-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def limit(self, rate):
        for name in self.names:
            remove = ["ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", "wire", "root"]
            subprocess.run(remove, check=False, stderr=subprocess.DEVNULL)
            if rate:
                shape = ("tbf", "rate", rate, "burst", "512kb", "latency", "50ms")
                command(
                    "ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", *shape
                )


def run_ranks(hosts, build, variables, case, port, size):
    """The number that rank 0 prints."""
    world = 32 if case == "init 32" else 2
    environment = {
        **os.environ,
        "PYTHONPATH": f"{build}/python",
        "MUSTER_SECRET": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    ranks = []
    for rank in range(world):
        words = [
            "ip",
            "netns",
            "exec",
            hosts.names[rank * 2 // world],
            sys.executable,
            __file__,
            "--rank",
            rank,
            "--world",
            world,
        ]
        words += ["--case", case, "--port", port, "--bytes", size]
        ranks.append(
            subprocess.Popen(
                [str(word) for word in words], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f'encryption: a rank of "{case}" has failed')
    return max(float(text) for text in outputs if text.strip())


def work(options):
    """One rank of one case."""
    import torch

    import muster as dist

    # Ranks begin together: importing takes seconds, and not equally many.
    store = dist.TCPStore(ADDRESSES[0], options.port, options.world, options.rank == 0)
    store.barrier("imported", options.world)
    begin = time.perf_counter()
    dist.init_process_group("cpu:native", store=store, rank=options.rank, world_size=options.world)
    took = time.perf_counter() - begin
    if options.case == "init 32":
        print(took * 1e3)
    else:
        other = 1 - options.rank
        tensor = torch.zeros(
            options.bytes if options.case.startswith("64") else 8, dtype=torch.uint8
        )

        def turn():
            start = time.perf_counter()
            for step in (options.rank, other):
                dist.send(tensor, other) if step == 0 else dist.recv(tensor, other)
            return (time.perf_counter() - start) / 2

        large = options.case.startswith("64")
        times = [turn() for _ in range(12 if large else 5000)]
        middle = statistics.median(times[2:])
        if options.rank == 0:
            print(tensor.numel() / middle / 1e9 if large else middle * 1e6)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--build", default=ROOT / "build/release", help="the build folder that is measured"
    )
    parser.add_argument(
        "--against", help="the build folder of another tree, measured in turn with it"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    parser.add_argument("--bytes", type=int, default=64 << 20, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="a file to write the numbers to")
    for name in ("--rank", "--world", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return work(options)
    ways = {"full": (options.build, {}), "clear": (options.build, {"MUSTER_TLS": "control-plain"})}
    if options.against:
        ways["before"] = (options.against, {})
    found = {case: {way: [] for way in ways} for case in options.cases}
    port = 20000 + os.getpid() % 10000
    with Hosts() as hosts:
        for case in options.cases:
            hosts.limit("1gbit" if case.endswith("1G") else None)
            for _ in range(options.rounds):
                for way, (build, variables) in ways.items():
                    port += 1
                    found[case][way].append(
                        run_ranks(
                            hosts,
                            pathlib.Path(build).resolve(),
                            variables,
                            case,
                            port,
                            options.bytes,
                        )
                    )
    print(
        f"{'':10}"
        + "".join(f"{way:>12}" for way in ways)
        + "".join(f"{'full/' + way:>14}" for way in ways if way != "full")
    )
    for case, numbers in found.items():
        middles = {way: statistics.median(values) for way, values in numbers.items()}
        line = f"{case:10}" + "".join(f"{middles[way]:12.2f}" for way in ways)
        line += "".join(f"{middles['full'] / middles[way]:14.3f}" for way in ways if way != "full")
        print(f"{line}  {UNITS[case]}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()

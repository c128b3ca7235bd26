#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Times all_reduce with compression between hosts: `muster-lab compressed`.

The hosts are network namespaces of this machine on links of the given rate, as in bench/hosts.py,
with one rank on each. That needs root and iproute2. Shown are the median of calls on float32, from
a barrier to the end on rank 0, how many times as fast as without compression that is, and as the
bytes alone would allow. The forms take turns, call by call.
"""

import argparse
import json
import pathlib
import signal
import statistics
import sys
import tempfile
import time

import hosts as between
from hosts_workers import demand_hosts, run_workers

FORMS = {"float32": 512, "bf16": 256, "int8": 130, "int4": 66}  # bytes of 128 values


def time_calls(options):
    """What a rank does."""
    import torch

    import muster as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        init_method=f"file://{options.folder}/meeting", rank=options.rank, world_size=options.hosts
    )
    tensor = torch.randn(options.mib * 2**18)
    times = {form: [] for form in FORMS}
    for _ in range(options.calls + 1):
        for form in FORMS:
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor, compression=None if form == "float32" else form)
            times[form].append((time.perf_counter() - start) * 1e3)
            tensor.mul_(1 / options.hosts)
    dist.destroy_process_group()
    if options.rank == 0:  # the first of each is to warm up
        medians = {form: statistics.median(each[1:]) for form, each in times.items()}
        (options.folder / "result").write_text(json.dumps(medians))


def measure(hosts, options):
    """Milliseconds of each form."""
    with tempfile.TemporaryDirectory(prefix="muster-compressed-") as folder:
        commands = [
            [
                *(sys.executable, __file__, "--folder", folder, "--rank", host),
                *("--hosts", options.hosts, "--mib", options.mib, "--calls", options.calls),
            ]
            for host in range(options.hosts)
        ]
        run_workers(hosts, commands, options.limit, "compressed_all_reduce")
        return json.loads((pathlib.Path(folder) / "result").read_text())


def read_options(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="default 2")
    parser.add_argument(
        "--rate",
        type=between.number_with(between.UNITS, "rate"),
        default="1gbit",
        help="of each host's link, as tc writes it; default 1gbit",
    )
    parser.add_argument("--mib", type=int, default=64, help="of float32; default 64")
    parser.add_argument("--calls", type=int, default=9, help="of each form; default 9")
    parser.add_argument("--limit", type=float, default=600, help="seconds; default 600")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a worker
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if not 2 <= options.hosts <= 9 or options.mib < 1 or options.calls < 1:
        parser.error("there are 2 to 9 hosts, at least 1 MiB and one call")
    return options


def main(words):
    options = read_options(words)
    if options.rank is not None:
        time_calls(options)
        return 0
    demand_hosts("compressed_all_reduce")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with between.Hosts(options.hosts, options.rate) as hosts:
        found = measure(hosts, options)
    print(f"{'':10}{'ms':>9}{'times':>8}{'bytes':>8}")
    for form, ms in found.items():
        times, least = found["float32"] / ms, FORMS["float32"] / FORMS[form]
        print(f"{form:10}{ms:9.1f}{times:8.2f}{least:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

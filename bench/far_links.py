#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Measures how much of a long link's rate large messages reach: `muster-lab far-links`.

Two hosts as in bench/hosts.py, network namespaces of this machine on links of the given rate, with
bench/delay_relay.py between them; that needs root and iproute2. One sends messages to the other,
several in flight at a time, as a message is sent once its receiver has answered a request. Rows:

    one        a single connection (MUSTER_TUNE=most_strands=1)
    default    as many connections as the round trip asks

Shown are the connections, the payload's rate from the end of the last warming message to the end of
the last one, and its part of the link's rate, of which headers take 4.6 %. Warming messages are for
TCP's slow start. A round trip of 200 ms at 1 Gbit/s takes about 20 seconds a row.
"""

import argparse
import collections
import json
import pathlib
import signal
import socket
import sys
import tempfile
import time

import hosts as between
from hosts_workers import demand_hosts, lines_of_workers
from words import listed, words_of

ROWS = {"one": ("env", "MUSTER_TUNE=most_strands=1"), "default": ()}
ESTABLISHED = "01"


def connections_to(address, table):
    """Those to an IPv4 address in the text of /proc/net/tcp."""
    wanted = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}"
    rows = [line.split() for line in table.splitlines()[1:]]
    return sum(row[2].split(":")[0] == wanted and row[3] == ESTABLISHED for row in rows)


def work(options):
    """One rank: rank 0 receives, and prints what it has measured."""
    import torch

    import muster as dist

    torch.set_num_threads(1)
    place = {"rank": options.rank, "world_size": 2}
    dist.init_process_group(init_method=f"file://{options.folder}/muster", **place)
    move = dist.irecv if options.rank == 0 else dist.isend
    memory = [torch.ones(options.size, dtype=torch.uint8) for _ in range(options.in_flight)]
    begun, ends = collections.deque(), []
    for number in range(options.warm_up + options.messages):
        if len(begun) == options.in_flight:
            begun.popleft().wait()
            ends.append(time.monotonic())
        begun.append(move(memory[number % options.in_flight], 1 - options.rank))
    for message in begun:
        message.wait()
        ends.append(time.monotonic())
    if options.rank == 0:
        table = pathlib.Path("/proc/self/net/tcp").read_text(encoding="ascii")
        took = ends[-1] - ends[options.warm_up - 1]
        rate = 8 * options.size * options.messages / took
        found = {"rate": rate, "connections": connections_to(options.peer, table)}
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(hosts, options, row):
    with tempfile.TemporaryDirectory(prefix="muster-far-") as folder:
        words = [*ROWS[row], sys.executable, __file__, "--folder", folder]
        words += ["--peer", hosts.addresses[1], "--size", options.size]
        words += ["--messages", options.messages, "--warm-up", options.warm_up]
        words += ["--in-flight", options.in_flight]
        commands = [[*words, "--rank", rank] for rank in range(2)]
        return lines_of_workers(hosts, commands, options.limit, "far_links")[0]


def compare(options):
    print(f"{'Mbit/s':>8}{'ms':>6}  {'row':9}{'connections':>12}{'Mbit/s':>10}{'of it':>8}")
    for rate in options.rates:
        for round_trip in options.round_trips:
            with between.Hosts(2, rate, round_trip_ms=round_trip) as hosts:
                for row in options.rows:
                    found = measure(hosts, options, row)
                    part = found["rate"] / rate
                    print(
                        f"{rate / 1e6:8.0f}{round_trip:6.0f}  {row:9}{found['connections']:12}"
                        f"{found['rate'] / 1e6:10.1f}{100 * part:6.1f} %",
                        flush=True,
                    )
                    found |= {"row": row, "link": rate, "round_trip_ms": round_trip}
                    between.append_rows(options.json, [found])


def read_options(words):
    parser = argparse.ArgumentParser(
        prog="muster-lab far-links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rate = between.number_with(between.UNITS, "rate")
    add = parser.add_argument
    add("--rates", type=listed(rate), default=[1e9], help="default 1gbit")
    add("--round-trips", type=listed(float), default=[200.0], help="ms; default 200")
    add("--rows", type=words_of(ROWS), default=list(ROWS), help="default one,default")
    add("--size", type=int, default=64 << 20, help="bytes of a message; default 64 MiB")
    add("--messages", type=int, default=16, help="that are measured; default 16")
    add("--warm-up", type=int, default=8, help="messages before them; default 8")
    add("--in-flight", type=int, default=4, help="messages at a time; default 4")
    add("--limit", type=float, default=600, help="seconds for one row; default 600")
    add("--json", help="also append the rows to this file, one JSON object a line")
    for name, kind in (("--folder", str), ("--peer", str), ("--rank", int)):
        add(name, type=kind, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args(words)
    if min(options.size, options.messages, options.warm_up, options.in_flight) < 1:
        parser.error("sizes and numbers of messages are at least 1")
    if min(options.round_trips) < 0:
        parser.error("no round trip is below 0")
    return options


def main(words):
    options = read_options(words)
    if options.rank is not None:
        return work(options)
    demand_hosts("far_links")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return compare(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

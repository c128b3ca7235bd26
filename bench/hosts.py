#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Times collectives between hosts against what their links allow: `muster-lab hosts`.

The hosts are network namespaces of this machine, each on a switch by links of the given rate, one
or several (veth pairs, a bridge, tc's token bucket in each direction; TCP with cubic). That needs
root and iproute2; whatever was made is removed at the end, after Ctrl-C too. With --host-list they
are machines, reached by a remote shell. muster, with TLS as it is by default, and those of stock
torch's Gloo and Open MPI that are here take turns.

The limit of a cell is what the busiest direction of the busiest host's links must carry, divided by
the rate of all its links; a link carries as much in both directions at once. With B the bytes of
the cell, H hosts and R ranks on each:

    all_reduce       2 (H - 1) / H x B          B is what each rank gives
    reduce_scatter   (H - 1) / H x B            B is what each rank gives
    all_gather       (H - 1) / H x B            B is what each rank receives in all
    broadcast        B
    all_to_all       R (H - 1) / H x B          B is what each rank gives, and receives, in all
    reduce           B                          B is what each rank gives
    gather           (H - 1) / H x B            B is what the root receives in all
    scatter          (H - 1) / H x B            B is what the root gives in all

Combining an element of H hosts takes H - 1 messages between hosts, and telling all hosts the result
takes H - 1 more. Some host sends at least the H-th part of all_reduce's 2 (H - 1) B, and of
reduce_scatter's (H - 1) B. In a reduce the root's host receives at least the sum of all others,
which is B, and each other host sends as much: a reduce_scatter with a gather after it sends (H - 1)
/ H and then 1 / H. In an all_gather every host receives the parts of the others, in a broadcast the
whole. In an all_to_all each of R ranks sends what is for other hosts; in a gather the root's host
receives the parts of other hosts, in a scatter it sends them.

It counts payload alone: headers take 4.6 % of a wire with an MTU of 1500, so nothing large is below
1.05, while the bucket lets 256 KiB pass at once, so 1 MiB may be. Shown are microseconds of one
call after a barrier, from the first rank's start to the last rank's end, the median over the rounds
of the median of calls; then times the limit. With --latency, or if the rate is unknown, muster's
time over that of the best other library is shown instead; with --latency a call counts from the
last rank's start, so that the barrier's skew is none of it.

--host-list reaches each host by `ssh HOST COMMAND`, or another --remote-shell. muster, Python and
torch have the same paths on all hosts, as on this one; Open MPI is installed on all. No host asks
for a password. The hosts' clocks differ: a call then lasts from a rank's own start to its end, on
the slowest rank, which is up to a barrier's skew longer.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile

from hosts_libraries import LIBRARIES, Contestant, those_here
from hosts_places import DEVICES, Hosts, ListedHosts, names_of
from hosts_table import CARRIED, Table, leaves_nothing, limit_us, row_of
from words import words_of

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SIZES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LARGE = "1MiB,16MiB"
SMALL = "8B,64B,1KiB,8KiB,64KiB"
#: What a library that does not answer is given, in times of a call's limit: it makes about ten.
PATIENCE = 100
#: Of links whose rate is not known.
SLOW_RATE = 1e8


def number_with(units, what):
    def read(text):
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        with contextlib.suppress(KeyError, ValueError):
            if (value := float(digits) * units[text[len(digits) :]]) > 0:
                return value
        raise argparse.ArgumentTypeError(
            f'"{text}" is no {what}: a number and one of {", ".join(filter(None, units))}'
        )

    return read


def append_rows(path, rows):
    """One JSON object a line; nothing without a path."""
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def sizes_of(text):
    size_of = number_with(SIZES, "size")
    return {word: int(size_of(word)) for word in text.split(",")}


def cells(options):
    """Operations with sizes; those that leave an element for each rank."""
    ranks = options.hosts * options.ranks_per_host
    for op in options.op:
        for text, size in options.sizes.items():
            if leaves_nothing(op, size, ranks):
                print(f"{op} of {text} is left out: {ranks} ranks share it", file=sys.stderr)
            else:
                yield op, text, size


def limit_of(op, size, options, rate):
    shape = options.hosts, options.ranks_per_host
    return limit_us(op, size, *shape, rate * options.links) if rate else None


def patience(op, size, options):
    """Seconds until a library that has not answered is given up."""
    limit = limit_of(op, size, options, options.rate or SLOW_RATE)
    return 120 + 60 * options.seconds + PATIENCE * limit / 1e6


def play(contestants, op, size, options):
    """Figures of each library, a round after the other."""
    found = {contestant.library: [] for contestant in contestants}
    for _ in range(options.rounds):
        for contestant in contestants:
            if contestant.ended:
                continue
            figures = contestant.play(op, size, options.seconds, patience(op, size, options))
            found[contestant.library] += [figures] if figures else []
    return found


def measure(options, hosts, folder):
    """A row of each cell and library; each line is printed as soon as it is there."""
    contestants = []
    rows = []
    try:
        contestants += (Contestant(name, hosts, options, folder) for name in options.libraries)
        # A library that still starts would disturb the others.
        for op, _, size in options.cells[:1]:
            for contestant in contestants:
                contestant.play(op, size, 0.01, patience(op, size, options))
        table = Table(options.libraries, with_limit=options.rate and not options.latency)
        print(hosts.remark(), table.head(), sep="\n", flush=True)
        for op, text, size in options.cells:
            limit = limit_of(op, size, options, options.rate)
            facts = {
                "op": op,
                "bytes": size,
                "kind": hosts.kind,
                "pinned": hosts.pinned,
                "hosts": options.hosts,
                "ranks_per_host": options.ranks_per_host,
                "rate": options.rate,
                "links": options.links,
                "limit_us": limit,
            }
            found = play(contestants, op, size, options)
            own = {
                name: row_of(figures, library=name, **facts)
                for name, figures in found.items()
                if figures
            }
            cell = f"{op:16}{text:>8} {options.hosts}x{options.ranks_per_host}"
            print(
                table.line(cell, {name: row["us"] for name, row in own.items()}, limit), flush=True
            )
            rows += own.values()
    finally:
        for contestant in contestants:
            contestant.end()
    return rows


def add_hosts(parser):
    made = parser.add_argument_group("hosts that are network namespaces")
    made.add_argument("--hosts", type=int, help="default 2, at most 200")
    made.add_argument(
        "--links", type=int, help="of each host, each of the rate; default 1, at most 4"
    )
    made.add_argument(
        "--pin",
        action="store_true",
        help="give each host cores of its own, if there are enough; else hosts share all cores",
    )
    listed = parser.add_argument_group("hosts that are machines")
    listed.add_argument(
        "--host-list",
        metavar="NAMES",
        type=names_of,
        help="comma separated, or a file with a name on each line; rank 0 is on the first",
    )
    listed.add_argument(
        "--remote-shell", metavar="COMMAND", help="what runs a command on a host; default ssh"
    )
    listed.add_argument(
        "--interfaces",
        metavar="NAMES",
        type=lambda text: text.split(","),
        help="the hosts' network interfaces to use, comma separated; default: each library chooses",
    )


def read_options(words):
    parser = argparse.ArgumentParser(
        prog="muster-lab hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_hosts(parser)
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default 1")
    parser.add_argument(
        "--rate",
        type=number_with(UNITS, "rate"),
        help="of each link, as tc writes it; default 1gbit, for --host-list unknown",
    )
    parser.add_argument(
        "--op",
        type=words_of(CARRIED),
        default=list(CARRIED),
        help="operations, comma separated; default: those above",
    )
    parser.add_argument(
        "--sizes",
        type=sizes_of,
        help="bytes, comma separated; default 1MiB,16MiB, for --latency 8B,64B,1KiB,8KiB,64KiB",
    )
    parser.add_argument(
        "--latency",
        action="store_true",
        help="small calls, compared with the best other library instead of the limit",
    )
    parser.add_argument(
        "--libraries",
        type=words_of(LIBRARIES),
        default=list(LIBRARIES),
        help="comma separated; default muster,gloo,openmpi",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of the loops of one cell; default 0.5"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often everything is repeated; default 3"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=29600,
        help="where muster's ranks meet on the first host, Gloo's at the next; default 29600",
    )
    parser.add_argument("--json", help="also append the rows to this file, one JSON object a line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    complete(options, parser)
    return options


def complete(options, parser):
    """Checks the options against each other and fills in what was not given."""
    if options.host_list:
        if options.pin or options.hosts is not None or options.links is not None:
            parser.error("--hosts, --links and --pin are for namespaces, not for --host-list")
        options.hosts = len(options.host_list)
        options.links = len(options.interfaces or [0])
    else:
        if options.remote_shell or options.interfaces:
            parser.error("--remote-shell and --interfaces need --host-list")
        options.hosts = 2 if options.hosts is None else options.hosts
        options.links = 1 if options.links is None else options.links
        options.rate = options.rate or UNITS["gbit"]
    if not 2 <= options.hosts <= 200 or options.ranks_per_host < 1 or options.rounds < 1:
        parser.error("there are 2 to 200 hosts, at least one rank on each and at least one round")
    if not 1 <= options.links <= len(DEVICES):
        parser.error(f"a host has 1 to {len(DEVICES)} links")
    options.sizes = options.sizes or sizes_of(SMALL if options.latency else LARGE)
    options.cells = list(cells(options))
    # Timeout of one call of muster or Gloo, seconds.
    options.timeout = int(
        max((patience(op, size, options) for op, _, size in options.cells), default=0)
    )


def hosts_of(options):
    if options.host_list:
        shell = options.remote_shell or "ssh"
        return ListedHosts(options.host_list, shell, options.interfaces or [], options.worker)
    return Hosts(options.hosts, options.rate, options.links, options.pin)


def demand_what_is_needed(options):
    def stop(why):
        sys.exit(f"muster-lab hosts: {why}")

    if not pathlib.Path(options.worker or "").is_file():
        stop(
            f"{options.worker} is not there; it is built with the half of muster that needs torch "
            "(make build)"
        )
    if options.host_list:
        return
    if os.geteuid() != 0:
        stop("making network namespaces needs root: sudo muster-lab hosts")
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if not shutil.which(program):
            stop(f"there is no {program}: apt-get install {package}")


def main(words):
    options = read_options(words)
    demand_what_is_needed(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.libraries = list(those_here(options.libraries))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="muster-hosts-") as folder,
            hosts_of(options) as hosts,
        ):
            rows = measure(options, hosts, folder)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    append_rows(options.json, rows)
    measured = {(row["library"], row["op"], row["bytes"]) for row in rows}
    wanted = [("muster", op, size) for op, _, size in options.cells]
    return 0 if "muster" not in options.libraries or measured.issuperset(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

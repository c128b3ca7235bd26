#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a language model on replicas that meet over links: `muster-lab replicas`.

The replicas are hosts as in bench/hosts.py, network namespaces of this machine on links of the
given rate, with one rank on each; that needs root and iproute2. The model and the text are those of
examples/replicas/replicas.py, to which options that are not listed here go. Rows:

    ddp            DistributedDataParallel: gradients travel in every step
    diloco         DiLoCo, a meeting every --sync-every steps
    int8, int4     the same, and what travels is compressed
    streaming      4 fragments that meet in turn, in int4; a result is taken 5 steps later
    gloo ddp       stock torch's DistributedDataParallel on Gloo
    gloo diloco    DiLoCo by stock torch on Gloo (bench/stock_diloco.py)

Each row learns from the same tokens. Shown are the held-out loss in nats a byte, its mean over the
seeds, the least and the most; how far the mean is from ddp's; the bytes that all hosts send for
each token, encryption and acknowledgements included, headers once for each packet that the kernel
has not cut yet; and tokens a second. The defaults take 20 to 25 minutes on 2 cores: about 17 ms of
a core for each window that is learned from, and what DDP waits for links of 1 Gbit/s.

With --links, tokens a second alone, at each of --rates and --round-trips: that of 8 steps with ddp,
of two meetings with the others. A round trip is made longer by bench/delay_relay.py. The defaults
take about as long.
"""

import argparse
import pathlib
import signal
import statistics
import sys
import tempfile

import hosts as between
from hosts_workers import demand_hosts, lines_of_workers
from words import listed, words_of

WORKER = pathlib.Path(__file__).with_name("replica_worker.py")
DILOCO = ("--method", "diloco")
STREAMING = ("--fragments", 4, "--delay", 5, "--mix", 0.5, "--compression", "int4")
#: Words for the worker.
ROWS = {
    "ddp": ("--method", "ddp"),
    "diloco": DILOCO,
    "int8": (*DILOCO, "--compression", "int8"),
    "int4": (*DILOCO, "--compression", "int4"),
    "streaming": (*DILOCO, *STREAMING),
    "gloo ddp": ("--method", "gloo_ddp"),
    "gloo diloco": ("--method", "gloo_diloco"),
}
LOSSES = ("ddp", "diloco", "int8", "int4", "streaming")
SPEEDS = ("ddp", "gloo ddp", "diloco", "int8", "int4", "streaming")
LINK_STEPS, LINK_MEETINGS = 8, 2


def measure(hosts, options, row, *words):
    """The lines that the example prints: a run of each seed."""
    count = len(hosts.names)
    with tempfile.TemporaryDirectory(prefix="muster-replicas-") as folder:
        commands = [
            [
                *(sys.executable, WORKER, "--folder", folder, "--rank", host, "--ranks", count),
                *("--interface", hosts.devices[0], "--batch", options.batch),
                *("--context", options.context, "--width", options.width),
                *("--layers", options.layers, *ROWS[row], *words, *options.rest),
            ]
            for host in range(count)
        ]
        lines = lines_of_workers(hosts, commands, options.limit, "replica_steps")
        return [{"row": row, **line} for line in lines]


def kept(rows, options, **facts):
    between.append_rows(options.json, ({**row, **facts} for row in rows))
    return rows


def loss_line(row, runs, ddp):
    """ddp: the mean loss of that; None: not measured."""
    losses = [run["loss"] for run in runs]
    mean = statistics.mean(losses)
    beside = f"{100 * (mean / ddp - 1):+8.2f} %" if ddp else f"{'':10}"
    sent = statistics.mean(run["bytes_per_token"] for run in runs)
    speed = statistics.mean(run["tokens_per_s"] for run in runs)
    spread = f"{min(losses):8.4f}{max(losses):8.4f}"
    return f"{row:13}{mean:8.4f}{spread}{beside}{sent:14.1f}{speed:12.0f}"


def compare_losses(options):
    words = ("--sync-every", options.sync_every, "--tokens", options.tokens)
    words += ("--seeds", ",".join(map(str, options.seeds)))
    for count in options.replicas:
        with between.Hosts(count, options.rates[0]) as hosts:
            ddp = None
            for number, row in enumerate(options.rows):
                runs = kept(measure(hosts, options, row, *words), options, rate=options.rates[0])
                if number == 0:
                    one = runs[0]
                    print(
                        f"\n{count} replicas, {one['weights']} weights, {one['tokens']} tokens, "
                        f"{len(runs)} seeds, sync_every {options.sync_every}\n"
                        f"{'':13}{'loss':>8}{'least':>8}{'most':>8}{'to ddp':>10}"
                        f"{'bytes/token':>14}{'tokens/s':>12}"
                    )
                if row == "ddp":
                    ddp = statistics.mean(run["loss"] for run in runs)
                print(loss_line(row, runs, ddp), flush=True)


def compare_links(options):
    for count in options.replicas:
        print(f"\n{count} replicas, tokens a second; in times of ddp's")
        print(f"{'Mbit/s':>8}{'ms':>6}  " + "".join(f"{row:>18}" for row in options.rows))
        for rate in options.rates:
            for round_trip in options.round_trips:
                with between.Hosts(count, rate, round_trip_ms=round_trip) as hosts:
                    speeds = {row: link_speed(hosts, options, row) for row in options.rows}
                cells = "".join(speed_cell(speed, speeds.get("ddp")) for speed in speeds.values())
                print(f"{rate / 1e6:8.0f}{round_trip:6.0f}  {cells}", flush=True)


def speed_cell(speed, ddp):
    return f"{speed:10.0f}" + (f"{speed / ddp:7.1f}x" if ddp else f"{'':8}")


def link_speed(hosts, options, row):
    every = options.sync_every
    steps = LINK_STEPS if row.endswith("ddp") else LINK_MEETINGS * every
    tokens = steps * len(hosts.names) * options.batch * options.context
    words = ("--sync-every", min(every, steps), "--tokens", tokens)
    facts = {"rate": hosts.rate, "round_trip_ms": hosts.round_trip_ms}
    return kept(measure(hosts, options, row, *words), options, **facts)[0]["tokens_per_s"]


def read_options(words):
    parser = argparse.ArgumentParser(
        prog="muster-lab replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the example's --rate is not --rates
    )
    rate = between.number_with(between.UNITS, "rate")
    add = parser.add_argument
    add("--replicas", type=listed(int), default=[2, 4], help="default 2,4")
    add("--rows", type=words_of(ROWS), help="default: all but gloo's; with --links gloo ddp too")
    add("--links", action="store_true", help="tokens a second at each link")
    add("--rates", type=listed(rate), help="default 1gbit; with --links 10mbit,100mbit,1gbit")
    add("--round-trips", type=listed(float), help="ms, with --links; default 0,20,100")
    add("--seeds", type=listed(int), default=[1, 2, 3, 4, 5], help="default 1,2,3,4,5")
    add("--tokens", type=int, default=128_000, help="of all replicas; default 128000")
    add("--sync-every", type=int, default=50, help="steps; default 50")
    add("--batch", type=int, default=1, help="windows of a replica's step; default 1")
    add("--context", type=int, default=64, help="bytes of a window; default 64")
    add("--width", type=int, default=128, help="of the model; default 128")
    add("--layers", type=int, default=4, help="of the model; default 4: 0.9 million weights")
    add("--limit", type=float, default=1800, help="seconds for one row; default 1800")
    add("--json", help="also append the runs to this file, one JSON object a line")
    options, options.rest = parser.parse_known_args(words)
    if not all(2 <= count <= 200 for count in options.replicas) or options.sync_every < 1:
        parser.error("there are 2 to 200 replicas, and at least one step from meeting to meeting")
    if not options.links and (options.round_trips or len(options.rates or []) > 1):
        parser.error("--round-trips, and more than one of --rates, are for --links")
    options.rows = options.rows or list(SPEEDS if options.links else LOSSES)
    options.rates = options.rates or [1e7, 1e8, 1e9] if options.links else options.rates or [1e9]
    options.round_trips = options.round_trips or [0, 20, 100]
    return options


def main(words):
    options = read_options(words)
    demand_hosts("replica_steps")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (compare_links if options.links else compare_losses)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Training steps between hosts, beside what they compute and what they must send.

    sudo bench/host_steps.py                       (with a Python that has torch; PYTHONPATH: the
    sudo bench/host_steps.py --batches 32          folder of muster's package)

The hosts are network namespaces of this machine on links of the given rate, as in bench/hosts.py,
with one rank on each, bound to a core of its own while there are enough. They train a ResNet-18 for
images of 32 x 32, one thread a rank. The rows take turns, step by step. A step begins after a
barrier and lasts from the last rank's start to the last rank's end. Rows:

    ddp, fp16, powersgd   muster's DistributedDataParallel, without and with a communication hook
    fsdp                  muster's FSDP, a unit for each of 8 blocks, FULL_SHARD, forward_prefetch
    gloo ddp, gloo fp16   stock torch's DistributedDataParallel on Gloo
    gloo fsdp             stock torch's fully_shard on Gloo, with the same units

Columns, medians over the rounds, in milliseconds:

    wire     the payload that a host must send in a step, divided by the rate. With H hosts, G bytes
             of gradients (with a hook: those that it leaves) and P bytes of parameters,
             2 (H - 1) / H x G for DDP and 3 (H - 1) / H x P for FSDP, whose outer unit is gathered
             once only. Headers and encryption take 4.7 % of a wire with an MTU of 1500.
    step     what a step took
    x max    step / max(compute, wire); compute is the same step of the model alone
    least    the shortest step that its order permits on an ideal wire that costs no core anything:
             no gradient is sent before backward has made it, and FSDP computes a unit after it has
             gathered it. It is above max(compute, wire), because DDP sends nothing in forward, and
             because the last bytes are sent after backward.
    x least  step / least
    cpu      time on the rank's core, computing included, without the kernel's in interrupts
"""

import argparse
import json
import pathlib
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass

import hosts as between
from hosts_workers import demand_hosts, run_workers
from words import words_of

HERE = pathlib.Path(__file__).parent
ALONE = "alone"
ROWS = ("ddp", "fp16", "powersgd", "fsdp", "gloo ddp", "gloo fp16", "gloo fsdp")
RANK = 2  # of PowerSGD
MIN_COMPRESSION = 2  # its default min_compression_rate
WORD = 4  # bytes of an element of float32


@dataclass
class Piece:
    """A part of a step: what must be received before it, its time, and what it makes to be sent.

    Bytes are those that a host must send, seconds those of the model alone. `anywhere`: seconds
    that may pass at any time after what the first piece needs has come.
    """

    seconds: float = 0
    needs: float = 0
    gives: float = 0
    anywhere: float = 0


def factors(shape, rank=RANK):
    """Elements that PowerSGD sends for a gradient of this shape."""
    count = 1
    for extent in shape:
        count *= extent
    if len(shape) < 2:
        return count
    rows, columns = shape[0], count // shape[0]
    thin = (rows + columns) * min(rank, rows, columns)
    return thin if thin * MIN_COMPRESSION < count else count


def sent_elements(row, shape):
    """Number of float32 elements that the averaging of a gradient of this shape moves."""
    if row == "powersgd":
        return factors(shape)
    count = 1
    for extent in shape:
        count *= extent
    return count / 2 if row.endswith("fp16") else count


def ddp_pieces(row, model, hosts):
    """`model`: what a worker found; gradients in the order in which they came."""
    part = 2 * (hosts - 1) / hosts * WORD
    pieces = [Piece(model["forward"])]
    for gradient in model["gradients"]:
        pieces.append(Piece(gradient["seconds"], 0, part * sent_elements(row, gradient["shape"])))
    return pieces


def fsdp_pieces(model, hosts):
    """A unit's gradients are sent when all of them are there, the outer unit's at the end."""
    part = (hosts - 1) / hosts * WORD
    units, outer = model["units"], part * model["outer"]
    pieces = [Piece(0, outer)]
    pieces += (Piece(unit["forward"], part * unit["elements"]) for unit in units)
    for unit in reversed(units):
        sent = part * unit["elements"]
        pieces.append(Piece(unit["backward"], sent, sent))
    known = sum(piece.seconds for piece in pieces)
    whole = model["forward"] + sum(each["seconds"] for each in model["gradients"])
    pieces.append(Piece(0, 0, outer, max(0, whole - known)))
    return pieces


def wire_s(pieces, rate):
    return sum(piece.needs + piece.gives for piece in pieces) * 8 / rate


def least_s(pieces, rate):
    """A lower bound of the time of the pieces, which compute one after another beside one wire."""
    seconds = [piece.seconds for piece in pieces]
    needs = [piece.needs * 8 / rate for piece in pieces]
    gives = [piece.gives * 8 / rate for piece in pieces]
    anywhere = sum(piece.anywhere for piece in pieces)
    bounds = [wire_s(pieces, rate), needs[0] + sum(seconds) + anywhere + gives[-1]]
    for i in range(len(pieces)):
        bounds.append(sum(needs[: i + 1]) + sum(seconds[i:]) + gives[-1])
        bounds.append(needs[0] + sum(seconds[: i + 1]) + sum(gives[i:]))
    return max(bounds)


def pieces_of(row, model, hosts):
    return fsdp_pieces(model, hosts) if row.endswith("fsdp") else ddp_pieces(row, model, hosts)


def row_of(row, batch, found, options):
    """`found`: of each rank what its worker wrote."""
    model = found[0]["model"]

    def step_ms(name):
        turns = zip(*(each["spans"][name] for each in found), strict=True)
        return statistics.median(
            max(end for _, end in ranks) - max(start for start, _ in ranks) for ranks in turns
        )

    compute, pieces = step_ms(ALONE), pieces_of(row, model, options.hosts)
    wire = wire_s(pieces, options.rate) * 1e3
    step = step_ms(row)
    # Time of the model alone beside the pieces: the optimizer.
    beside = max(0, compute - sum(piece.seconds + piece.anywhere for piece in pieces) * 1e3)
    least = least_s(pieces, options.rate) * 1e3 + beside
    return {
        "bench": "host_steps",
        "row": row,
        "batch": batch,
        "hosts": options.hosts,
        "rate": options.rate,
        "compute_ms": compute,
        "compute_cpu_ms": statistics.median(found[0]["cpu"][ALONE]),
        "wire_ms": wire,
        "step_ms": step,
        "times_max": step / max(compute, wire),
        "least_ms": least,
        "times_least": step / least,
        "cpu_ms": statistics.median(found[0]["cpu"][row]),
    }


def measure(hosts, options, batch):
    """The results of each rank, in the order of ranks."""
    with tempfile.TemporaryDirectory(prefix="muster-steps-") as folder:
        commands = [
            [
                *(sys.executable, HERE / "host_steps_worker.py", "--folder", folder),
                *("--rank", host, "--ranks", options.hosts, "--rows", ",".join(options.rows)),
                *("--batch", batch, "--warm", options.warm, "--rounds", options.rounds),
            ]
            for host in range(options.hosts)
        ]
        run_workers(hosts, commands, options.limit, "host_steps")
        return [
            json.loads((pathlib.Path(folder) / f"result.{rank}").read_text())
            for rank in range(options.hosts)
        ]


def show(rows):
    first = rows[0]
    print(
        f"\nbatch {first['batch']}: compute {first['compute_ms']:.0f} ms, "
        f"cpu {first['compute_cpu_ms']:.0f} ms"
    )
    print(f"{'':10}{'wire':>8}{'step':>8}{'x max':>8}{'least':>8}{'x least':>9}{'cpu':>8}")
    for row in rows:
        print(
            f"{row['row']:10}{row['wire_ms']:8.0f}{row['step_ms']:8.0f}{row['times_max']:8.2f}"
            f"{row['least_ms']:8.0f}{row['times_least']:9.2f}{row['cpu_ms']:8.0f}",
            flush=True,
        )


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
    parser.add_argument(
        "--batches",
        type=lambda text: [int(word) for word in text.split(",")],
        default="8,32",
        help="images of a rank and step; default 8,32: less to compute than to send, then more",
    )
    parser.add_argument("--rows", type=words_of(ROWS), default=list(ROWS), help="default: all")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each row; default 7")
    parser.add_argument("--warm", type=int, default=4, help="steps before those; default 4")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one batch")
    parser.add_argument("--json", help="also append the rows to this file, one JSON object a line")
    options = parser.parse_args(words)
    if not 2 <= options.hosts <= 200 or options.rounds < 1 or options.warm < 3:
        parser.error("there are 2 to 200 hosts, at least one round and 3 steps before it")
    return options


def main(words):
    options = read_options(words)
    demand_hosts("host_steps")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with between.Hosts(options.hosts, options.rate) as hosts:
        for batch in options.batches:
            found = measure(hosts, options, batch)
            rows = [row_of(row, batch, found, options) for row in options.rows]
            show(rows)
            between.append_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

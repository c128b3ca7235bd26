#!/usr/bin/env python3
"""Holds rows of `muster bench --json` against what muster promises; exits with 1 where a promise is not kept.

    bench/gates.py rows.jsonl...

Libraries are compared by p50_us from 64 KiB up and by loop_us below. A rival's figure over ours is how many times as fast we are. What each
promise needs and the rows do not have is said, not passed over.
"""

import json
import math
import sys
from collections import defaultdict

KIB, MIB = 1024, 1024 * 1024
MPIS = ("openmpi", "mpich", "impi")


def compared(row):
    return row["p50_us"] if row["bytes"] >= 64 * KIB else row["loop_us"]


def mean(values):
    return math.exp(sum(math.log(value) for value in values) / len(values))


def size_text(size):
    return f"{size // MIB} MiB" if size >= MIB and size % MIB == 0 else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


class Rows:
    """Ours by (op, ranks, bytes, memory, transport), the rivals' without the memory: theirs is always private."""

    def __init__(self, rows):
        self.ours = {}
        self.theirs = defaultdict(dict)
        for row in rows:
            if row["dtype"] != "float32":
                continue
            place = (row["op"], row["ranks"], row["bytes"])
            if row["library"] == "muster":
                self.ours[(*place, row["memory"], row["transport"])] = compared(row)
            else:
                known = self.theirs[(*place, row["transport"])]
                known[row["library"]] = min(compared(row), known.get(row["library"], math.inf))

    def times_as_fast(self, memory, rivals, wanted, transport="shm"):
        """{cell: factor} for every cell of ours that `wanted(op, ranks, bytes)` and a rival has too."""
        factors = {}
        for (op, ranks, size, kind, wire), ours in self.ours.items():
            best = min((us for name, us in self.theirs[(op, ranks, size, wire)].items() if name in rivals), default=None)
            if kind == memory and wire == transport and best is not None and wanted(op, ranks, size):
                factors[(op, ranks, size)] = best / ours
        return factors


def report(title, factors, each=None, together=None):
    """One promise: every factor at least `each`, their geometric mean at least `together`."""
    if not factors:
        print(f"?     {title}: no rows")
        return False
    slow = sorted((factor, cell) for cell, factor in factors.items() if each is not None and factor < each)
    average = mean(factors.values())
    kept = not slow and (together is None or average >= together)
    wanted = " and ".join(filter(None, [each and f"each {each}", together and f"mean {together}"]))
    print(f"{'kept' if kept else 'OPEN'}  {title}: {len(factors)} cells, mean {average:.2f}, least {min(factors.values()):.2f} (wanted: {wanted})")
    for factor, (op, ranks, size) in slow[:12]:
        print(f"        {op} of {size_text(size)} on {ranks} ranks: {factor:.2f}")
    if len(slow) > 12:
        print(f"        and {len(slow) - 12} more")
    return kept


def main(paths):
    rows = Rows([json.loads(line) for path in paths for line in open(path) if line.strip()])
    reductions = ("all_reduce", "reduce_scatter")

    def small(op, ranks, size):
        return size <= KIB

    results = [
        report("arena tensors against the best MPI, reductions from 64 KiB",
               rows.times_as_fast("arena", MPIS, lambda op, r, b: op in reductions and b >= 64 * KIB), 1.5, 3),
        report("arena tensors against the best MPI, the other operations from 64 KiB",
               rows.times_as_fast("arena", MPIS, lambda op, r, b: op not in reductions and b >= 64 * KIB), None, 1.5),
        report("private buffers against the best MPI, every cell", rows.times_as_fast("private", MPIS, lambda *_: True), 1, 1.2),
        report("up to 1 KiB and the barrier against the best MPI", rows.times_as_fast("private", MPIS, small), 1),
        report("against Gloo up to 64 KiB", rows.times_as_fast("private", ("gloo",), lambda op, r, b: b <= 64 * KIB), 20),
        report("private buffers against Gloo above 64 KiB", rows.times_as_fast("private", ("gloo",), lambda op, r, b: b > 64 * KIB), None, 5),
        report("arena tensors against Gloo above 64 KiB", rows.times_as_fast("arena", ("gloo",), lambda op, r, b: b > 64 * KIB), None, 8),
        report("4 bytes over TCP between two ranks against Open MPI's tcp",
               rows.times_as_fast("private", ("openmpi",), lambda op, r, b: r == 2 and b == 4, "tcp"), 1),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

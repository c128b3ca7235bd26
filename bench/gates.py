#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Holds rows of `muster-lab --json` against what muster promises; exits with 1 where a promise is
not kept.

    bench/gates.py rows.jsonl...

Libraries are compared by p50_us from 64 KiB up and by loop_us below. A rival's figure over ours is
how many times as fast we are. A cell is kept too where ours is within 1.15 of what the machine
itself needs (rows of `muster-lab floors`) and no rival needs less. Every cell that is promised is
expected, with every rival: what the rows do not have is named, and the promise is not kept (`?`).
If a cell has several rows, the last of ours counts and the least of a rival's or the machine's;
rows of the engine alone and of ranks as threads do not count. MPICH is expected where each rank has
a core. Training steps (`muster-lab ddp --stock`) are compared by what they take longer than the
model alone, until all ranks are done; of stock torch's it is also told, not judged, without what it
takes where nothing is sent; and how many times as fast a job starts that meets in a file. Rows of
`muster-lab hosts` are compared with what their links allow and with the rivals there.
"""

import json
import math
import sys
from collections import defaultdict

from hosts_table import CARRIED

KIB, MIB = 1024, 1024 * 1024
MPIS = ("openmpi", "mpich", "impi")
GLOO = ("gloo",)
RANKS = (2, 4, 8)
REDUCTIONS = ("all_reduce", "reduce_scatter")
OTHERS = ("all_to_all", "all_gather", "broadcast", "reduce", "gather", "scatter")
#: The sizes at which each operation is measured up to 1 KiB: of 8 bytes nothing is left for each of
#: several ranks.
SMALL = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce"), (8, KIB)),
    "barrier": (0,),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), (64, KIB)),
}
MIDDLE = (64 * KIB, MIB, 16 * MIB)
LARGE = (*MIDDLE, 64 * MIB)


def compared(row):
    return row["p50_us"] if row["bytes"] >= 64 * KIB else row["loop_us"]


def mean(values):
    return math.exp(sum(math.log(value) for value in values) / len(values))


def size_text(size):
    return (
        f"{size // MIB} MiB"
        if size >= MIB and size % MIB == 0
        else f"{size // KIB} KiB"
        if size >= KIB
        else f"{size} B"
    )


class Floors:
    """The least time of a call, from how long a word takes from core to core and how long copies
    take on this machine.
    """

    NEAR = 1.15
    #: In a loop of these every rank waits in each call for the others; of the rest the one that
    #: only gives may run ahead.
    MEETING = ("all_reduce", "barrier", "all_gather", "reduce_scatter", "all_to_all")

    def __init__(self, rows):
        self.rows = {}
        for row in rows:
            place = (row["floor"], row["bytes"], row["at_once"])
            self.rows[place] = min(row["us"], self.rows.get(place, math.inf))
        self.cores = max((row["cores"] for row in rows), default=1)

    def simple(self, what, size=0):
        return self.rows.get((what, size, 1))

    def of(self, op, ranks, size, memory):
        """Microseconds, or None where the rows do not tell."""
        turns = max(1, ranks / self.cores)  # of a core, for each of its ranks to have been there
        if size < 64 * KIB:
            if op not in self.MEETING:
                return None
            hop, switch = self.simple("hop"), self.simple("switch")
            if switch is None or (turns == 1 and hop is None):
                return None
            return hop if turns == 1 else turns * switch
        busy = min(ranks, self.cores)
        copy = self.rows.get(("copy", size, busy))
        if copy is None:
            return None
        moved = (self.private if memory == "private" else self.shared)(op, ranks)
        return None if moved is None else copy * moved / busy

    @staticmethod
    def private(op, r):
        """Copies of a cell's bytes that all ranks together make: a byte read and one written is a
        copy. Bytes that are only moved can be fetched from their owner at once; bytes that are
        added up go through memory that the ranks share.
        """
        rest = (r - 1) / r
        into, out, reduced = rest, rest, (1 + 1 / r) / 2
        return {
            "all_reduce": r * (into + reduced + 1 / r / 2 + out),
            "reduce_scatter": r * (into + reduced),
            # Each reduces a share and the root fetches the results, or the root reduces all.
            "reduce": min(r * (into + reduced) + rest, r - 1 + (r + 1) / 2),
            "broadcast": r - 1,
            "all_gather": r,
            "all_to_all": r,
            "gather": 1,
            "scatter": 1,
        }.get(op)

    @staticmethod
    def shared(op, r):
        """The same if every rank can reach every rank's memory."""
        return {
            "all_reduce": r * 1,
            "reduce_scatter": r * (1 + 1 / r) / 2,
            "reduce": (r + 1) / 2,
            "broadcast": r - 1,
            "all_gather": r,
            "all_to_all": r,
            "gather": 1,
            "scatter": 1,
        }.get(op)


class Rows:
    """Ours by (op, ranks, bytes, memory, transport), the rivals' without the memory: theirs is
    always private.
    """

    def __init__(self, rows):
        self.floors = Floors([row for row in rows if "floor" in row])
        self.services = {
            (row["bench"], row["count"]): row
            for row in rows
            if "bench" in row and "stock_us" in row
        }
        self.training = Training([row for row in rows if row.get("bench") == "ddp"])
        self.wire = Wire([row for row in rows if row.get("bench") == "hosts"])
        self.ours = {}
        self.theirs = defaultdict(dict)
        for row in rows:
            if row.get("dtype") != "float32" or row.get("engine") or row.get("threads"):
                continue
            place = (row["op"], row["ranks"], row["bytes"])
            if row["library"] == "muster":
                self.ours[(*place, row["memory"], row["transport"])] = compared(row)
            else:
                # Gloo knows nothing but TCP, within a host too: that is what it is compared by.
                known = self.theirs[(*place, "shm" if row["library"] in GLOO else row["transport"])]
                known[row["library"]] = min(compared(row), known.get(row["library"], math.inf))

    def wanted(self, rivals, ranks):
        return [name for name in rivals if name != "mpich" or ranks <= self.floors.cores]

    def cells(self, memory, rivals, expected, transport="shm"):
        """{cell: (factor, whether ours is near the floor)} of the (op, ranks, bytes) in `expected`,
        and what of them is missing, as text.
        """
        found, missing = {}, []
        for cell in expected:
            op, ranks, size = cell
            ours = self.ours.get((*cell, memory, transport))
            known = self.theirs[(*cell, transport)]
            absent = ["muster"] * (ours is None) + [
                name for name in self.wanted(rivals, ranks) if name not in known
            ]
            if absent:
                missing.append(f"{cell_text(cell)}: no row of {', '.join(absent)}")
            best = min((us for name, us in known.items() if name in rivals), default=None)
            if ours is None or best is None:
                continue
            floor = self.floors.of(op, ranks, size, memory) if transport == "shm" else None
            # A floor that a library stays below is not a floor.
            found[cell] = (
                best / ours,
                floor is not None and best >= floor and ours <= Floors.NEAR * floor,
            )
        return found, missing


def cell_text(cell):
    op, ranks, size = cell
    return f"{op} of {size_text(size)} on {ranks} ranks"


def first_of(lines, most=12):
    for line in lines[:most]:
        print(f"        {line}")
    if len(lines) > most:
        print(f"        and {len(lines) - most} more")


def report(title, cells_and_missing, each=None, together=None):
    """One promise: every factor at least `each` or near the floor, their geometric mean at least
    `together`, and no cell missing.
    """
    cells, missing = cells_and_missing
    if not cells:
        print(f"?     {title}: no rows")
        return False
    slow = sorted(
        (factor, cell)
        for cell, (factor, near) in cells.items()
        if each is not None and factor < each and not near
    )
    saved = sum(each is not None and factor < each and near for factor, near in cells.values())
    factors = [factor for factor, _ in cells.values()]
    average = mean(factors)
    kept = not slow and (together is None or average >= together)
    wanted = " and ".join(
        filter(None, [each and f"each {round(each, 3)}", together and f"mean {together}"])
    )
    floors = f", {saved} of them by the floor" if saved else ""
    verdict = "OPEN" if not kept else "?" if missing else "kept"
    print(
        f"{verdict:4}  {title}: {len(cells) - len(slow)} of {len(cells)} cells{floors}, mean "
        f"{average:.2f}, "
        f"least {min(factors):.2f} (wanted: {wanted})"
    )
    first_of([f"{cell_text(cell)}: {factor:.2f}" for factor, cell in slow])
    first_of(missing)
    return kept and not missing


def report_figure(title, figure, most=None, least=None):
    """One promise about one figure."""
    if figure is None:
        print(f"?     {title}: no rows")
        return False
    kept = (most is None or figure <= most) and (least is None or figure >= least)
    wanted = f"at most {round(most, 2)}" if most is not None else f"at least {round(least, 2)}"
    print(f"{'kept' if kept else 'OPEN'}  {title}: {figure:.2f} (wanted: {wanted})")
    return kept


class Training:
    """The time by which a step of training is longer than one of the model alone, in milliseconds,
    by model, ranks and mode; the last row of each.
    """

    MODELS = ("mlp", "resnet")
    #: title, the share that is promised at most, whose overhead, against whose
    PROMISES = (
        ("of stock torch's DDP on Gloo", 1 / 5, "muster", "stock ddp"),
        ("of an all_reduce for every parameter by hand", 1, "muster", "by hand"),
        (
            "of stock torch's DDP on Gloo, by stock torch's on backend muster",
            1 / 3,
            "stock on muster",
            "stock ddp",
        ),
    )

    def __init__(self, rows):
        self.overheads = {
            (row["model"], row["ranks"], row["mode"]): row["overhead_ms"] for row in rows
        }
        self.ranks = sorted({ranks for _, ranks, _ in self.overheads})

    def share(self, model, ranks, ours, theirs, common=None):
        """None where a row is missing, or where the other's step is not longer than the model's
        alone: nothing can be said then.
        """
        above, below, base = (
            0 if mode is None else self.overheads.get((model, ranks, mode))
            for mode in (ours, theirs, common)
        )
        if above is None or below is None or base is None or below <= base:
            return None
        return max(0, above - base) / (below - base)

    def report(self):
        for ranks in self.ranks:
            for model in self.MODELS:
                sent = self.share(
                    model, ranks, "stock on muster", "stock ddp", "stock, nothing sent"
                )
                if sent is not None:
                    print(
                        f"      of stock torch's DDP, {model} on {ranks} ranks, without its own "
                        "copying: "
                        f"{sent:.2f} of what sending takes on Gloo"
                    )
        return [
            report_figure(
                f"what training takes longer, {model} on {ranks} ranks, share {title}",
                self.share(model, ranks, *modes),
                most=most,
            )
            for title, most, *modes in self.PROMISES
            for ranks in self.ranks or (2,)
            for model in self.MODELS
        ]


class Wire:
    """Rows of `muster-lab hosts`: the part of its link's rate that a host gets, at 1 Gbit/s; of a
    rival the best row, of ours the last.
    """

    SHAPES = ((2, 1), (4, 1), (2, 2), (2, 4), (4, 2))
    SIZES = (MIB, 16 * MIB)

    def __init__(self, rows):
        self.ours, self.theirs = {}, {}
        for row in rows:
            if row["rate"] != 1e9:
                continue
            cell = (row["op"], f"{row['hosts']} x {row['ranks_per_host']}", row["bytes"])
            part = row["limit_us"] / row["us"]
            if row["library"] == "muster":
                self.ours[cell] = part
            else:
                self.theirs[cell] = max(part, self.theirs.get(cell, 0))

    def compared(self, factor):
        expected = [
            (op, f"{hosts} x {ranks}", size)
            for op in CARRIED
            for hosts, ranks in self.SHAPES
            for size in self.SIZES
        ]
        found = {cell: factor(cell) for cell in expected}
        missing = [cell_text(cell) for cell, value in found.items() if value is None]
        return {cell: (value, False) for cell, value in found.items() if value is not None}, missing

    def report(self):
        return [
            report(
                "between hosts, share of the link's rate, at most 1.08 times the limit",
                self.compared(self.ours.get),
                1 / 1.08,
            ),
            report(
                "between hosts, times as fast as the best of Gloo and Open MPI",
                self.compared(lambda cell: over(self.ours.get(cell), self.theirs.get(cell))),
                0.98,
            ),
        ]


def over(above, below):
    return above / below if above is not None and below else None


def half(figure):
    return None if figure is None else figure / 2


def main(paths):
    rows = Rows([json.loads(line) for path in paths for line in open(path) if line.strip()])

    def expected(ops, sizes, ranks=RANKS):
        return [(op, r, size) for op in ops for r in ranks for size in sizes]

    small = [cell for op, sizes in SMALL.items() for cell in expected([op], sizes)]
    middle = expected((*REDUCTIONS, *OTHERS), MIDDLE)
    above = [cell for cell in middle if cell[2] > 64 * KIB] + expected(["all_reduce"], [64 * MIB])
    private = (
        small
        + middle
        + expected(["all_reduce"], [64 * MIB])
        + expected(["ping_pong"], [8, MIB], [2])
    )
    at_64_kib = expected((*REDUCTIONS, *OTHERS), [64 * KIB])
    to_64_kib = small + at_64_kib
    results = []
    for memory, title in (
        ("arena", "arena tensors"),
        ("allocator", "ordinary tensors of the shared allocator"),
    ):
        results += [
            report(
                f"{title} against the best MPI, reductions from 64 KiB",
                rows.cells(memory, MPIS, expected(REDUCTIONS, LARGE)),
                1.5,
                3,
            ),
            report(
                f"{title} against the best MPI, the other operations from 64 KiB",
                rows.cells(memory, MPIS, expected(OTHERS, LARGE)),
                None,
                1.5,
            ),
        ]
    results += [
        report(
            "private buffers against the best MPI, every cell",
            rows.cells("private", MPIS, private),
            1,
            1.2,
        ),
        report(
            "up to 1 KiB and the barrier against the best MPI",
            rows.cells("private", MPIS, small),
            1,
        ),
        report("against Gloo up to 64 KiB", rows.cells("private", GLOO, to_64_kib), 20),
        report("arena tensors against Gloo at 64 KiB", rows.cells("arena", GLOO, at_64_kib), 20),
        report(
            "ordinary tensors of the shared allocator against Gloo at 64 KiB",
            rows.cells("allocator", GLOO, at_64_kib),
            20,
        ),
        report(
            "private buffers against Gloo above 64 KiB", rows.cells("private", GLOO, above), None, 5
        ),
        report(
            "arena tensors against Gloo above 64 KiB", rows.cells("arena", GLOO, above), None, 8
        ),
        report(
            "ordinary tensors of the shared allocator against Gloo above 64 KiB",
            rows.cells("allocator", GLOO, above),
            None,
            8,
        ),
        report(
            "4 bytes over TCP between two ranks against Open MPI's tcp",
            rows.cells("private", ("openmpi",), [("all_reduce", 2, 4)], "tcp"),
            1,
        ),
    ]
    over_tcp = {
        (op, size): us
        for (op, ranks, size, kind, wire), us in rows.ours.items()
        if wire == "tcp" and ranks == 2 and kind == "private"
    }
    results += [
        report_figure(
            "4 bytes over TCP there and back, times a busy loopback round trip",
            over(over_tcp.get(("ping_pong", 4)), rows.floors.simple("tcp round trip", 4)),
            most=2,
        ),
        report_figure(
            "64 MiB over TCP one way, share of one stream's speed",
            over(
                rows.floors.simple("tcp stream", 64 * MIB),
                half(over_tcp.get(("ping_pong", 64 * MIB))),
            ),
            least=0.9,
        ),
    ]
    for bench, count, least in (("get", 1, 2), ("get", 32, 2), ("init", 32, 10)):
        row = rows.services.get((bench, count), {})
        ratio = over(row.get("stock_us"), row.get("muster_us"))
        results.append(
            report_figure(
                f"{bench}, {count} at once: times as fast as stock torch's", ratio, least=least
            )
        )
    for count, row in sorted(
        (count, row) for (bench, count), row in rows.services.items() if bench == "init_file"
    ):
        if row["stock_us"] > 0:
            ratio = row["stock_us"] / row["muster_us"]
            print(
                f"      init, {count} at once, meeting in a file: {ratio:.1f} times as fast as "
                "stock torch's"
            )
    for count in (2, 16, 32):
        us = rows.services.get(("new_group", count), {}).get("muster_us")
        results.append(report_figure(f"new_group on {count} ranks, microseconds", us, most=1000))
    results += rows.training.report() + rows.wire.report()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

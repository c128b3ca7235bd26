# SPDX-License-Identifier: BSD-3-Clause
"""bench/gates.py, on made-up rows."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "bench" / "gates.py"


def judged(rows):
    """The lines of the report on a machine of two cores, and its exit status."""
    cores = floor("switch", 0, 1, 0.001)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(row) + "\n" for row in [cores, *rows]))
        file.flush()
        done = subprocess.run(
            [sys.executable, "-B", TOOL, file.name], capture_output=True, text=True
        )
    assert not done.stderr, done.stderr
    return done.stdout.splitlines(), done.returncode


def step(model, mode, overhead, ranks=2):
    """A row as `muster-lab ddp --json` writes it."""
    return {
        "bench": "ddp",
        "model": model,
        "ranks": ranks,
        "mode": mode,
        "step_ms": 30,
        "overhead_ms": overhead,
        "rank0_step_ms": 31,
        "rank0_overhead_ms": 99,
        "steps": 60,
    }


def steps(model, muster, by_hand, stock, on_muster=None, ranks=2, nothing=None):
    modes = {
        "local": 0,
        "stock local": 0,
        "muster": muster,
        "by hand": by_hand,
        "stock ddp": stock,
        "stock on muster": on_muster,
        "stock, nothing sent": nothing,
    }
    return [
        step(model, mode, overhead, ranks)
        for mode, overhead in modes.items()
        if overhead is not None
    ]


def cell(library, op, size, p50, loop, memory="private", ranks=2, transport="shm"):
    return {
        "library": library,
        "op": op,
        "ranks": ranks,
        "bytes": size,
        "memory": memory,
        "transport": transport,
        "dtype": "float32",
        "p50_us": p50,
        "loop_us": loop,
    }


def floor(what, size, at_once, us, cores=2):
    return {"floor": what, "bytes": size, "at_once": at_once, "us": us, "cores": cores}


class Gates(unittest.TestCase):
    def line(self, rows, title):
        return next(line for line in judged(rows)[0] if title in line)

    def verdicts(self, rows, *words):
        """The first word of each line of the report that holds all `words`."""
        return [line.split()[0] for line in judged(rows)[0] if all(word in line for word in words)]

    def test_training_that_keeps_its_promises(self):
        rows = steps("mlp", 2, 2, 20, 6) + steps("resnet", 8, 9, 40, 13)
        self.assertEqual(self.verdicts(rows, "what training takes longer"), ["kept"] * 6)

    def test_a_fifth_of_stocks_overhead(self):
        rows = steps("mlp", 4, 9, 20, 6) + steps("resnet", 8.1, 9, 40, 13)
        line = "share of stock torch's DDP on Gloo:"
        self.assertEqual(self.verdicts(rows, "mlp on 2 ranks", line), ["kept"])
        self.assertEqual(self.verdicts(rows, "resnet on 2 ranks", line), ["OPEN"])

    def test_not_above_by_hand(self):
        rows = steps("mlp", 2, 2, 20, 6) + steps("resnet", 2.1, 2, 20, 6)
        self.assertEqual(self.verdicts(rows, "mlp", "by hand"), ["kept"])
        self.assertEqual(self.verdicts(rows, "resnet", "by hand"), ["OPEN"])

    def test_a_third_for_stocks_own_on_muster(self):
        rows = steps("mlp", 2, 2, 21, 7) + steps("resnet", 2, 2, 21, 7.1)
        self.assertEqual(self.verdicts(rows, "mlp", "on backend muster"), ["kept"])
        self.assertEqual(self.verdicts(rows, "resnet", "on backend muster"), ["OPEN"])

    def test_what_stocks_own_copies_without_sending_is_no_communication(self):
        rows = steps("mlp", 2, 2, 31, 17, nothing=10) + steps("resnet", 2, 2, 31, 17, nothing=32)
        self.assertIn(
            "mlp on 2 ranks, without its own copying: 0.33", self.line(rows, "own copying")
        )
        self.assertEqual(
            self.verdicts(rows, "own copying"), ["of"]
        )  # not judged, and nothing is said where it cannot be
        self.assertEqual(self.verdicts(rows, "on backend muster"), ["OPEN", "OPEN"])

    def test_each_number_of_ranks_by_itself(self):
        rows = steps("mlp", 2, 2, 20, 6, ranks=2) + steps("mlp", 20, 20, 20, 6, ranks=4)
        self.assertEqual(self.verdicts(rows, "mlp on 2 ranks", "on Gloo:"), ["kept"])
        self.assertEqual(self.verdicts(rows, "mlp on 4 ranks", "on Gloo:"), ["OPEN"])

    def test_the_last_of_several_runs_counts(self):
        self.assertEqual(
            self.verdicts(
                steps("mlp", 20, 9, 20, 6) + steps("mlp", 2, 9, 20, 6), "mlp", "on Gloo:"
            ),
            ["kept"],
        )

    def test_what_is_missing_is_told_and_not_passed(self):
        self.assertEqual(self.verdicts([], "what training takes longer"), ["?"] * 6)
        rows = steps("mlp", 2, 2, 20)
        self.assertEqual(self.verdicts(rows, "mlp", "on backend muster"), ["?"])
        self.assertEqual(self.verdicts(rows, "resnet"), ["?"] * 3)
        self.assertEqual(judged(rows)[1], 1)

    def test_services(self):
        rows = [
            {"bench": "get", "count": 1, "muster_us": 50, "stock_us": 101},
            {"bench": "get", "count": 32, "muster_us": 60, "stock_us": 101},
            {"bench": "new_group", "count": 32, "muster_us": 1001, "stock_us": None},
        ]
        self.assertEqual(self.verdicts(rows, "get, "), ["kept", "OPEN"])
        self.assertEqual(self.verdicts(rows, "init, "), ["?"])
        self.assertEqual(self.verdicts(rows, "new_group on "), ["?", "?", "OPEN"])

    def test_a_start_is_judged_by_the_way_of_launchers(self):
        rows = [
            {"bench": "init", "count": 32, "muster_us": 50, "stock_us": 501},
            {"bench": "init_file", "count": 32, "muster_us": 50, "stock_us": 100},
        ]
        self.assertEqual(self.verdicts(rows, "init, 32 at once: "), ["kept"])
        self.assertIn("meeting in a file: 2.0 times", self.line(rows, "init, 32 at once, meeting"))
        self.assertEqual(self.verdicts([rows[1]], "init, 32 at once: "), ["?"])

    def test_calls_between_hosts_are_held_against_the_link_and_the_rivals(self):
        rows = [
            {
                "bench": "hosts",
                "library": library,
                "op": op,
                "bytes": size,
                "hosts": hosts,
                "ranks_per_host": ranks,
                "rate": 1e9,
                "us": us,
                "limit_us": 100,
            }
            for library, us in (("muster", 107), ("gloo", 109))
            for op in (
                *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"),
                *("reduce", "gather", "scatter"),
            )
            for size in (1 << 20, 1 << 24)
            for hosts, ranks in ((2, 1), (4, 1), (2, 2), (2, 4), (4, 2))
        ]
        self.assertEqual(self.verdicts(rows, "between hosts"), ["kept", "kept"])
        self.assertEqual(self.verdicts(rows[1:], "between hosts"), ["?", "?"])
        self.assertEqual(
            self.verdicts([*rows, {**rows[0], "us": 109}], "between hosts"), ["OPEN", "kept"]
        )
        faster = {**rows[0], "library": "openmpi", "us": 100}
        self.assertEqual(self.verdicts([*rows, faster], "between hosts"), ["kept", "OPEN"])
        self.assertEqual(
            self.verdicts([{**row, "rate": 1e8} for row in rows], "between hosts"), ["?", "?"]
        )

    def test_nothing_is_said_of_a_rival_without_an_overhead(self):
        self.assertEqual(self.verdicts(steps("mlp", 2, 2, -1, 6), "mlp", "on Gloo:"), ["?"])

    def test_a_step_as_short_as_the_models_alone_is_kept(self):
        self.assertEqual(self.verdicts(steps("mlp", -0.5, 2, 20, 6), "mlp", "on Gloo:"), ["kept"])

    def test_every_cell_measured_and_fast_enough_is_kept(self):
        for title in CELLS:
            self.assertEqual(self.verdicts(everything(), title), ["kept"], title)

    def test_a_missing_cell_is_named_and_the_promise_not_kept(self):
        for memory, title in (
            ("arena", "arena tensors against the best MPI, reductions"),
            (
                "allocator",
                "ordinary tensors of the shared allocator against the best MPI, reductions",
            ),
            ("private", "private buffers against the best MPI, every cell"),
        ):
            rows = [
                row
                for row in everything()
                if (row["library"], row["op"], row["ranks"], row["bytes"], row["memory"])
                != ("muster", "reduce_scatter", 4, 1 << 20, memory)
            ]
            self.assertEqual(self.verdicts(rows, title), ["?"])
            self.assertIn(
                "reduce_scatter of 1 MiB on 4 ranks: no row of muster", "\n".join(judged(rows)[0])
            )

    def test_messages_between_two_ranks_are_cells_of_private_buffers(self):
        rows = [row for row in everything() if row["op"] != "ping_pong"]
        self.assertEqual(
            self.verdicts(rows, "private buffers against the best MPI, every cell"), ["?"]
        )
        rows += [
            cell(
                library,
                "ping_pong",
                size,
                9 if library == "muster" else 1,
                9 if library == "muster" else 1,
            )
            for library in LIBRARIES
            for size in (8, 1 << 20)
        ]
        self.assertEqual(
            self.verdicts(rows, "private buffers against the best MPI, every cell"), ["OPEN"]
        )

    def test_a_missing_rival_is_named(self):
        line = "up to 1 KiB and the barrier"
        rows = [row for row in everything() if row["library"] != "impi" or row["op"] != "barrier"]
        self.assertEqual(self.verdicts(rows, line), ["?"])
        self.assertIn("barrier of 0 B on 8 ranks: no row of impi", "\n".join(judged(rows)[0]))
        rows = [row for row in everything() if row["library"] != "gloo" or row["bytes"] != 65536]
        self.assertEqual(self.verdicts(rows, "against Gloo up to 64 KiB"), ["?"])

    def test_mpich_is_expected_where_each_rank_has_a_core(self):
        line = "up to 1 KiB and the barrier"
        without = [row for row in everything() if row["library"] != "mpich" or row["ranks"] > 2]
        self.assertEqual(
            self.verdicts(everything(), line), ["kept"]
        )  # of 4 and 8 ranks it has no rows
        self.assertEqual(self.verdicts(without, line), ["?"])

    def test_rows_of_the_engine_alone_or_of_threads_do_not_count(self):
        for mark in ("engine", "threads"):
            rows = [
                dict(row, **{mark: True}) if row["library"] == "muster" else row
                for row in everything()
            ]
            for title in CELLS:
                self.assertEqual(self.verdicts(rows, title), ["?"], title)

    def test_collectives_by_the_middle_call_from_64_kib_and_the_loop_below(self):
        def verdict(size, p50, loop, title):
            return self.verdicts(everything(("all_reduce", 2, size), p50, loop), title)

        self.assertEqual(verdict(8, 99, 1, "up to 1 KiB and the barrier"), ["kept"])
        self.assertEqual(verdict(8, 1, 99, "up to 1 KiB and the barrier"), ["OPEN"])
        self.assertEqual(
            verdict(65536, 1, 99, "private buffers against the best MPI, every cell"), ["kept"]
        )
        self.assertEqual(
            verdict(65536, 99, 1, "private buffers against the best MPI, every cell"), ["OPEN"]
        )

    def test_a_cell_near_the_floor_is_kept(self):
        line = "private buffers against the best MPI, every cell"
        rows = everything(("broadcast", 2, 1 << 20), 110, 110, theirs=100)
        self.assertEqual(self.verdicts(rows, line), ["OPEN"])
        # A broadcast to one other is one copy of one of two busy cores.
        self.assertIn(
            "1 of them by the floor", self.line(rows + [floor("copy", 1 << 20, 2, 200)], line)
        )
        self.assertEqual(self.verdicts(rows + [floor("copy", 1 << 20, 2, 200)], line), ["kept"])
        self.assertEqual(self.verdicts(rows + [floor("copy", 1 << 20, 2, 180)], line), ["OPEN"])

    def test_a_floor_that_a_rival_stays_below_forgives_nothing(self):
        rows = everything(("broadcast", 2, 1 << 20), 110, 110, theirs=90) + [
            floor("copy", 1 << 20, 2, 200)
        ]
        self.assertEqual(
            self.verdicts(rows, "private buffers against the best MPI, every cell"), ["OPEN"]
        )

    def test_who_only_gives_needs_no_word_from_the_others(self):
        line = "up to 1 KiB and the barrier"
        hop = [floor("hop", 0, 1, 100)]
        self.assertEqual(
            self.verdicts(everything(("all_reduce", 2, 8), 110, 110, theirs=105) + hop, line),
            ["kept"],
        )
        self.assertEqual(
            self.verdicts(everything(("broadcast", 2, 8), 110, 110, theirs=105) + hop, line),
            ["OPEN"],
        )

    def test_each_bound_by_figures_just_beside_it(self):
        reductions, others = (
            ("all_reduce", "reduce_scatter"),
            ("all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"),
        )
        for memory, name in (
            ("arena", "arena tensors"),
            ("allocator", "ordinary tensors of the shared allocator"),
        ):
            for title, ops, bound in (
                (f"{name} against the best MPI, reductions from 64 KiB", reductions, 3),
                (f"{name} against the best MPI, the other operations", others, 1.5),
            ):
                self.assertEqual(
                    self.verdicts(faster(bound, MPIS, ops, memory), title), ["kept"], title
                )
                self.assertEqual(
                    self.verdicts(faster(bound - 0.01, MPIS, ops, memory), title), ["OPEN"], title
                )
            title = f"{name} against the best MPI, reductions from 64 KiB"
            one = ("reduce_scatter", 8, 1 << 24)
            self.assertEqual(
                self.verdicts(faster(4, MPIS, reductions, memory, {one: 1.5}), title), ["kept"]
            )
            self.assertEqual(
                self.verdicts(faster(4, MPIS, reductions, memory, {one: 1.49}), title), ["OPEN"]
            )
            title = f"{name} against Gloo "
            self.assertEqual(
                self.verdicts(faster(8, ("gloo",), memory=memory), title + "above 64 KiB"), ["kept"]
            )
            self.assertEqual(
                self.verdicts(faster(7.9, ("gloo",), memory=memory), title + "above 64 KiB"),
                ["OPEN"],
            )
            self.assertEqual(
                self.verdicts(faster(20, ("gloo",), memory=memory), title + "at 64 KiB"), ["kept"]
            )
            self.assertEqual(
                self.verdicts(faster(19.9, ("gloo",), memory=memory), title + "at 64 KiB"), ["OPEN"]
            )
        title = "private buffers against the best MPI, every cell"
        self.assertEqual(self.verdicts(faster(1.2, MPIS), title), ["kept"])
        self.assertEqual(self.verdicts(faster(1.19, MPIS), title), ["OPEN"])
        one = ("gather", 4, 1 << 20)
        self.assertEqual(self.verdicts(faster(2, MPIS, but={one: 1}), title), ["kept"])
        self.assertEqual(self.verdicts(faster(2, MPIS, but={one: 0.99}), title), ["OPEN"])
        one = ("gather", 4, 1024)
        self.assertEqual(self.verdicts(faster(2, MPIS, but={one: 1}), "up to 1 KiB"), ["kept"])
        self.assertEqual(self.verdicts(faster(2, MPIS, but={one: 0.99}), "up to 1 KiB"), ["OPEN"])
        for title, bound in (
            ("against Gloo up to 64 KiB", 20),
            ("private buffers against Gloo above", 5),
        ):
            self.assertEqual(self.verdicts(faster(bound, ("gloo",)), title), ["kept"], title)
            self.assertEqual(self.verdicts(faster(bound - 0.1, ("gloo",)), title), ["OPEN"], title)

    def test_tcp(self):
        def rows(word, stream):
            return [
                cell("muster", "all_reduce", 4, word, word, transport="tcp"),
                cell("openmpi", "all_reduce", 4, 10, 10, transport="tcp"),
                cell("muster", "ping_pong", 4, word, word, transport="tcp"),
                floor("tcp round trip", 4, 1, 5),
                cell("muster", "ping_pong", 64 << 20, 2 * stream, 2 * stream, transport="tcp"),
                floor("tcp stream", 64 << 20, 1, 900),
            ]

        self.assertEqual(self.verdicts(rows(10, 1000), "over TCP"), ["kept"] * 3)
        self.assertEqual(self.verdicts(rows(10.1, 1001), "over TCP"), ["OPEN"] * 3)
        faster_later = rows(10, 1000) + [floor("tcp stream", 64 << 20, 1, 890)]
        self.assertEqual(self.verdicts(faster_later, "64 MiB over TCP"), ["OPEN"])

    def test_each_bound_of_services(self):
        def rows(factor, new_group):
            return [
                {"bench": bench, "count": count, "muster_us": 100, "stock_us": 100 * bound * factor}
                for bench, count, bound in (("get", 1, 2), ("get", 32, 2), ("init", 32, 10))
            ] + [
                {"bench": "new_group", "count": count, "muster_us": new_group, "stock_us": None}
                for count in (2, 16, 32)
            ]

        for words in ("get, ", "init, ", "new_group on "):
            self.assertEqual(set(self.verdicts(rows(1, 1000), words)), {"kept"}, words)
            self.assertEqual(set(self.verdicts(rows(0.99, 1001), words)), {"OPEN"}, words)


MPIS = ("openmpi", "mpich", "impi")


def faster(factor, rivals, ops=None, memory="private", but=None):
    """Rows of all that is promised of cells, and how many times as fast as these rivals ours are:
    in the cells of `ops` (None: all) by `factor`, in those that `but` names by that; and slightly
    more, so that means do not fall short by their rounding.
    """
    rows = []
    for row in everything():
        place = (row["op"], row["ranks"], row["bytes"])
        if row["library"] in rivals:
            row = dict(row, p50_us=100, loop_us=100)
        elif (
            row["library"] == "muster"
            and row["memory"] == memory
            and (ops is None or row["op"] in ops)
        ):
            us = 99.99 / (but or {}).get(place, factor)
            row = dict(row, p50_us=us, loop_us=us)
        rows.append(row)
    return rows


LIBRARIES = ("muster", "openmpi", "mpich", "impi", "gloo")
CELLS = (
    "arena tensors against the best MPI, reductions",
    "arena tensors against the best MPI, the other",
    "ordinary tensors of the shared allocator against the best MPI, reductions",
    "ordinary tensors of the shared allocator against the best MPI, the other",
    "private buffers against the best MPI, every cell",
    "up to 1 KiB and the barrier",
    "against Gloo up to 64 KiB",
    "private buffers against Gloo above",
    "arena tensors against Gloo above",
    "ordinary tensors of the shared allocator against Gloo above",
    "arena tensors against Gloo at 64 KiB",
    "ordinary tensors of the shared allocator against Gloo at 64 KiB",
)


def everything(changed=None, p50=None, loop=None, theirs=None):
    """Rows of all that is promised of cells, fast enough; one cell with other figures of ours
    (private buffers) and of the rivals'.
    """
    small = {"all_reduce": (8, 1024), "broadcast": (8, 1024), "reduce": (8, 1024), "barrier": (0,)}
    small.update(
        dict.fromkeys(
            ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), (64, 1024)
        )
    )
    rows = []
    for op, sizes in small.items():
        for ranks in (2, 4, 8):
            large = () if op == "barrier" else (1 << 16, 1 << 20, 1 << 24, 1 << 26)
            for size in (*sizes, *large):
                for library in LIBRARIES:
                    if library == "mpich" and ranks > 2:
                        continue
                    figure = {"muster": 1, "gloo": 20}.get(library, 3)
                    figures = (figure, figure)
                    if (op, ranks, size) == changed:
                        figures = (
                            (p50, loop)
                            if library == "muster"
                            else (theirs, theirs)
                            if theirs and library != "gloo"
                            else figures
                        )
                    transport = "tcp" if library == "gloo" else "shm"
                    rows.append(cell(library, op, size, *figures, ranks=ranks, transport=transport))
                    if library == "muster" and large and size in large:
                        rows += [
                            cell(library, op, size, 1, 1, memory, ranks)
                            for memory in ("arena", "allocator")
                        ]
    rows += [
        cell(library, "ping_pong", size, *((1, 1) if library == "muster" else (3, 3)))
        for library in LIBRARIES
        for size in (8, 1 << 20)
    ]
    return rows


if __name__ == "__main__":
    unittest.main()

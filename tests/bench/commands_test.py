# SPDX-License-Identifier: BSD-3-Clause
"""`muster bench` and every kind of muster-lab: what they can be asked, and the rows of the smallest
run. Figures are not judged.

MUSTER_BIN: the folder of the programs. MUSTER_PYTHON: a Python that has torch, where there is one.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

BIN = pathlib.Path(os.environ["MUSTER_BIN"])
TORCH = (BIN / "muster_bench_worker").exists()
STOCK = "MUSTER_PYTHON" in os.environ
needs_torch = unittest.skipUnless(TORCH, "this build has no torch")

SHARED = "op sizes bytes ranks dtype transport memory threads engine seconds rounds json"
# The words of a command, and its options.
OPTIONS = {
    ("muster", "bench"): f"{SHARED} tune check-selection",
    ("muster-lab",): f"{SHARED} vs plot simulate hosts",
    ("muster-lab", "floors"): "rounds json",
}
OPTIONS_WITH_TORCH = {
    ("muster-lab", "ddp"): "model ranks steps rounds python stock package timeline json",
    ("muster-lab", "rpc"): "vs rounds quick python json",
    ("muster-lab", "store"): "count rounds seconds python json",
    ("muster-lab", "group"): "count rounds seconds python json",
    ("muster-lab", "launch"): "count rounds seconds python json",
    ("muster-lab", "idle"): "count seconds json",
}


def run(program, *words, environment=None):
    try:
        done = subprocess.run(
            [BIN / program, *words],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired as late:
        said = b"".join(filter(None, (late.stdout, late.stderr))).decode(
            errors="replace"
        )  # bytes, also where text was asked for
        raise AssertionError(f"{words}: still at it after {late.timeout} s\n{said}") from None
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


class Kinds(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="muster test ")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def rows(self, *words, environment=None):
        """Those of a run, each with its fields; and what it printed."""
        file = self.folder / "rows.jsonl"
        done = run(*words, "--json", file, environment=environment)
        return [json.loads(line) for line in file.read_text().splitlines()], done

    def assert_figures(self, rows, *fields):
        for row in rows:
            for field in fields:
                self.assertGreater(row[field], 0, f"{field} of {row}")

    def help_names(self, kinds):
        for kind, options in kinds.items():
            with self.subTest(kind=kind):
                told = run(*kind, "--help").stdout
                for option in options.split():
                    self.assertRegex(told, rf"(?m)^.*--{re.escape(option)}\b")

    def test_help_names_the_options(self):
        self.help_names(OPTIONS)

    @needs_torch
    def test_help_of_what_needs_torch(self):
        self.help_names(OPTIONS_WITH_TORCH)
        if STOCK:
            self.help_names({("muster-lab", "python"): "help"})

    def refused(self, program, *kind):
        for words in (("--dance",), ("--json",), ("--rounds", "many")):
            done = subprocess.run(
                [BIN / program, *kind, *words], capture_output=True, text=True, timeout=60
            )
            self.assertEqual(
                (done.returncode, done.stdout), (2, ""), f"{kind} {words}: {done.stderr}"
            )
            self.assertIn("--help", done.stderr)

    # spec: J3 what is not understood is refused with exit code 2
    def test_what_is_not_understood_is_refused(self):
        for kind in OPTIONS:
            self.refused(*kind)

    # spec: J3 what is not understood is refused with exit code 2
    @needs_torch
    def test_what_is_not_understood_is_refused_by_what_needs_torch(self):
        for kind in OPTIONS_WITH_TORCH:
            self.refused(*kind)

    @unittest.skipIf(TORCH, "this build has torch")
    def test_what_needs_torch_says_so(self):
        for program, kind in OPTIONS_WITH_TORCH:
            done = subprocess.run([BIN / program, kind], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("needs torch", done.stderr)

    def test_collectives(self):
        rows, done = self.rows("muster", "bench", "--sizes", "8", "--seconds", "0.01")
        (row,) = rows
        self.assertEqual(
            {
                name: row[name]
                for name in ("library", "op", "ranks", "bytes", "memory", "transport", "dtype")
            },
            {
                "library": "muster",
                "op": "all_reduce",
                "ranks": 2,
                "bytes": 8,
                "memory": "private",
                "transport": "shm",
                "dtype": "float32",
            },
        )
        self.assert_figures(rows, "loop_us", "p50_us", "min_us", "p99_us", "iterations")
        self.assertEqual("engine alone" in done.stderr, not TORCH, done.stderr)

    def test_ranks_as_threads_other_dtypes_and_memories(self):
        for option, value, field in (
            ("--threads", None, None),
            ("--dtype", "float64", "dtype"),
            ("--memory", "arena", "memory"),
        ):
            with self.subTest(option=option):
                rows, _ = self.rows(
                    "muster",
                    "bench",
                    "--sizes",
                    "64",
                    "--seconds",
                    "0.01",
                    option,
                    *([value] if value else []),
                )
                self.assertEqual(len(rows), 1)
                self.assert_figures(rows, "loop_us", "p50_us")
                self.assertEqual(rows[0].get("threads", False), option == "--threads")
                if field:
                    self.assertEqual(rows[0][field], value)
            (self.folder / "rows.jsonl").unlink()

    @needs_torch
    def test_ordinary_tensors_of_the_shared_allocator(self):
        rows, _ = self.rows(
            "muster", "bench", "--sizes", "64KiB", "--seconds", "0.01", "--memory", "allocator"
        )
        self.assertEqual([row["memory"] for row in rows], ["allocator"])
        self.assert_figures(rows, "loop_us", "p50_us")

    def test_messages(self):
        rows, done = self.rows(
            "muster", "bench", "--op", "ping_pong", "--sizes", "8", "--seconds", "0.01"
        )
        if not TORCH:
            self.assertIn("the engine has no ping_pong", done.stderr)
            return
        self.assertEqual(
            [(row["op"], row["ranks"], row["bytes"]) for row in rows], [("ping_pong", 2, 8)]
        )
        self.assert_figures(rows, "loop_us", "p50_us")

    def test_floors(self):
        rows, _ = self.rows("muster-lab", "floors", "--rounds", "1")
        self.assertLessEqual(
            {"switch", "copy", "tcp round trip", "tcp stream"}, {row["floor"] for row in rows}
        )
        self.assert_figures(rows, "us", "cores", "at_once")
        self.assertEqual([row["bytes"] for row in rows if row["floor"] == "tcp stream"], [64 << 20])

    def test_the_engine_alone_where_the_worker_of_tensors_is_missing(self):
        """And that it is said, once."""
        alone = self.folder / "bin" / "muster"
        alone.parent.mkdir()
        shutil.copy2(BIN / "muster", alone)
        done = run(alone, "bench", "--sizes", "8", "--seconds", "0.01", "--ranks", "1,2")
        self.assertEqual(done.stdout.count("all_reduce"), 2, done.stdout)
        self.assertEqual(done.stderr.count("times the engine alone"), 1, done.stderr)
        self.assertIn("needs torch", done.stderr)
        asked = run(alone, "bench", "--engine", "--sizes", "8", "--seconds", "0.01")
        self.assertNotIn("engine alone", asked.stderr)

    @needs_torch
    def test_store(self):
        rows, _ = self.rows(
            "muster-lab", "store", "--count", "1", "--rounds", "1", "--seconds", "0.01"
        )
        self.assertEqual(
            [(row["bench"], row["count"], row["rounds"]) for row in rows], [("get", 1, 1)]
        )
        self.assert_figures(rows, "muster_us", *(["stock_us"] if STOCK else []))

    @needs_torch
    def test_group(self):
        rows, _ = self.rows("muster-lab", "group", "--count", "2", "--rounds", "1")
        self.assertEqual([row["bench"] for row in rows], ["init", "init_file", "new_group"])
        self.assert_figures(rows, "muster_us", *(["stock_us"] if STOCK else []))

    @needs_torch
    @unittest.skipUnless(STOCK, "no Python with torch is said")
    def test_launch(self):
        rows, _ = self.rows("muster-lab", "launch", "--count", "1", "--rounds", "1")
        self.assertEqual([row["bench"] for row in rows], ["launch"])
        self.assert_figures(rows, "muster_us", "stock_us")

    @needs_torch
    def test_idle(self):
        rows, _ = self.rows("muster-lab", "idle", "--count", "2", "--seconds", "0.1")
        self.assertEqual([(row["bench"], row["count"]) for row in rows], [("idle", 2)])
        self.assertLessEqual({"idle_cpu_ms", "late_cpu_ms", "late_us"}, set(rows[0]))

    @needs_torch
    @unittest.skipUnless(STOCK, "no Python with torch is said")
    def test_ddp(self):
        picture = self.folder / "step.svg"
        rows, _ = self.rows(
            "muster-lab",
            "ddp",
            "--model",
            "mlp",
            "--ranks",
            "1",
            "--steps",
            "1",
            "--rounds",
            "1",
            "--stock",
            "--timeline",
            picture,
        )
        modes = {
            "local",
            "muster",
            "by hand",
            "stock local",
            "stock ddp",
            "stock on muster",
            "stock, nothing sent",
        }
        self.assertEqual({row["mode"] for row in rows}, modes)
        self.assertLessEqual({"overhead_ms", "rank0_overhead_ms"}, set(rows[0]))
        self.assert_figures(rows, "step_ms", "rank0_step_ms", "steps", "ranks")
        self.assertIn("<svg", picture.read_text())

    @needs_torch
    def test_rpc(self):
        versus = ["--vs", "torch"] if STOCK else []
        rows, _ = self.rows("muster-lab", "rpc", "--quick", "--rounds", "1", *versus)
        libraries = {"muster", "muster, sockets"} | ({"torch"} if STOCK else set())
        self.assertEqual({row["library"] for row in rows}, libraries)
        self.assertEqual(
            {row["case"] for row in rows if "calls_per_s" in row},
            {f"{count} in flight" for count in (1, 4, 16, 64)},
        )
        for row in rows:
            self.assertGreater(row.get("p50_us", row.get("calls_per_s", 0)), 0, row)

    @needs_torch
    def test_training_without_a_python_that_has_torch_shows_no_figure_for_it(self):
        words = ("ddp", "--model", "mlp", "--ranks", "1", "--steps", "1", "--rounds", "2")
        done = subprocess.run(
            [BIN / "muster-lab", *words],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "MUSTER_PYTHON": "false"},
        )
        self.assertEqual(done.stderr.count("stock torch is not measured"), 1, done.stderr)
        for line in ("until all ranks are done", "on rank 0 alone"):
            self.assertRegex(done.stdout, rf"(?m)^ *{line} +-?[\d.]+ +-?[\d.]+ +- +-$")

    @needs_torch
    def test_without_a_python_that_has_torch_ours_are_timed_and_the_reason_is_said_once(self):
        rows, done = self.rows(
            "muster-lab",
            "store",
            "--count",
            "1",
            "--rounds",
            "2",
            "--seconds",
            "0.01",
            environment={"MUSTER_PYTHON": "false"},
        )
        self.assert_figures(rows, "muster_us")
        self.assertEqual(done.stderr.count("stock torch is not measured"), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()

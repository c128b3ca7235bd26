# SPDX-License-Identifier: BSD-3-Clause
"""tools/run_tests and tools/flakes, over small trees of tests that real ctest runs."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"

# Red in its first run, green in every other.
ONCE = 'mkdir "{folder}/{name}.was_here" 2>/dev/null && exit 1; exit 0'


@contextlib.contextmanager
def tree_of(tests):
    """A tree with the tools and with tests, {name: "green", "red" or "once"}."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "build").mkdir()
        shutil.copytree(TOOLS / "proofs", root / "tools/proofs")
        for tool in ("flakes", "run_tests", "timed"):
            shutil.copy(TOOLS / tool, root / "tools" / tool)
        rows = []
        for name, kind in tests.items():
            script = {"green": "exit 0", "red": "exit 1"}.get(kind, ONCE)
            script = script.format(folder=folder, name=name.replace("/", "_"))
            rows.append(f'add_test([=[{name}]=] "{root}/tools/timed" bash -c [=[{script}]=])\n')
        (root / "build/CTestTestfile.cmake").write_text("".join(rows))
        yield root


def run(tests, retry=True, after=""):
    """The outcome of tools/run_tests: (exit status, lines printed, flaky.txt)."""
    with tree_of(tests) as root:
        environment = {**os.environ, "MUSTER_RETRY": "ON" if retry else "OFF"}
        environment["MUSTER_AFTER_TESTS"] = after
        done = subprocess.run(
            [sys.executable, "-B", root / "tools/run_tests", "-j", "2", "--timeout", "100"],
            capture_output=True,
            text=True,
            env=environment,
        )
        flaky = root / "build/flaky.txt"
        timed = (root / "build/test-times").read_text().splitlines()
        assert len(timed) >= len(tests), timed
        lines = done.stdout.splitlines()
        return done.returncode, lines, flaky.read_text() if flaky.exists() else None


class RunTests(unittest.TestCase):
    def test_green_tests_end_with_ctests_own_words(self):
        status, lines, flaky = run({"a.one": "green", "a.two": "green"})
        self.assertEqual((status, flaky), (0, None))
        self.assertIn("100% tests passed, 0 tests failed out of 2", lines)
        self.assertTrue(lines[-1].startswith("Total Test time"), lines)

    def test_a_test_that_was_red_once_is_named_and_counted(self):
        status, lines, flaky = run({"a.one": "once", "b.[x]/1": "green", "c": "green"})
        self.assertEqual((status, flaky), (0, "a.one\n"))
        closing = lines.index("100% tests passed, 0 tests failed out of 3")
        self.assertEqual(lines[closing - 1], "FLAKY a.one")
        self.assertTrue(lines[-1].startswith("Total Test time"), lines)

    def test_two_of_them_are_still_tried_and_names_are_no_patterns(self):
        status, lines, flaky = run({"b.S/1.T+[x]": "once", "b.S/1.Tx": "once", "c": "green"})
        self.assertEqual(status, 0, lines)
        self.assertEqual(sorted(flaky.split()), ["b.S/1.T+[x]", "b.S/1.Tx"])

    def test_a_test_that_stays_red_is_red(self):
        status, lines, flaky = run({"a": "red", "b": "green"})
        self.assertNotEqual(status, 0)
        self.assertIsNone(flaky)
        self.assertFalse([line for line in lines if line.startswith("FLAKY")])

    def test_one_of_two_stays_red(self):
        status, _, flaky = run({"a": "once", "b": "red", "c": "green"})
        self.assertNotEqual(status, 0)
        self.assertIsNone(flaky)

    def test_three_are_not_tried_again(self):
        status, lines, flaky = run({"a": "once", "b": "once", "c": "once"})
        self.assertNotEqual(status, 0)
        self.assertIsNone(flaky)
        self.assertFalse([line for line in lines if "twice more" in line])

    def test_what_must_never_be_red_is_not_tried_again(self):
        for name in ("transport.FabricFailure.X", "security.T", "asan:shards.Commit.Y", "elastic"):
            status, lines, flaky = run({name: "once", "b": "green"})
            self.assertNotEqual(status, 0, name)
            self.assertIsNone(flaky)
            self.assertFalse([line for line in lines if "twice more" in line])

    def test_what_is_asked_after_the_tests_can_turn_them_red(self):
        status, lines, _ = run({"a": "green"}, after="echo asked; exit 3")
        self.assertEqual((status, "asked" in lines), (3, True))
        self.assertIn("100% tests passed, 0 tests failed out of 1", lines)
        self.assertEqual(run({"a": "green"}, after="true")[0], 0)
        self.assertNotIn("asked", run({"a": "red"}, after="echo asked")[1])

    def test_by_hand_a_red_test_is_red(self):
        status, _, flaky = run({"a": "once", "b": "green"}, retry=False)
        self.assertNotEqual(status, 0)
        self.assertIsNone(flaky)


class Flakes(unittest.TestCase):
    def flakes(self, tests):
        with tree_of(tests) as root:
            done = subprocess.run(
                [sys.executable, "-B", root / "tools/flakes", "3"], capture_output=True, text=True
            )
            return done.returncode, done.stdout, sorted(os.listdir(root / "build/flakes"))

    def test_a_test_that_was_red_once_is_listed_with_its_seed_and_its_output(self):
        status, said, outputs = self.flakes({"a.one": "once", "b/two": "green"})
        self.assertEqual(status, 1)
        self.assertRegex(said, r"(?m)^run 1 of 3, seed \d+: 2 tests, 1 red$")
        self.assertRegex(said, r"(?m)^a.one: red 1 times; seeds \d+$")
        self.assertIn("flakes: 6 executions, 1 tests were red", said)
        self.assertEqual(len([name for name in outputs if name.startswith("a.one.")]), 1)

    def test_a_tree_without_tests_is_no_green_run(self):
        status, said, _ = self.flakes({})
        self.assertNotEqual(status, 0)
        self.assertNotIn("0 tests were red", said)

    def test_green_runs_list_nothing(self):
        status, said, _ = self.flakes({"a.one": "green", "b/two": "green"})
        self.assertEqual(status, 0)
        self.assertIn("flakes: 6 executions, 0 tests were red", said)


if __name__ == "__main__":
    unittest.main()

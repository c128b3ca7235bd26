"""bench/hosts.py: the arithmetic of limits; tiny runs where there are root and a built muster."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import hosts  # noqa: E402

MUSTER = ROOT / "build/release/bin/muster"
TINY = ["bench", "hosts", "--libraries", "muster", "--op", "all_reduce", "--seconds", "0.01"]


def namespaces_of(pid):
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"muster{pid}")]


class LimitTest(unittest.TestCase):
    def test_what_a_host_sends_over_the_rate(self):
        mib = 1 << 20
        for op, host_count, ranks, parts in (
            ("all_reduce", 2, 1, 1),
            ("all_reduce", 4, 2, 1.5),
            ("reduce_scatter", 2, 4, 0.5),
            ("all_gather", 4, 1, 0.75),
            ("broadcast", 4, 2, 1),
            ("all_to_all", 2, 1, 0.5),
            ("all_to_all", 2, 4, 2),
        ):
            with self.subTest(op=op, hosts=host_count, ranks=ranks):
                self.assertAlmostEqual(
                    hosts.limit_us(op, mib, host_count, ranks, 1e9), parts * mib * 8 / 1e3
                )
        self.assertAlmostEqual(hosts.limit_us("broadcast", mib, 2, 1, 1e8), mib * 8 / 1e2)

    def test_options_are_read(self):
        options = hosts.read_options(["--rate", "100mbit", "--sizes", "4,64KiB,1MiB"])
        self.assertEqual(options.rate, 1e8)
        self.assertEqual(list(options.sizes.values()), [4, 65536, 1 << 20])


def can_run():
    return (
        os.geteuid() == 0
        and MUSTER.exists()
        and MUSTER.with_name("muster_bench_worker").exists()
        and all(map(shutil.which, ("ip", "tc")))
        and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0
    )


@unittest.skipUnless(can_run(), "needs root, iproute2 and a built muster (make build)")
class RunTest(unittest.TestCase):
    def test_a_row_of_each_cell_and_nothing_left(self):
        with tempfile.TemporaryDirectory() as folder:
            rows = pathlib.Path(folder) / "rows.jsonl"
            words = [MUSTER, *TINY, "--sizes", "64KiB", "--rounds", "1", "--ranks-per-host", "2"]
            with subprocess.Popen([*words, "--json", rows], stdout=subprocess.PIPE) as run:
                run.communicate(timeout=300)
            self.assertEqual(run.returncode, 0)
            (row,) = map(json.loads, rows.read_text().splitlines())
        self.assertEqual((row["library"], row["hosts"], row["ranks_per_host"]), ("muster", 2, 2))
        self.assertGreater(row["us"], 0)
        self.assertAlmostEqual(row["limit_us"], 65536 * 8 / 1e3)
        self.assertEqual(namespaces_of(run.pid), [])

    def test_ctrl_c_leaves_nothing(self):
        words = [MUSTER, *TINY, "--sizes", "64KiB", "--rounds", "1000000"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as run:
            run.stdout.readline()  # hosts and ranks are there
            self.assertEqual(len(namespaces_of(run.pid)), 3)
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=60)
        self.assertEqual(run.returncode, 128 + signal.SIGINT)
        self.assertEqual(namespaces_of(run.pid), [])


if __name__ == "__main__":
    unittest.main()

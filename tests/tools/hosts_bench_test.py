# SPDX-License-Identifier: BSD-3-Clause
"""bench/hosts.py: the arithmetic of limits, the options and the table; hosts reached by a remote
shell, with stand-ins for it and for the ranks; tiny runs if there are root and a built muster-lab.
"""

import contextlib
import io
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import hosts  # noqa: E402
import hosts_places  # noqa: E402
import hosts_table  # noqa: E402

LAB = ROOT / "build/release/bin/muster-lab"
TINY = ["hosts", "--libraries", "muster", "--op", "all_reduce", "--seconds", "0.01"]

# Runs the commands for "a" and "b" on this machine, each in a session of its own. The file `asked`
# keeps the commands for "b".
SHELL = """#!/bin/sh
host=$1; shift
[ "$host" != b ] || echo "$*" >> {folder}/asked
case "$host" in
  a|b) setsid sh -c "$*" ;;
  *) echo "connect to host $host: No route to host"; exit 255 ;;
esac
"""
# Ranks whose figures are known. The one on "b" dies of "broadcast", while the other is in the call.
WORKER = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" != --rank ] || rank=$2; shift; done
echo $MUSTER_BENCH_RUN $$ >> {folder}/ranks
echo "$MUSTER_SECRET" > {folder}/secret
echo hello, this is no answer
while read kind op bytes rest; do
  case $op,$rank in
    broadcast,1) echo out of memory >&2; exit 3 ;;
    broadcast,0) exec sleep 1000 ;;
    *,0) echo row $bytes 1000 1 1 1 ;;
  esac
done
"""


def namespaces_of(pid):
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"muster{pid}")]


class LimitTest(unittest.TestCase):
    def test_what_a_host_carries_over_the_rate(self):
        mib = 1 << 20
        for op, host_count, ranks, parts in (
            ("all_reduce", 2, 1, 1),
            ("all_reduce", 4, 2, 1.5),
            ("reduce_scatter", 2, 4, 0.5),
            ("all_gather", 4, 1, 0.75),
            ("broadcast", 4, 2, 1),
            ("all_to_all", 2, 1, 0.5),
            ("all_to_all", 2, 4, 2),
            ("reduce", 4, 2, 1),
            ("gather", 4, 2, 0.75),
            ("scatter", 2, 4, 0.5),
        ):
            with self.subTest(op=op, hosts=host_count, ranks=ranks):
                self.assertAlmostEqual(
                    hosts_table.limit_us(op, mib, host_count, ranks, 1e9), parts * mib * 8 / 1e3
                )
        self.assertAlmostEqual(hosts_table.limit_us("broadcast", mib, 2, 1, 1e8), mib * 8 / 1e2)

    def test_a_slow_link_is_given_more_time(self):
        slow, fast = (hosts.read_options(["--rate", rate]) for rate in ("10mbit", "1gbit"))
        for options in (slow, fast):
            # Ten calls at five times the limit.
            wire = hosts.limit_of("all_reduce", 16 << 20, options, options.rate) / 1e6
            self.assertGreater(hosts.patience("all_reduce", 16 << 20, options), 50 * wire)
        self.assertGreater(slow.timeout, fast.timeout)

    def test_cores_are_divided_if_there_are_enough(self):
        self.assertEqual(hosts_places.divided([0, 1, 2, 5, 7], 2), [[0, 1], [2, 5]])
        self.assertEqual(hosts_places.divided([0, 1], 3), [])


class OptionsTest(unittest.TestCase):
    def refused(self, *words):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
            hosts.read_options(words)
        return said.getvalue()

    def test_rates_and_sizes(self):
        options = hosts.read_options(["--rate", "100mbit", "--sizes", "8,64KiB,1MiB"])
        self.assertEqual(options.rate, 1e8)
        self.assertEqual(list(options.sizes.values()), [8, 65536, 1 << 20])
        self.assertIn("is no rate", self.refused("--rate", "0mbit"))
        self.assertIn("is no size", self.refused("--sizes", "1MB"))

    def test_a_part_of_less_than_an_element_is_left_out(self):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            options = hosts.read_options(
                ["--latency", "--hosts", "4", "--op", "reduce,gather", "--sizes", "8B,64B"]
            )
        self.assertEqual(
            options.cells, [("reduce", "8B", 8), ("reduce", "64B", 64), ("gather", "64B", 64)]
        )
        self.assertEqual(said.getvalue(), "gather of 8B is left out: 4 ranks share it\n")

    def test_hosts_by_name_or_by_a_file_of_names(self):
        options = hosts.read_options(["--host-list", "a,b.net,10.0.0.3", "--interfaces", "e0,e1"])
        self.assertEqual(options.host_list, ["a", "b.net", "10.0.0.3"])
        self.assertEqual((options.hosts, options.links, options.rate), (3, 2, None))
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("# the rack\none\n\n two # slow\n")
            file.flush()
            self.assertEqual(
                hosts.read_options(["--host-list", file.name]).host_list, ["one", "two"]
            )

    def test_what_does_not_fit_together(self):
        self.assertIn("listed twice", self.refused("--host-list", "a,a"))
        self.assertIn("no name of a host", self.refused("--host-list", "a,-oProxyCommand=x"))
        self.assertIn("are for namespaces", self.refused("--host-list", "a,b", "--pin"))
        self.assertIn("need --host-list", self.refused("--remote-shell", "ssh"))
        self.assertIn("2 to 200 hosts", self.refused("--hosts", "0"))


class TableTest(unittest.TestCase):
    def test_times_the_limit(self):
        table = hosts_table.Table(["muster", "gloo"], with_limit=True)
        self.assertEqual(table.head().split(), "limit us muster us x limit gloo us x limit".split())
        line = table.line("reduce 1MiB 2x1", {"muster": 110.0}, 100.0)
        self.assertEqual(line.split()[3:], ["100", "110", "1.10", "-", "-"])

    def test_times_the_best_other_library(self):
        table = hosts_table.Table(["muster", "gloo", "openmpi"], with_limit=False)
        line = table.line("", {"muster": 30.0, "gloo": 200.0, "openmpi": 40.0}, None)
        self.assertEqual(line.split(), ["30.0", "200.0", "40.0", "0.75"])
        self.assertEqual(table.line("", {"muster": 30.0}, None).split(), ["30.0", "-", "-", "-"])
        self.assertEqual(table.line("", {"gloo": 3.0}, None).split(), ["-", "3.0", "-", "-"])

    def test_a_row_has_medians(self):
        row = hosts_table.row_of([(1, 10), (3, 30), (2, 90)], op="reduce")
        self.assertEqual((row["us"], row["loop_us"], row["op"]), (30, 2, "reduce"))


class ListedHostsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.shell = self.program("shell", SHELL)
        self.worker = self.program("worker", WORKER)

    def program(self, name, text):
        path = self.folder / name
        path.write_text(text.format(folder=self.folder))
        path.chmod(0o700)
        return path

    def run_hosts(self, names, *words):
        rows = self.folder / "rows.jsonl"
        given = ["--host-list", names, "--worker", self.worker, "--remote-shell", self.shell]
        given += ["--libraries", "muster", "--rounds", "1", "--json", rows]
        done = subprocess.run(
            [sys.executable, "-B", ROOT / "bench/hosts.py", *given, *words],
            capture_output=True,
            text=True,
            timeout=120,
        )
        lines = rows.read_text().splitlines() if rows.exists() else []
        return done, [json.loads(line) for line in lines]

    def ranks_left(self):
        for line in (self.folder / "ranks").read_text().splitlines():
            mark, pid = line.split()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if mark.encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                    process = os.pidfd_open(int(pid))
                    self.addCleanup(os.close, process)
                    if not select.select([process], [], [], 10)[0]:
                        yield pid

    def test_a_row_of_each_cell_without_a_limit(self):
        done, rows = self.run_hosts("a,b", "--op", "reduce,gather", "--sizes", "1KiB")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertNotIn("limit", done.stdout)
        self.assertEqual([row["op"] for row in rows], ["reduce", "gather"])
        facts = [rows[0][key] for key in ("kind", "us", "loop_us", "rate", "limit_us")]
        self.assertEqual(facts, ["list", 1000, 1024, None, None])
        self.assertEqual(list(self.ranks_left()), [])

    def test_a_limit_if_the_rate_is_given(self):
        done, rows = self.run_hosts("a,b", "--op", "scatter", "--sizes", "1KiB", "--rate", "1gbit")
        self.assertIn("x limit", done.stdout)
        self.assertAlmostEqual(rows[0]["limit_us"], 512 * 8 / 1e3)

    def test_nobody_sees_the_secret_in_a_command(self):
        self.run_hosts("a,b", "--op", "reduce", "--sizes", "1KiB")
        secret = (self.folder / "secret").read_text().strip()
        self.assertEqual(len(secret), 64)
        asked = (self.folder / "asked").read_text()
        self.assertIn(str(self.worker), asked)
        self.assertNotIn(secret, asked)

    def test_settings_go_along_but_no_secret(self):
        environment = {"MUSTER_ALGORITHM": "all_reduce:bruck", "MUSTER_SECRET": "s", "HOME": "/h"}
        environment |= {"MUSTER_SECRET_FILE": "/s", "MUSTER_ETCD_PASSWORD": "p"}
        found = list(hosts_places.variables(environment))
        self.assertEqual(found, ["MUSTER_ALGORITHM=all_reduce:bruck"])

    def test_a_host_that_cannot_be_reached_is_named(self):
        done, _ = self.run_hosts("a,unreachable")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(
            done.stderr, "host unreachable: .* status 255; it said: .*No route to host"
        )
        self.assertFalse((self.folder / "ranks").exists(), "nothing was started")

    def test_a_host_without_the_program_is_named(self):
        # On the machine that asks it is there.
        gone = f'case "$*" in *-x*) set -- "$(echo "$*" | sed \'s,{self.worker},/gone,\')" ;; esac'
        self.shell.write_text(self.shell.read_text().replace("case", gone + "\ncase", 1))
        done, _ = self.run_hosts("a,b")
        self.assertRegex(done.stderr, "host a: .*is not there; it has the same path on all hosts")

    def test_a_rank_that_dies_ends_all_ranks(self):
        done, rows = self.run_hosts("a,b", "--op", "reduce,broadcast,gather", "--sizes", "1KiB")
        self.assertEqual(done.returncode, 1)
        self.assertIn("muster: rank 1 on b has ended with status 3", done.stderr)
        self.assertIn("rank 1 on b said: out of memory", done.stderr)
        self.assertEqual([row["op"] for row in rows], ["reduce"])
        self.assertEqual(list(self.ranks_left()), [])


def can_run():
    return (
        os.geteuid() == 0
        and LAB.exists()
        and LAB.with_name("muster_bench_worker").exists()
        and all(map(shutil.which, ("ip", "tc")))
        and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0
    )


@unittest.skipUnless(can_run(), "needs root, iproute2 and a built muster-lab (make build)")
class RunTest(unittest.TestCase):
    def test_a_link_carries_its_rate_in_each_direction(self):
        with hosts.Hosts(2, 1e8) as made:
            for space in (*made.names, made.switch):
                words = ["tc", "-n", space, "qdisc", "show"]
                shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
                ends = 2 if space == made.switch else 1
                self.assertEqual(shown.count("qdisc tbf"), ends, shown)
                self.assertEqual(shown.count("rate 100Mbit"), ends, shown)

    def test_a_row_of_each_cell_and_nothing_left(self):
        with tempfile.TemporaryDirectory() as folder:
            rows = pathlib.Path(folder) / "rows.jsonl"
            words = [LAB, *TINY, "--sizes", "64KiB", "--rounds", "1", "--ranks-per-host", "2"]
            with subprocess.Popen([*words, "--json", rows], stdout=subprocess.PIPE) as run:
                run.communicate(timeout=300)
            self.assertEqual(run.returncode, 0)
            (row,) = map(json.loads, rows.read_text().splitlines())
        self.assertEqual((row["library"], row["hosts"], row["ranks_per_host"]), ("muster", 2, 2))
        self.assertGreater(row["us"], 0)
        self.assertAlmostEqual(row["limit_us"], 65536 * 8 / 1e3)
        self.assertEqual(namespaces_of(run.pid), [])

    def test_ctrl_c_leaves_nothing(self):
        words = [LAB, *TINY, "--sizes", "64KiB", "--rounds", "1000000"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as run:
            run.stdout.readline()  # hosts and ranks are there
            self.assertEqual(len(namespaces_of(run.pid)), 3)
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=60)
        self.assertEqual(run.returncode, 128 + signal.SIGINT)
        self.assertEqual(namespaces_of(run.pid), [])


if __name__ == "__main__":
    unittest.main()

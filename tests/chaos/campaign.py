#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Random faults in jobs that must not notice them, beside the same jobs undisturbed.

    campaign.py [--minutes N] [--seed S] [--round R] [--kinds K,...] [--faults F,...] [--list]
    campaign.py --sum FILE...    # adds up the totals of what campaigns printed

A round is one job of three nodes with some faults at random moments. It holds if every node that
was not killed ends with 0, all ranks end with the bits of the undisturbed job, no epoch begins
before a step that was safe, no state is said to be lost, and nothing is left: processes, shared
memory, folders. A round that does not hold prints what was done and said, and the words that play
it again. The last line is the totals: faults by their kind, and what was wrong; exit code 1 if any
round did not hold.

Needs root and iproute2 (hosts are network namespaces), and etcd for the kinds that use it. Clocks
jump only if `clock` is among --faults, by libfaketime, which must be installed.
"""

import argparse
import collections
import contextlib
import glob
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

from etcd_server import EtcdCluster  # noqa: E402
from linked_hosts import LinkedHosts  # noqa: E402
from small_disk import SmallDisk  # noqa: E402

import muster  # noqa: E402

MUSTER = pathlib.Path(muster.__file__).parents[2] / "bin" / "muster"
NODES = 3
LIMIT_S = 240  # a round that takes longer hangs
CLOCK = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"

#: Name of a kind: rendezvous, mode of the program, least nodes.
KINDS = {
    "keep-c10d": ("c10d", "sums", 1),
    "keep-etcd": ("etcd", "sums", 1),
    "keep-ddp": ("etcd", "ddp", NODES),
    "keep-fsdp": ("etcd", "fsdp", NODES),
    "keep-zero": ("etcd", "zero", NODES),
    "keep-local_sgd": ("etcd", "local_sgd", NODES),
    "restart-c10d": ("c10d", "saved", NODES),
    "restart-etcd": ("etcd", "saved", NODES),
}
STEPS = {"sums": 1500, "saved": 800}


#: What may be wrong in a round, as the totals have it; steps by their number.
WRONG = ("steps_lost", "wrong_bits", "hangs", "leftovers", "wrong_words", "wrong_ends")


def mode_of(kind):
    return KINDS[kind][1]


def steps_of(kind):
    return STEPS.get(mode_of(kind), 600)


FORBIDDEN = re.compile(
    r"LOST|of the job (is|are|may be) lost|-\d+ (us|ms|s)\b|Segmentation|terminate called|Sanitizer"
    r"|internal error|core dumped"
)


class Node:
    """One launcher on one host. What it and its workers say goes to a file."""

    def __init__(self, job, host):
        self.host, self.killed = host, False
        self.file = open(job.folder / f"node-{len(job.nodes)}", "w+b")
        self.process = subprocess.Popen(
            [*job.hosts.inside(host), *job.command(host)],
            env=job.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=self.file,
            start_new_session=True,
        )

    def said(self):
        self.file.seek(0)
        return self.file.read().decode(errors="replace")

    def workers(self):
        pid = self.process.pid
        with contextlib.suppress(OSError):
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [int(each) for each in children]
        return []

    def alive(self):
        return self.process.poll() is None


class Job:
    def __init__(self, kind, name, hosts, folder, clock):
        self.rendezvous, self.mode, self.least = KINDS[kind]
        self.name, self.hosts, self.folder = name, hosts, folder
        self.steps = steps_of(kind)
        self.place = folder / "tmp"  # for temporary folders
        self.place.mkdir()
        self.nodes = []
        self.done = []  # what was done, for a report
        self.etcd = None
        self.clock = folder / "clock" if clock else None
        if self.clock:
            self.clock.write_text("+0")
        if self.rendezvous == "etcd":
            self.etcd = EtcdCluster(3, host=hosts.bridge_address)
        self.disk = SmallDisk() if self.mode == "saved" else None

    def endpoint(self):
        return self.etcd.endpoints() if self.etcd else f"{self.hosts.address(0)}:29400"

    def command(self, host):
        nodes = f"{self.least}:{NODES}" if self.least < NODES else str(NODES)
        patience = "last_call_timeout=3600,keep_alive_interval=1,keep_alive_max_attempt=3"
        words = [MUSTER, "run", "--nnodes", nodes, "--nproc-per-node", 1, "--max-restarts", 1000]
        words += ["--rdzv-backend", self.rendezvous, "--rdzv-endpoint", self.endpoint()]
        words += ["--rdzv-id", self.name, "--rdzv-conf", patience]
        words += ["--local-addr", self.hosts.address(host)]
        if self.mode != "saved":
            words += ["--elastic", "keep"]
        place = self.disk.folder if self.disk else self.folder
        return [*map(str, words), str(HERE / "program.py"), self.mode, str(self.steps), str(place)]

    def environment(self):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        kept |= {"MUSTER_SECRET": "a secret for the campaign", "OMP_NUM_THREADS": "1"}
        kept |= {"MUSTER_CHAOS": self.name, "TMPDIR": str(self.place)}
        if self.clock:
            kept |= {"LD_PRELOAD": CLOCK, "FAKETIME_TIMESTAMP_FILE": str(self.clock)}
            kept |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1"}
            kept |= {"FAKETIME_NO_CACHE": "0"}
        return kept

    def start(self, host):
        self.nodes.append(Node(self, host))

    def living(self):
        return [each for each in self.nodes if each.alive()]

    def said(self):
        return "".join(each.said() for each in self.nodes)

    def safe_steps(self):
        return [int(step) for step in re.findall(r"safe step (\d+)", self.said())]

    def close(self):
        for each in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.kill()
            each.process.wait()
            each.file.close()
        if self.etcd:
            self.etcd.close()
        if self.disk:
            self.disk.close()


class Faults:
    """Each method does one fault to `job` and ends it, over a random time; returns what it did."""

    def __init__(self, job, chance):
        self.job, self.chance = job, chance

    OF_ALL = ("kill_rank", "kill_node", "pause_rank", "pause_node", "cut", "slow", "cut_between")
    OF_ETCD = ("pause_etcd", "pause_all_of_etcd", "kill_etcd")
    OF_DISKS = ("fill_disk",)
    OF_CLOCKS = ("clock",)

    def names(self):
        names = [*self.OF_ALL]
        names += self.OF_ETCD if self.job.etcd else []
        names += self.OF_DISKS if self.job.disk else []
        return names + [*(self.OF_CLOCKS if self.job.clock else [])]

    def _for_a_while(self, most=8.0):
        time.sleep(self.chance.uniform(0.2, most))  # the fault itself

    def _victims(self):
        """With c10d the first node serves the membership: its end is the job's."""
        nodes = self.job.living()
        return nodes if self.job.etcd else [each for each in nodes if each.host != 0]

    def _signal(self, pid, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill_rank(self):
        workers = [pid for node in self.job.living() for pid in node.workers()]
        if not workers:
            return "no rank to kill"
        self._signal(self.chance.choice(workers), signal.SIGKILL)
        return "killed a rank"

    def kill_node(self):
        nodes = self._victims()
        if not nodes:
            return "no node to kill"
        node = self.chance.choice(nodes)
        node.killed = True
        node.process.kill()
        node.process.wait()
        self.job.start(node.host)
        return f"killed the node on host {node.host}, and started another"

    def pause_rank(self):
        workers = [pid for node in self.job.living() for pid in node.workers()]
        if not workers:
            return "no rank to stop"
        pid = self.chance.choice(workers)
        self._signal(pid, signal.SIGSTOP)
        self._for_a_while()
        self._signal(pid, signal.SIGCONT)
        return "stopped a rank"

    def pause_node(self):
        nodes = self.job.living()
        if not nodes:
            return "no node to stop"
        node = self.chance.choice(nodes)
        self._signal(node.process.pid, signal.SIGSTOP)
        self._for_a_while()
        self._signal(node.process.pid, signal.SIGCONT)
        return f"stopped the launcher on host {node.host}"

    def cut(self):
        host = self.chance.randrange(NODES)
        self.job.hosts.cut_off(host)
        self._for_a_while()
        self.job.hosts.join(host)
        return f"cut host {host} off"

    def cut_between(self):
        one, other = self.chance.sample(range(NODES), 2)
        self.job.hosts.cut(one, other)
        self._for_a_while()
        self.job.hosts.mend(one, other)
        return f"cut hosts {one} and {other} off from each other"

    def slow(self):
        host, rate = (
            self.chance.randrange(NODES),
            self.chance.choice(["200kbit", "2mbit", "20mbit"]),
        )
        self.job.hosts.slow(host, rate)
        self._for_a_while(4)
        self.job.hosts.make_quick(host)
        return f"slowed host {host} to {rate}"

    def pause_etcd(self):
        member = self.chance.randrange(3)
        self.job.etcd.signal(signal.SIGSTOP, member)
        self._for_a_while()
        self.job.etcd.signal(signal.SIGCONT, member)
        return f"stopped member {member} of etcd"

    def pause_all_of_etcd(self):
        self.job.etcd.signal(signal.SIGSTOP)
        self._for_a_while()
        self.job.etcd.signal(signal.SIGCONT)
        return "stopped all of etcd"

    def kill_etcd(self):
        member = self.chance.randrange(3)
        self.job.etcd.kill(member)
        self._for_a_while(2)
        self.job.etcd.start(member)
        return f"killed member {member} of etcd, and started it again"

    def fill_disk(self):
        self.job.disk.fill()
        self._for_a_while(3)
        self.job.disk.empty()
        return "filled the disk"

    def clock(self):
        jump = self.chance.choice([-86400, -60, 60, 86400])
        self.job.clock.write_text(f"{jump:+d}")
        return f"set the clocks {jump:+d} s"


def leftovers(name):
    """Processes of a job that has ended."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"MUSTER_CHAOS={name}\0".encode() in pathlib.Path(path).read_bytes():
                pid = path.split("/")[2]
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found.append(f"process {pid}: {b' '.join(words).decode(errors='replace')[:150]}")
    return found


def abandoned_memory():
    """Names of muster's in shared memory that no process has mapped or opened any more."""
    names = {each for each in glob.glob("/dev/shm/muster*") if os.path.isfile(each)}
    for path in glob.glob("/proc/[0-9]*/maps") if names else []:
        with contextlib.suppress(OSError):
            names -= set(re.findall(r"/dev/shm/muster\S*", pathlib.Path(path).read_text()))
    for path in glob.glob("/proc/[0-9]*/fd/*") if names else []:
        with contextlib.suppress(OSError):
            names.discard(os.readlink(path))
    return names


def wait_for(condition, limit):
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def undisturbed(mode, steps, known={}):  # noqa: B006 - the runs of this process
    """The hash that a job of three ranks without faults ends with."""
    if mode not in known:
        with tempfile.TemporaryDirectory() as folder:
            words = [MUSTER, "run", "--standalone", "--nproc-per-node", NODES]
            words += [] if mode == "saved" else ["--elastic", "keep", "--max-restarts", 1]
            words += [HERE / "program.py", mode, steps, folder]
            done = subprocess.run(
                [*map(str, words)],
                capture_output=True,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                timeout=LIMIT_S,
            )
        ends = set(re.findall(rf"finished at step {steps} with (\w+)", done.stdout))
        if done.returncode != 0 or len(ends) != 1:
            raise RuntimeError(f"the undisturbed job failed: {done.stdout}{done.stderr}")
        known[mode] = ends.pop()
    return known[mode]


class Round:
    """One job with faults, as the seed has them. `wrong` is what did not hold, in words; `totals`
    counts it by WRONG, and the faults by their names.
    """

    def __init__(self, seed, kinds, faults, hosts):
        self.chance = random.Random(seed)
        self.kind = self.chance.choice(kinds)
        self.wrong = []
        self.totals = collections.Counter()
        self.said, self.lasted = "", 0.0
        self.done = []
        self.expected = undisturbed(mode_of(self.kind), steps_of(self.kind))
        before = abandoned_memory()
        folder = pathlib.Path(tempfile.mkdtemp(prefix="muster-chaos-"))
        job = Job(self.kind, f"chaos-{os.getpid()}-{seed}", hosts, folder, "clock" in faults)
        began = time.monotonic()
        try:
            self._play(job, faults)
            self.said = job.said()
            self._judge(job)
        finally:
            self.lasted = time.monotonic() - began
            self.said = job.said()
            job.close()
            if left := [*job.place.glob("muster*")]:
                self._note("leftovers", "left: " + " ".join(map(str, left)), len(left))
            shutil.rmtree(folder, ignore_errors=True)
        if left := leftovers(job.name):
            self._note("leftovers", "left: " + "; ".join(left), len(left))
        # Other jobs of this machine are between making theirs and mapping it, or removing it.
        if not wait_for(lambda: not abandoned_memory() - before, 10):
            left = sorted(abandoned_memory() - before)
            self._note("leftovers", "left: " + " ".join(left), len(left))

    def _note(self, kind, text, count=1):
        self.wrong.append(text)
        self.totals[kind] += count

    def _play(self, job, wanted):
        for host in range(NODES):
            job.start(host)
            if not job.etcd and host == 0:
                time.sleep(0.3)  # it serves the membership
        if not wait_for(lambda: "safe step" in job.said(), LIMIT_S):
            self._note("hangs", "the job has not begun")
            return
        faults = Faults(job, self.chance)
        names = [each for each in faults.names() if not wanted or each in wanted]
        for _ in range(self.chance.randint(3, 8) if names else 0):
            time.sleep(self.chance.uniform(0, 1.5))
            name = self.chance.choice(names)
            at = max(job.safe_steps(), default=0)
            if at >= job.steps or len(job.living()) < NODES:
                break
            epochs = job.said().count(" from step ")
            what = getattr(faults, name)()
            self.done.append(f"after step {at}: {what}")
            self.totals[name] += not what.startswith("no ")
            # A loss before the last one is repaired may take the state with it.
            anew = name in ("kill_rank", "kill_node")
            goes_on = wait_for(
                lambda epochs=epochs, at=at, anew=anew: (
                    job.said().count(" from step ") >= epochs + anew
                    and max(job.safe_steps(), default=0) > at + 10
                    or not job.living()
                ),
                LIMIT_S / 2,
            )
            if not goes_on:
                self._note("hangs", f"no step within {LIMIT_S / 2:.0f} s of: {self.done[-1]}")
                return
        if not wait_for(lambda: not job.living(), LIMIT_S):
            self._note("hangs", f"the job has not ended within {LIMIT_S} s of the last fault")

    def _judge(self, job):
        for node in job.nodes:
            code = node.process.poll()
            if not node.killed and code != 0:
                self._note("wrong_ends", f"the launcher on host {node.host} ended with {code}")
        ends = re.findall(r"finished at step (\d+) with (\w+)", self.said)
        if not ends:
            self._note("wrong_ends", "no rank has finished")
        for step, bits in set(ends):
            if (int(step), bits) != (job.steps, self.expected):
                words = f"ended with {bits} at step {step}, not with {self.expected}"
                self._note("wrong_bits", words)
        safe = [(int(e), int(s)) for e, s in re.findall(r"epoch (\d+) safe step (\d+)", self.said)]
        for epoch, start in re.findall(r"epoch (\d+) rank \d+ from step (\d+)", self.said):
            lost = max((step for of, step in safe if of < int(epoch)), default=0) - int(start)
            if lost > 0:
                self._note("steps_lost", f"epoch {epoch} begins {lost} safe steps back", lost)
        for word in {match[0] for match in FORBIDDEN.finditer(self.said)}:
            self._note("wrong_words", f"said: {word}")

    @property
    def faults(self):
        return sum(count for name, count in self.totals.items() if name not in WRONG)


def totals_line(totals):
    """The last line of a campaign, of `key=number`, from which `added` reads it."""
    faults = sorted(totals.keys() - {"rounds", "failed", *WRONG})
    made = sum(totals[name] for name in faults)
    words = [("rounds", totals["rounds"]), ("failed", totals["failed"]), ("faults", made)]
    words += [(name, totals[name]) for name in (*faults, *WRONG)]
    return "totals: " + " ".join(f"{name}={count}" for name, count in words)


def added(lines):
    """The sum of the totals among the lines of campaigns."""
    totals = collections.Counter()
    for line in lines:
        for word in line.split()[1:] if line.startswith("totals: ") else ():
            name, _, count = word.partition("=")
            totals[name] += int(count)
    del totals["faults"]
    return totals


def parsed():
    parser = argparse.ArgumentParser(description="Random faults in jobs that must not notice them.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--round", type=int, help="play this round of the seed only")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of jobs")
    parser.add_argument("--faults", default="", help="absent: all that fit the kind")
    parser.add_argument("--rounds", type=int, default=1 << 30, help="at the most")
    parser.add_argument("--list", action="store_true", help="print kinds of jobs and end")
    parser.add_argument("--sum", nargs="+", metavar="FILE", help="add totals up and end")
    return parser.parse_args()


def main():
    words = parsed()
    if words.list:
        print("\n".join(KINDS))
        return 0
    if words.sum:
        print(totals_line(added(line for name in words.sum for line in open(name))))
        return 0
    kinds, wanted = words.kinds.split(","), [each for each in words.faults.split(",") if each]
    if unknown := [each for each in kinds if each not in KINDS]:
        sys.exit(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    known = {*Faults.OF_ALL, *Faults.OF_ETCD, *Faults.OF_DISKS, *Faults.OF_CLOCKS}
    if unknown := [each for each in wanted if each not in known]:
        sys.exit(f"no such fault: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if "clock" in wanted and not os.path.exists(CLOCK):
        sys.exit("clocks jump by libfaketime, which is not installed: apt-get install libfaketime")
    end = time.monotonic() + 60 * words.minutes
    totals = collections.Counter()
    with contextlib.closing(LinkedHosts(NODES)) as hosts:
        number = words.round or 0
        while time.monotonic() < end and totals["rounds"] < words.rounds:
            played = Round(words.seed * 100003 + number, kinds, wanted, hosts)
            totals += played.totals
            totals["rounds"] += 1
            verdict = "holds" if not played.wrong else "DOES NOT HOLD"
            print(
                f"round {number} {played.kind}: {played.faults} faults, {played.lasted:.0f} s, "
                f"{verdict}",
                flush=True,
            )
            if played.wrong:
                totals["failed"] += 1
                print("\n".join(["  done:", *played.done, "  wrong:", *played.wrong]))
                print("  said:\n" + played.said)
                print(f"  again: {sys.argv[0]} --seed {words.seed} --round {number} --rounds 1")
            if words.round is not None:
                break
            number += 1
    print(f"seed {words.seed}")
    print(totals_line(totals))
    return 1 if totals["failed"] or not totals.keys() - {"rounds", *WRONG} else 0


if __name__ == "__main__":
    sys.exit(main())

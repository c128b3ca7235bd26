#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The suites that torch ships in its wheel, on muster as a backend of stock torch. Nothing of them
is kept here.

    run.py muster      as it is, with backend "muster": what is pinned to the names of torch's own
                       backends is skipped
    run.py widened     the same, and the suite's lists of backends know "muster" wherever they know
                       "gloo"
    run.py as_mpi      the same for MPI: all_to_all, whose tests are pinned to that name
    run.py replaced    muster.torch.replace_gloo(), backend "gloo"; every test that torch's Gloo
                       passes in the same run must pass
    run.py beside_rpc  the same for the tests of RPC that use process groups too
    run.py gloo        torch's own Gloo, for comparison

    run.py replaced --world 4 test_all_reduce_sum ...
                       these tests alone, with what their ranks print

By default it runs a sample, drawn with MUSTER_TEST_SEED; with MUSTER_TEST_LONG=1 all, in worlds of
3 and 4, and of 8 where groups need it. A test that does not pass must be in expected.py, with a
reason.
"""

import argparse
import collections
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import expected
from forked_ranks import ForkedRanks, fork
from torch.testing._internal.common_distributed import DistTestCases

import muster.torch

WAYS = ("muster", "widened", "as_mpi", "replaced", "beside_rpc", "gloo")
LONG = bool(os.environ.get("MUSTER_TEST_LONG"))
GLOO_LIMIT = 3600 if LONG else 90  # seconds
SAMPLE = {"muster": 4, "widened": 4, "as_mpi": 3, "replaced": 5, "beside_rpc": 1, "gloo": 4}
GROUPS = re.compile(r"group|failure_order|wait_all_ranks")  # what needs a world of 8
HURRIED = re.compile(
    r"timeout|monitored_barrier"
)  # has deadlines of 0.1 to 2 s, which a loaded machine misses: it may try again
PROCESS_GROUPS_BESIDE_RPC = (
    "test_pg_init_no_rpc_init",
    "test_init_pg_then_rpc",
    "test_init_rpc_then_pg",
    "test_deadlock",
)


def distributed_test(way, world, folder):
    """The suite reads most of what it should do while it is imported."""
    taken_for = {"muster": "muster", "as_mpi": "mpi"}.get(way, "gloo")
    os.environ |= {
        "BACKEND": taken_for,
        "WORLD_SIZE": str(world),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/again",
    }
    import torch.testing._internal.distributed.distributed_test as suite

    if way in ("widened", "as_mpi"):
        suite.BACKEND = "muster"
        for names in (
            *DistTestCases.backend_feature.values(),
            DistTestCases.skip_collective["allgather_coalesced"],
        ):
            if taken_for in names:
                names.add("muster")
        suite.PROFILING_SUPPORTED_BACKENDS.append("muster")
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("muster")
    return [
        type(
            "Distributed",
            (ForkedRanks, suite.TestDistBackend, suite.DistributedTest._DistTestBase),
            {"backend_of_torch": way == "gloo"},
        )
    ]


def beside_rpc():
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as ddp
    from torch.testing._internal.distributed.rpc.rpc_test import RpcTest
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    return [
        type(
            suite.__name__,
            (suite, TensorPipeRpcAgentTestFixture, ForkedRanks),
            {"__module__": suite.__module__},
        )
        for suite in (ddp.DdpUnderDistAutogradTest, ddp.DdpComparisonTest, RpcTest)
    ]


def chosen(classes, way, world, names):
    """(class, name of a test), of those named, else a sample or all."""
    tests = [
        (each, name) for each in classes for name in unittest.TestLoader().getTestCaseNames(each)
    ]
    if names:
        return [test for test in tests if test[1] in names]
    if world is None:
        tests = [
            test
            for test in tests
            if test[0].__name__ != "RpcTest" or test[1] in PROCESS_GROUPS_BESIDE_RPC
        ]
    if way == "as_mpi":
        tests = [test for test in tests if "all_to_all" in test[1]]
    elif world == 8:
        tests = [test for test in tests if GROUPS.search(test[1])]
    if LONG:
        return tests
    quick = [
        test
        for test in tests
        if not hasattr(getattr(*test), "__unittest_skip__")
        and not hasattr(getattr(*test), "_min_gpus_required")
    ]
    return random.Random(f"{expected.seed()} {way}").sample(quick, SAMPLE[way])


class Outcomes(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.of = {}

    def note(self, test, kind, text=""):
        self.of[f"{type(test).__name__}.{test._testMethodName}"] = (kind, text)

    def addSuccess(self, test):
        self.note(test, "passed")

    def addSkip(self, test, reason):
        self.note(test, "skipped", reason)

    def addFailure(self, test, error):
        said = ""
        if os.path.exists(test.log):
            with open(test.log, errors="replace") as log:
                said = log.read()[-8000:]
        self.note(test, "failed", f"{said}\n{self._exc_info_to_string(error, test)}")

    addError = addFailure


def run_world(pipe, way, engine, world, names):
    """In a process of its own. `engine`: the way that the ranks' backend is chosen."""
    folder = tempfile.mkdtemp(prefix="muster-upstream-")
    tempfile.tempdir = folder
    if engine == "gloo":
        os.setpgrp()  # to be ended with its ranks
    try:
        if engine == "replaced":
            muster.torch.replace_gloo()
        classes = beside_rpc() if world is None else distributed_test(engine, world, folder)
        outcomes = Outcomes()
        for number, (each, name) in enumerate(chosen(classes, way, world, names)):
            each.log = os.path.join(folder, f"log{number}")
            begun = time.monotonic()
            unittest.TestSuite([each(name)]).run(outcomes)
            if (
                HURRIED.search(name)
                and outcomes.of.get(f"{each.__name__}.{name}", ("",))[0] == "failed"
            ):
                unittest.TestSuite([each(name)]).run(outcomes)
            kind, text = outcomes.of.get(
                f"{each.__name__}.{name}", ("failed", "no outcome: " + str(outcomes.errors))
            )
            if names or (LONG and kind != "skipped"):
                print(
                    f"{kind:8} {time.monotonic() - begun:6.1f} s  {engine} {world or ''} {name}",
                    flush=True,
                )
            if names and os.path.exists(each.log):
                with open(each.log, errors="replace") as log:
                    print(log.read())
        pipe.send(outcomes.of)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def outcomes_of(way, engine, world, names):
    reading, writing = fork.Pipe(duplex=False)
    child = fork.Process(target=run_world, args=(writing, way, engine, world, names))
    child.start()
    writing.close()
    try:
        # Torch's own sometimes hangs: then there is nothing to compare with, and what does not pass
        # needs a reason.
        if engine == "gloo" and not reading.poll(GLOO_LIMIT):
            print(f"Gloo's tests have not ended within {GLOO_LIMIT} s", flush=True)
            os.killpg(child.pid, signal.SIGKILL)
            return {}
        return reading.recv()
    except EOFError:
        sys.exit(f"the process that ran {engine} with {world} ranks ended before its tests did")
    finally:
        child.join()


def judge(way, world, mine, theirs):
    """Prints what did not pass, by reason; returns what nobody expected."""
    surprises, reasons = [], collections.defaultdict(list)
    for name, (kind, text) in sorted(mine.items()):
        reason = expected.reason(way, name.split(".")[1], kind, text)
        if kind == "passed":
            reasons["passed"].append(name)
            if reason:
                surprises.append(f"{name} passes, and expected.py says that it fails")
        elif theirs.get(name, ("",))[0] == "passed":
            surprises.append(f"{name}: Gloo passes it; here it is {kind}\n{text}")
        elif reason and not (
            way == "replaced"
            and reason == expected.PINNED
            and theirs.get(name, ("",))[0] != "skipped"
        ):
            reasons[f"{kind}: {reason}"].append(name)
        elif theirs.get(name, ("",))[0] == "failed":
            reasons[f"{kind}, and Gloo fails it too"].append(name)
        else:
            surprises.append(f"{name} is {kind}, and expected.py gives no reason\n{text}")
    print(
        f"== {way}{f', {world} ranks' if world else ''}: {len(mine)} tests"
        + (
            f"; Gloo passes {sum(kind == 'passed' for kind, _ in theirs.values())}"
            if theirs
            else ""
        )
    )
    for reason, names in sorted(reasons.items(), key=lambda each: -len(each[1])):
        print(f"{len(names):5} {reason}")
        if reason != "passed" and (LONG or "failed" in reason):
            print("".join(f"          {name}\n" for name in names), end="")
    for surprise in surprises:
        print(f"ERROR: {way}, {world} ranks: {surprise}")
    return surprises


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--world", type=int)
    parser.add_argument("tests", nargs="*")
    asked = parser.parse_intermixed_args()
    print(f"MUSTER_TEST_SEED={expected.seed()}", flush=True)
    worlds = (
        [3, 4, 8]
        if LONG
        else [random.Random(f"{expected.seed()} world of {asked.way}").choice([3, 4, 8])]
    )
    if asked.world:
        worlds = [asked.world]
    if asked.way == "beside_rpc":
        worlds = [None]
    surprises = []
    for world in worlds:
        engine = "replaced" if asked.way == "beside_rpc" else asked.way
        mine = outcomes_of(asked.way, engine, world, asked.tests)
        theirs = outcomes_of(asked.way, "gloo", world, asked.tests) if engine == "replaced" else {}
        surprises += judge(asked.way, world, mine, theirs)
    sys.exit(1 if surprises else 0)


if __name__ == "__main__":
    main()

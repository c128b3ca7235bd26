#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Test files of torch's sources that its wheel does not ship, on muster. Nothing is fetched and
nothing of them is kept here.

    checkout.py replaced [FILE ...]  after muster.torch.replace_gloo(), as stock torch's backend
    checkout.py package [FILE ...]   the package muster in the place of torch.distributed: stores
    checkout.py torchrun [FILE ...]  torchrun's agents with --rdzv-backend=muster; beside them, in
                                     the place of Gloo, those of torch's own backend c10d
    checkout.py sharded [FILE ...]   fully_shard: muster's in the place of torch's, on CPUs; with
                                     --table every test with how it ends on both, and why

The sources' folder is MUSTER_TORCH_CHECKOUT; in long runs what tests/upstream/get_sources brings is
taken as well. Without either the test is skipped. Each test that passes on stock torch with Gloo
must pass, or be in expected.py (expected_sharded.py) with a reason, which excuses neither a test
without an end nor the end of its process. --print NAME ... runs single tests (Class.test) and
shows what they print.
"""

import argparse
import collections
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

LONG = bool(os.environ.get("MUSTER_TEST_LONG"))
BROUGHT = pathlib.Path(__file__).parents[2] / ".cache/torch-source"
SKIPPED = 77  # the exit code by which ctest knows it
LIMIT_S = 240  # for a test, and for loading the file; torch's own are longer
FILES = {
    "replaced": [
        "test_c10d_common.py",
        "test_store.py",
        "test_device_mesh.py",
        "test_functional_api.py",
    ],
    "package": ["test_store.py"],
    "torchrun": ["elastic/agent/server/test/local_elastic_agent_test.py"],
    "sharded": [
        f"_composable/fsdp/test_fully_shard_{part}.py"
        for part in (
            "autograd",
            "clip_grad_norm_",
            "comm",
            "compile",
            "extensions",
            "frozen",
            "grad_scaler",
            "init",
            "logging",
            "memory",
            "mixed_precision",
            "overlap",
            "state",
            "state_dict",
            "training",
        )
    ],
}
# Left out with another torch than the sources' own: they compile, and reach into torchrun's parts.
OF_THEIR_TORCH = ["test_functional_api.py", *FILES["torchrun"]]
# The engine that a way is compared with.
BESIDE = {"torchrun": "c10d", "sharded": "stock"}
NO_END, ITS_END = "no end", "its process ended"
BROKEN = (NO_END, ITS_END)  # what a test says then, which no reason excuses


def in_place_of_torch(text):
    """A file's text with the package's modules for torch.distributed's."""
    for theirs, ours in (
        ("import torch.distributed as ", "import muster as "),
        ("import torch.distributed.rpc as ", "import muster.rpc as "),
        ("from torch.distributed", "from muster"),
        ("torch.distributed.", "muster."),
    ):
        text = text.replace(theirs, ours)
    return text


def meet_by(backend, module):
    """The file has each test once for every backend of rendezvous that torch has. One of them stays
    and runs on `backend`; no server of etcd is started.
    """
    if backend == "muster":
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

        from muster.torch.rendezvous import handler

        rendezvous_handler_registry.register("muster", handler())
    module.EtcdServer = unittest.mock.Mock()
    tests = module.LocalElasticAgentTest

    def run_test_with_backend(self, test_to_run, **_):
        self._backend = backend
        self._endpoint = f"localhost:{module.acquire_available_port()}"
        test_to_run()

    tests.run_test_with_backend = run_test_with_backend
    seen = set()
    for name in sorted(vars(tests)):
        stem = re.sub("_(c10d|etcd|etcd_v2)$", "", name)
        if name.startswith("test_") and (stem in seen or seen.add(stem)):
            delattr(tests, name)


def load(path, engine):
    import torch.testing._internal.common_distributed as common

    # Ranks are forks: torch is imported once for all of them.
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(
        common.multiprocessing.get_context("fork").Process
    )
    text = path.read_text()
    if engine == "replaced":
        import muster.torch

        muster.torch.replace_gloo()
    if engine == "package":
        import muster

        text = in_place_of_torch(text)
        common.c10d = muster
    if engine in ("sharded", "stock"):
        import sharded

        sharded.prepare(on_muster=engine == "sharded")
        text = sharded.on_cpu(text)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_loader(path.stem, loader=None, origin=str(path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(text, str(path), "exec"), vars(module))
    vars(module).pop("load_tests", None)  # torch's wants the file to be the program
    if engine in ("torchrun", "c10d"):
        meet_by("muster" if engine == "torchrun" else engine, module)
    return module


def tests_of(suite):
    for each in suite:
        yield from tests_of(each) if isinstance(each, unittest.TestSuite) else [each]


class Outcomes(unittest.TestResult):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def note(self, test, kind, text=""):
        name = ".".join(test.id().split(".")[-2:])
        print(json.dumps([name, kind, text[-6000:]]), file=self.file, flush=True)

    def startTest(self, test):
        super().startTest(test)
        self.note(test, "began")

    def addSuccess(self, test):
        self.note(test, "passed")

    def addSkip(self, test, reason):
        self.note(test, "skipped", reason)

    def addFailure(self, test, error):
        self.note(test, "failed", self._exc_info_to_string(error, test))

    addError = addFailure

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addFailure(test, error)


def run_one(path, engine, results, done, names):
    """In a process of its own: the tests of one file but those that are done."""
    os.setpgrp()
    module = load(path, engine)
    with open(results, "a") as file:
        outcomes = Outcomes(file)
        for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
            name = ".".join(test.id().split(".")[-2:])
            if name not in done and (not names or name in names):
                unittest.TestSuite([test]).run(outcomes)
                if engine == "package" and module.dist.is_initialized():
                    module.dist.destroy_process_group()  # what a failed test leaves behind


def read(results):
    found = {}
    for line in results.read_text().splitlines():
        name, kind, text = json.loads(line)
        if found.get(name, ("",))[0] != "failed":
            found[name] = (kind, text)
    return found


def outcomes_of(path, engine, names):
    """Test -> (how it ended, what it said). A process that dies or hangs ends one test alone."""
    with tempfile.TemporaryDirectory(prefix="muster-checkout-") as folder:
        results = pathlib.Path(folder) / "results"
        results.touch()
        while True:
            before = read(results)
            process = subprocess.Popen(
                [sys.executable, __file__, "--one", engine, path, results, *names],
                stdout=None if names else subprocess.DEVNULL,
                stderr=None if names else subprocess.DEVNULL,
                env=os.environ | {"TMPDIR": folder, "DONE": json.dumps(list(before))},
            )
            ended, size = None, -1
            while ended is None and size != (size := results.stat().st_size):
                try:
                    ended = process.wait(LIMIT_S)
                except subprocess.TimeoutExpired:
                    continue
            if ended is None:
                os.killpg(process.pid, 9)
                process.wait()
            found = read(results)
            unfinished = [name for name, (kind, _) in found.items() if kind == "began"]
            why = f"{NO_END} in {LIMIT_S} s" if ended is None else f"{ITS_END} with {ended}"
            with results.open("a") as file:
                for name in unfinished:
                    print(json.dumps([name, "failed", why]), file=file)
            if ended == 0 or not unfinished:
                if ended:
                    found["(the file)"] = ("failed", why)
                return found


def reasons_for(way):
    """(The file that has them, test -> reason)."""
    import expected
    import expected_sharded

    if way == "sharded":
        return "expected_sharded.py", expected_sharded.SHARDED
    return "expected.py", expected.CHECKOUT[way]


def judge(way, file, mine, theirs, table, reasons, reasons_file):
    """What must not be; `theirs` is empty where single tests were asked for."""
    surprises, counts = [], collections.Counter()
    name_beside = BESIDE.get(way, "Gloo")
    for name in sorted({*mine, *theirs}):
        (kind, text), (beside, _) = mine.get(name, ("missing", "")), theirs.get(name, ("", ""))
        reason = reasons.get(f"{file}::{name}")
        if table:
            print(f"{name} | {beside or '-'} | {kind} | {reason or ''}")
        counts[kind] += 1
        counts[f"{name_beside} {beside}"] += 1
        if reason and beside not in ("", "passed"):
            print(f"NOTE: {name}: {reasons_file} has a reason; {name_beside} is {beside} as well")
        if kind == "passed":
            if reason:
                surprises.append(f"{name} passes, and {reasons_file} says that it fails")
        elif reason is not None and not text.startswith(BROKEN):
            counts["expected"] += 1
        elif reason is not None or beside == "passed":
            surprises.append(f"{name}: {name_beside} is {beside}; here it is {kind}\n{text}")
    if theirs:
        known = {f"{file}::{name}" for name in {*mine, *theirs}}
        for gone in sorted(set(reasons) - known):
            if gone.startswith(f"{file}::"):
                surprises.append(f"{reasons_file} has a reason for {gone}, which is no test")
    print(f"== {way}, {file}: {dict(sorted(counts.items()))}", flush=True)
    for surprise in surprises:
        print(f"ERROR: {way}, {file}: {surprise}", flush=True)
    return surprises


def is_installed(sources):
    """Are these the sources of the torch that is installed?"""
    file = pathlib.Path(sources) / "version.txt"
    installed = importlib.metadata.version("torch").split(".")[:2]
    return file.exists() and file.read_text().split(".")[:2] == installed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=FILES)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--print", nargs="+", default=[], dest="names")
    parser.add_argument("--table", action="store_true", help="print test | beside | here | why")
    asked = parser.parse_intermixed_args()
    sources = os.environ.get("MUSTER_TORCH_CHECKOUT", BROUGHT if LONG else "")
    folder = pathlib.Path(sources) / "test/distributed"
    if not sources or not folder.is_dir():
        print(
            "SKIPPED: MUSTER_TORCH_CHECKOUT names no sources of torch (the folder with "
            "test/distributed); the wheel does not have these tests. In long runs those of "
            "tests/upstream/get_sources are taken"
        )
        sys.exit(SKIPPED)
    files = asked.files or [
        file for file in FILES[asked.way] if file not in OF_THEIR_TORCH or is_installed(sources)
    ]
    if not files:
        print(f"SKIPPED: {sources} is of another torch than the installed one")
        sys.exit(SKIPPED)
    reasons_file, reasons = reasons_for(asked.way)
    surprises = []
    for file in files:
        mine = outcomes_of(folder / file, asked.way, asked.names)
        beside = BESIDE.get(asked.way, "gloo")
        theirs = {} if asked.names else outcomes_of(folder / file, beside, [])
        surprises += judge(asked.way, file, mine, theirs, asked.table, reasons, reasons_file)
    sys.exit(1 if surprises else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        engine, path, results, *names = sys.argv[2:]
        run_one(pathlib.Path(path), engine, results, json.loads(os.environ["DONE"]), names)
    else:
        main()

# SPDX-License-Identifier: BSD-3-Clause
"""The tests that ctest would run, each by the name that its own framework gives it.

ctest's list says how each of its tests is started. A GoogleTest program is asked for the tests that
the filter takes; a file for pytest or unittest is read, which costs no import of torch.
"""

import fnmatch
import json
import pathlib
import re
import subprocess

from .acceptance import Wrong
from .spec_comments import python_tests

PREFIX = re.compile(r"^(?:[a-z-]+:)?")


class CTest:
    """One test of ctest's: its `full_name`, its `name` without the build's prefix, its `command`,
    and the `folder` of the sources that it is made of. One of GoogleTest's has a `filter` and a
    `start`, which is the command up to the program.
    """

    def __init__(self, entry, build, root):
        self.full_name = entry["name"]
        self.name = PREFIX.sub("", entry["name"])
        self.command = entry.get("command") or []
        properties = {row["name"]: row["value"] for row in entry.get("properties", [])}
        self.directory = pathlib.Path(properties.get("WORKING_DIRECTORY", build))
        self.root = root
        # <build>/src/core/store and <build>/<preset>/src/core/store are of src/core/store
        parts = self.directory.relative_to(build).parts if build in self.directory.parents else ()
        self.folder = "/".join(parts if parts and (root / parts[0]).is_dir() else parts[1:])
        self.start, self.filter = (), None
        for number, word in enumerate(self.command):
            if word.startswith("--gtest_filter="):
                self.start, self.filter = tuple(self.command[:number]), word.partition("=")[2]

    def python_file(self):
        """The test file of the tree that it runs, relative to the tree; None if it runs none."""
        for word in self.command:
            path = (self.directory / word).resolve()
            if word.endswith("_test.py") and self.root.resolve() in path.parents:
                return path.relative_to(self.root.resolve()).as_posix()
        return None


def read_list(build, root):
    """[CTest] of the folder, whose builds are listed by its CTestTestfile.cmake."""
    build = pathlib.Path(build).resolve()
    if not (build / "CTestTestfile.cmake").exists():
        raise Wrong(f"{build} has no CTestTestfile.cmake: `make tests-built` writes it")
    done = subprocess.run(
        ["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Wrong(f"ctest cannot list the tests of {build}: {done.stderr.strip()}")
    return [CTest(entry, build, root) for entry in json.loads(done.stdout)["tests"]]


def gtests_of(start):
    """The full name of every test that a GoogleTest program has."""
    done = subprocess.run([*start, "--gtest_list_tests"], capture_output=True, text=True)
    if done.returncode != 0:
        raise Wrong(f"{start[-1]} --gtest_list_tests ended with {done.returncode}")
    names, suite = set(), ""
    for line in done.stdout.splitlines():
        word = line.split("#")[0].rstrip()
        if word.startswith("  "):
            names.add(suite + word.strip())
        else:
            suite = word
    return names


def source_keys(full_name):
    """The names that sources may give a GoogleTest test: `Kinds/Suite.Test/etcd` is an instance of
    `Suite.Test`, and one of what `INSTANTIATE_TEST_SUITE_P(Kinds, Suite, ...)` makes.
    """
    suites, _, test = full_name.partition(".")
    parts, test = suites.split("/"), test.split("/")[0]
    keys = [("gtest", f"{part}.{test}") for part in parts if not part.isdigit()]
    if len(parts) > 1:
        keys.append(("instances", f"{parts[0]}.{parts[1]}"))
    return keys


class Names:
    """The facts known of each test, found by how its source names it."""

    def __init__(self):
        self._entries = {}

    def add(self, kind, place, name, entry):
        """`place`: the file of a Python test, the folder of a GoogleTest's sources."""
        self._entries.setdefault((kind, name), []).append((place, entry))

    def add_gtest(self, folder, full_name, entry):
        for kind, name in source_keys(full_name):
            self.add(kind, folder, name, entry)

    def of(self, test):
        """The entries that belong to a Test of a source."""
        if test.kind == "ctest":
            pattern = re.sub(r"\$\{MUSTER_TEST_PREFIX\}", "", test.name)
            pattern = re.sub(r"\$\{\w+\}", "*", pattern)
            return [
                entry
                for (kind, name), found in self._entries.items()
                if kind == "ctest" and fnmatch.fnmatchcase(name, pattern)
                for _, entry in found
            ]
        found = self._entries.get((test.kind, test.name), [])
        if test.kind == "python":
            return [entry for path, entry in found if path == test.path]
        return [entry for folder, entry in found if test.path.startswith(f"{folder}/")]


def names_listed(tests, root):
    """Names of all tests that would run; the entries are full names."""
    names, programs = Names(), {}
    for test in tests:
        names.add("ctest", "", test.name, test.name)
        if test.filter is not None:
            if test.start not in programs:
                programs[test.start] = gtests_of(test.start)
            has = programs[test.start]
            for taken in test.filter.split(":"):
                for full_name in fnmatch.filter(has, taken) if "*" in taken else {taken} & has:
                    names.add_gtest(test.folder, full_name, full_name)
        elif path := test.python_file():
            text = (root / path).read_text(encoding="utf-8")
            for name in python_tests(text)[0].values():
                names.add("python", path, name, f"{path}::{name}")
    return names

# SPDX-License-Identifier: BSD-3-Clause
"""The results of the tests of a run: the files that `ctest --output-junit` writes, read together
with the words of GoogleTest, pytest and unittest about each test in the output in those files.
"""

import os
import pathlib
import re
import xml.etree.ElementTree as tree

from .acceptance import Wrong
from .listed_tests import Names

GTEST = re.compile(r"\[ *(RUN|OK|SKIPPED|FAILED) *\] ([\w/]+\.[\w/]+)")
# A test that prints parts its name from the word with lines of its own.
PYTEST = re.compile(
    r"^(\S+\.py)::(.*?) (?:\n(?:(?!\S+\.py::).*\n)*?)?(PASSED|SKIPPED|FAILED|ERROR|XFAIL|XPASS)\b",
    re.M,
)
UNITTEST = re.compile(r"^(test\w*) \(__main__\.(\w+)", re.M)
UNITTEST_END = re.compile(r"(?:^|\.\.\. )(ok|skipped .*|FAIL|ERROR|expected failure)$", re.M)
NOT_DRAWN = "not drawn with MUSTER_TEST_SEED"  # a case that this run's sample has not
PASSED, SKIPPED, FAILED, LEFT_OUT = "passed", "skipped", "failed", "left out"


class Outcome:
    """The result of one instance of a test; `name` is its framework's."""

    def __init__(self, name, status):
        self.name, self.status = name, status

    def __str__(self):
        return self.name


def gtest_outcomes(output):
    begin = 0
    for match in GTEST.finditer(output):
        word, name = match[1], match[2]
        if word == "RUN":
            begin = match.end()
        elif word == "OK":
            yield Outcome(name, PASSED)
        elif word == "FAILED":
            yield Outcome(name, FAILED)
        else:
            drawn = NOT_DRAWN not in output[begin : match.start()]
            yield Outcome(name, SKIPPED if drawn else LEFT_OUT)


def pytest_outcomes(output, directory, root):
    for match in PYTEST.finditer(output):
        path = pathlib.Path(os.path.normpath(directory / match[1]))
        if root not in path.parents:
            continue
        path = path.relative_to(root).as_posix()
        status = {"PASSED": PASSED, "SKIPPED": SKIPPED, "XFAIL": SKIPPED}.get(match[3], FAILED)
        yield path, match[2].partition("[")[0], Outcome(f"{path}::{match[2]}", status)


def unittest_outcomes(output, path):
    begins = list(UNITTEST.finditer(output))
    for match, behind in zip(begins, [*begins[1:], None]):
        said = UNITTEST_END.search(output, match.end(), behind.start() if behind else len(output))
        word = said[1].split()[0] if said else ""
        status = {"ok": PASSED, "skipped": SKIPPED, "expected": SKIPPED}.get(word, FAILED)
        name = f"{match[2]}::{match[1]}"
        yield path, name, Outcome(f"{path}::{name}", status)


def status_of(case):
    """The status by ctest's own verdict."""
    if case.get("status") == "run":
        return PASSED
    return SKIPPED if case.find("skipped") is not None else FAILED


def read_results(folder, tests, root):
    """(Names whose entries are Outcomes, errors) of every *.xml in the folder. `tests` are those
    that ctest lists: an unknown one belongs to another build.
    """
    files = sorted(pathlib.Path(folder).glob("*.xml"))
    if not files:
        raise Wrong(f"{folder} has no results: `make test` writes them")
    names, errors, root = Names(), set(), root.resolve()
    known = {test.full_name: test for test in tests}
    for file in files:
        written = file.stat().st_mtime
        for case in tree.parse(file).getroot().iter("testcase"):
            test = known.get(case.get("name"))
            if test is None:
                continue
            output = case.findtext("system-out") or ""
            names.add("ctest", "", test.name, Outcome(test.full_name, status_of(case)))
            if test.filter is not None:
                if os.path.getmtime(test.start[-1]) > written:
                    errors.add(f"{test.start[-1]} was built after the run in {file}")
                for outcome in gtest_outcomes(output):
                    names.add_gtest(test.folder, outcome.name, outcome)
            elif (path := test.python_file()) and "pytest" in test.command:
                for path, name, outcome in pytest_outcomes(output, test.directory, root):
                    names.add("python", path, name, outcome)
            elif path:
                for path, name, outcome in unittest_outcomes(output, path):
                    names.add("python", path, name, outcome)
    return names, sorted(errors)

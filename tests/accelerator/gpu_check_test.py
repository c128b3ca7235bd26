# SPDX-License-Identifier: BSD-3-Clause
"""tools/gpu_check, dry: on the fake accelerator, which torch has loaded by itself, and on the
stand-in for NCCL.
"""

import importlib.machinery
import importlib.util
import os
import pathlib
import time

import forked
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def loaded():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "tools" / "gpu_check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_check = loaded()
BUILD = pathlib.Path(os.environ["MUSTER_NCCL_LIBRARY"]).parents[3]


# spec: A3 what is to be checked on a GPU is carried out here without one: each check holds on
# the stand-in, and prints what it measures
@pytest.mark.parametrize("check", gpu_check.CHECKS, ids=lambda check: check[0])
def test_each_check_holds_on_the_stand_in(check):
    problem, rows = gpu_check.run(check, BUILD, dry=True, start=forked.start)
    assert problem is None
    assert bool(rows) == ("microseconds" in check[0] or "graph" in check[0])
    assert ("graph" in check[0]) == any(row.startswith("SKIPPED") for row in rows)


def test_what_muster_can_be_built_without_is_not_asked_for():
    needed = gpu_check.needed_headers()
    assert "nlohmann-json3-dev" in needed
    assert not {"libcpp-httplib-dev", "libhwloc-dev", "prometheus-cpp-dev"} & needed.keys()


def test_a_check_that_fails_says_which_rank_and_why():
    check = ("a check", 2, False, "assert rank == 0, 'rank 1 differs'")
    problem, _ = gpu_check.run(check, BUILD, dry=True, start=forked.start)
    assert problem == "rank 1: AssertionError: rank 1 differs"
    ends = {1: (1, "no such text")}
    problem, _ = gpu_check.run((*check, ends), BUILD, dry=True, start=forked.start)
    assert problem == "rank 1: AssertionError: rank 1 differs"


# spec: A3 checks that were not begun by the limit of the run say so
def test_checks_that_were_not_begun_by_the_limit_say_so(capsys):
    limits = []

    def run_one(check, limit):
        limits.append(limit)
        return (None, ["SKIPPED: no graphs"]) if check[0] == "first" else ("rank 1: no", [])

    ended = time.monotonic() - 1
    later = time.monotonic() + gpu_check.LIMIT_S / 2
    assert gpu_check.run_all([("first",), ("second",)], later, run_one) == 1
    assert gpu_check.run_all([("third",)], ended, run_one) == 1
    assert len(limits) == 2 and max(limits) <= gpu_check.LIMIT_S / 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("skip first") and lines[0].endswith("no graphs")
    assert lines[1].startswith("FAIL second") and lines[1].endswith(": rank 1: no")
    assert lines[2] == "not run third: the limit has come"


# The needs of the build are derived from its sources; here they are all met.
def test_what_the_build_lacks_is_named(monkeypatch):
    headers = gpu_check.needed_headers()
    assert {"libcereal-dev", "nlohmann-json3-dev", "libcurl4-openssl-dev"} <= headers.keys()
    assert not {"libhwloc-dev", "libgtest-dev", "libpmix-dev"} & headers.keys()
    assert gpu_check.missing_to_build() == []
    monkeypatch.setattr(gpu_check, "needed_headers", lambda: {"libnone-dev": "none/none.h"})
    assert gpu_check.missing_to_build() == ["libnone-dev (<none/none.h>)"]

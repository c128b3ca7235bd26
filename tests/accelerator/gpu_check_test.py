# SPDX-License-Identifier: BSD-3-Clause
"""tools/gpu_check, dry: on the fake accelerator, which torch has loaded by itself, and on the
stand-in for NCCL.
"""

import importlib.machinery
import importlib.util
import os
import pathlib

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
    assert bool(rows) == ("microseconds" in check[0])


def test_a_check_that_fails_says_which_rank_and_why():
    check = ("a check", 2, False, "assert rank == 0, 'rank 1 differs'")
    problem, _ = gpu_check.run(check, BUILD, dry=True, start=forked.start)
    assert problem == "rank 1: AssertionError: rank 1 differs"
    ends = {1: (1, "no such text")}
    problem, _ = gpu_check.run((*check, ends), BUILD, dry=True, start=forked.start)
    assert problem == "rank 1: AssertionError: rank 1 differs"

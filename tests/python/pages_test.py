# SPDX-License-Identifier: BSD-3-Clause
"""The pages of docs/user do what they say: tutorials are followed, programs run."""

import os
import pathlib
import shutil
import sys

import pytest
from pages import matches, run_tutorial
from scratch import LIMIT_S

import muster as dist

ROOT = pathlib.Path(__file__).parents[2]
MUSTER = pathlib.Path(dist.__file__).parents[2] / "bin/muster"


# spec: V9.tutorial from an empty folder to a model that was killed and resumed, in Python
def test_tutorial(tmp_path):
    shutil.copy(ROOT / "examples/data/digits.csv", tmp_path)
    path = f"{MUSTER.parent}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "MUSTER_PYTHON": sys.executable}
    page = (ROOT / "docs/user/tutorial-python.md").read_text()
    assert run_tutorial(page, tmp_path, environment, LIMIT_S) == 4


# spec: V9.tutorial what a page shows is compared, but for what it leaves out
@pytest.mark.parametrize(
    ("expected", "said", "good"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a", "c"], False),
        (["a"], ["a", "b"], False),
        (["a", "...", "d"], ["a", "b", "c", "d"], True),
        (["...", "d"], ["d"], True),
        (["...", "d"], ["c", "e"], False),
        (["at ... s"], ["at 1.5 s"], True),
        (["at ... s"], ["at 1.5 min"], False),
        (["1.5"], ["105"], False),
    ],
)
def test_compared(expected, said, good):
    assert bool(matches(expected, said)) == good

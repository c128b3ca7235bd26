# SPDX-License-Identifier: BSD-3-Clause
"""Programs with fully_shard give the weights of one process; in long runs torch's do too."""

import os

import pytest
import torch
from sharded_programs import PROGRAMS, Job, Sharded, notes_of
from training import on_ranks


def as_alone(rank, size, kind, name):
    expected, noted = notes_of(Job(rank, size), PROGRAMS[name])
    weights, mine = notes_of(Sharded(kind, rank, size), PROGRAMS[name])
    assert sorted(weights) == sorted(expected)
    for each, value in weights.items():
        torch.testing.assert_close(
            value, expected[each], rtol=1e-12, atol=1e-12, msg=lambda text, each=each: each + text
        )
    assert mine == pytest.approx(noted, rel=1e-12)


# spec: M5 programs give what one process gives
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.sampled(36)
def test_programs(name, size):
    on_ranks(size, as_alone, "ours", name)


if "MUSTER_TEST_LONG" in os.environ:

    @pytest.mark.parametrize("name", PROGRAMS)
    @pytest.mark.parametrize("size", [2, 4])
    def test_stock_programs(name, size):
        on_ranks(size, as_alone, "stock", name, gloo=True)

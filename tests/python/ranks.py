# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as forked processes of a test: one import of torch; a rank's failure is the test's."""

import itertools
import multiprocessing
import os
import random
import traceback

import pytest
import torch

# Modules that the first DDP or functional collective of a process imports, here once for all ranks.
import torch._dynamo  # noqa: F401
import torch.distributed._functional_collectives  # noqa: F401
from scratch import LIMIT_S as LIMIT_S
from scratch import meeting_file as meeting_file
from scratch import reserve_port as reserve_port

fork = multiprocessing.get_context("fork")


def _main(body, rank, arguments, results):
    torch.set_num_threads(1)
    try:
        results.put((rank, body(rank, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def run_ranks(count, body, *arguments, killed=()):
    """`body(rank, *arguments)` in `count` processes; what they return, by rank. Those in `killed`
    return nothing.
    """
    results = fork.Queue()
    ranks = [
        fork.Process(target=_main, args=(body, rank, arguments, results)) for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    returned = {}
    try:
        while len(returned) < count - len(killed):
            try:
                rank, value, error = results.get(timeout=LIMIT_S)
            except Exception:
                pytest.fail(
                    f"ranks {sorted(set(range(count)) - set(returned))} did not come to an end in "
                    f"{LIMIT_S} s"
                )
            if error is not None:
                pytest.fail(f"rank {rank} failed:\n{error}", pytrace=False)
            returned[rank] = value
        for rank in ranks:
            rank.join(LIMIT_S)
            assert rank.exitcode is not None, "a rank does not end"
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
    return [returned.get(rank) for rank in range(count)]


def sampled(count, *axes):
    """`count` tuples of the product of `axes`, drawn by MUSTER_TEST_SEED; all of them in long runs.

    Each value of every axis is in at least one tuple if `count` is no less than the longest axis.
    """
    every = list(itertools.product(*axes))
    if os.environ.get("MUSTER_TEST_LONG"):
        return every
    draw = random.Random(int(os.environ.get("MUSTER_TEST_SEED", "0")))
    columns = []
    for axis in axes:
        column = [value for _ in range(-(-count // len(axis))) for value in axis][:count]
        draw.shuffle(column)
        columns.append(column)
    return list(zip(*columns))

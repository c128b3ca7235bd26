# SPDX-License-Identifier: BSD-3-Clause
"""Workers of RPC as forked processes of a test, and what several tests ask them for."""

import sys

import pytest
import torch
from ranks import LIMIT_S, meeting_file, run_ranks

import muster as dist

rpc = dist.rpc


def _worker(rank, where, names, body, arguments, options):
    rpc.init_rpc(
        names[rank],
        rank=rank,
        world_size=len(names),
        rpc_backend_options=rpc.RpcBackendOptions(init_method=where, **options),
    )
    try:
        result = body(rank, *arguments)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    if rpc.is_initialized():
        rpc.shutdown(timeout=LIMIT_S)
    return result


def on_workers(names, body, *arguments, killed=(), **options):
    """`body(rank, *arguments)` between init_rpc and shutdown; names: a list, or how many "worker0",
    "worker1", ...
    """
    names = [f"worker{rank}" for rank in range(names)] if isinstance(names, int) else names
    return run_ranks(
        len(names),
        _worker,
        "file://" + meeting_file(),
        names,
        body,
        arguments,
        options,
        killed=killed,
    )


def scaled(tensor, by=2):
    return tensor * by


def who():
    return rpc.get_worker_info().name


def same(value):
    return value


class Odd(Exception):
    """Its constructor wants two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail(kind):
    if kind == "odd":
        raise Odd("one", "two")
    if kind == "local":
        raise type("Unknown", (Exception,), {})("of nobody's")
    if kind == "system":
        sys.exit(3)
    if kind == "dist":
        raise dist.DistArgumentError("a wrong argument")
    {}["no such key"] if kind == "key" else [][7]


def raised(kind, call, *arguments):
    with pytest.raises(kind) as caught:
        call(*arguments)
    return caught.value


class Server:
    def __init__(self, start=0):
        self.value = torch.tensor(float(start))

    def add(self, by, times=1):
        self.value = self.value + by * times
        return self.value

    @rpc.functions.async_execution
    def add_at(self, to, by):
        return rpc.rpc_async(to, scaled, (by,)).then(lambda done: self.add(done.wait()))

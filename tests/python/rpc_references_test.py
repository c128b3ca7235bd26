# SPDX-License-Identifier: BSD-3-Clause
"""`muster.rpc`: functions that answer later, and references to objects of other workers."""

import gc
import pickle
import threading
import weakref

import torch
from ranks import LIMIT_S
from rpc_workers import Server, fail, on_workers, raised, scaled

import muster as dist

rpc = dist.rpc


# ---- futures over there
# ----------------------------------------------------------------------------------------------


class Gathering:
    """Answers nobody before all have come."""

    lock, sum, came, future = threading.Lock(), 0, 0, torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def add(value, of):
        with Gathering.lock:
            Gathering.sum, Gathering.came, answer = (
                Gathering.sum + value,
                Gathering.came + 1,
                Gathering.future,
            )
            complete = Gathering.came == of
        if complete:
            answer.set_result(Gathering.sum)
        return answer


@rpc.functions.async_execution
def ask_next(to, x):
    return rpc.rpc_async(to, scaled, (x,)).then(lambda done: done.wait() + 1)


@rpc.functions.async_execution
def fail_later(to):
    return rpc.rpc_async(to, fail, ("key",)).then(lambda done: done.wait())


@rpc.functions.async_execution
def no_future():
    return 3


# spec: N8 async_execution in Python
def test_async_execution():
    def body(rank):
        if rank != 0:
            return
        # One thread over there, and three calls that wait for each other.
        assert [
            each.wait() for each in [rpc.rpc_async(1, Gathering.add, (i, 3)) for i in (1, 2, 3)]
        ] == [6, 6, 6]
        assert rpc.rpc_sync(1, ask_next, (0, torch.tensor(3))) == 7
        assert rpc.remote(1, ask_next, (0, torch.tensor(3))).to_here() == 7
        assert "no such key" in str(
            raised(RuntimeError, rpc.rpc_sync, 1, fail_later, (0,))
        )  # what `then` makes of it
        assert "torch.futures.Future, not int" in str(raised(TypeError, rpc.rpc_sync, 1, no_future))
        server = rpc.remote(1, Server, (1,))
        assert server.rpc_sync().add_at(0, torch.tensor(2.0)) == 5
        assert server.rpc_async().add_at(0, torch.tensor(2.0)).wait() == 9
        assert server.remote().add_at(0, torch.tensor(2.0)).to_here() == 13

    on_workers(2, body, num_worker_threads=1)


# ---- references

kept = {}


class Watched:
    """A value of whose end its worker knows."""

    def __init__(self, name):
        self.gone = threading.Event()
        weakref.finalize(self, self.gone.set)
        kept[name] = self.gone

    def __reduce__(self):
        raise TypeError("this one stays where it is")


def ended(name, within):
    return kept[name].wait(within)


def read(rref):
    return rref.to_here()


def read_locally(rref):
    return rref.local_value() is rref.to_here(), rref.is_owner(), rref.confirmed_by_owner()


def hold(name, rref):
    kept[name] = rref


def drop(name):
    del kept[name]


def refuse():
    raise ValueError("no value today")


# spec: N7 RRef in Python, N11 RRef's members in Python
def test_references():
    def body(rank):
        if rank != 0:
            return
        mine = rpc.RRef([1, torch.ones(2)])
        assert (
            mine.is_owner()
            and mine.owner() == rpc.get_worker_info()
            and mine.owner_name() == "worker0"
            and mine.confirmed_by_owner()
        )
        assert mine.local_value() is mine.to_here() and mine.local_value()[0] == 1
        assert rpc.rpc_sync(1, read, (mine,))[1].sum() == 2
        weight = torch.nn.Parameter(torch.ones(3))
        assert rpc.RRef(weight).local_value() is weight

        theirs = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
        assert not theirs.is_owner() and theirs.owner().id == 1 and theirs.owner_name() == "worker1"
        assert torch.equal(theirs.to_here(), torch.full((2,), 4.0)) and theirs.confirmed_by_owner()
        assert "worker1" in repr(theirs) and "owner" in str(
            raised(dist.DistError, theirs.local_value)
        )
        assert rpc.rpc_sync(1, read_locally, (theirs,)) == (True, True, True)
        assert torch.equal(rpc.rpc_sync(2, read, (theirs,)), torch.full((2,), 4.0))
        assert torch.equal(
            rpc.remote(1, "aten::add", (torch.ones(1), 1)).to_here(), torch.full((1,), 2.0)
        )
        local = rpc.remote("worker0", scaled, (torch.ones(1),))
        assert local.is_owner() and local.to_here() == 2

        server = rpc.remote(1, Server, kwargs={"start": 2})
        assert server.rpc_sync().add(3.0, times=2) == 8 and server.rpc_async().add(1.0).wait() == 9
        assert server.remote().add(1.0).to_here() == 10
        assert "no attribute" in str(
            raised(AttributeError, server.rpc_sync(timeout=LIMIT_S).nothing)
        )
        late = rpc.remote(1, refuse)
        error = raised(ValueError, late.to_here)
        assert "no value today" in str(error) and error.worker == "worker1"
        assert "no value today" in str(raised(ValueError, rpc.remote(0, refuse).local_value))
        for bad in (mine, theirs):
            assert "only as a part of a call" in str(raised(dist.DistError, pickle.dumps, bad))
        info = rpc.get_worker_info("worker1")
        assert pickle.loads(pickle.dumps(info)) == info

        # It lives as long as any worker has a reference, and no longer.
        watched = rpc.remote(1, Watched, ("first",))
        rpc.rpc_sync(2, hold, ("first", watched))
        assert "stays where it is" in str(raised(TypeError, watched.to_here))
        del watched
        gc.collect()  # the error's frames know it
        assert not rpc.rpc_sync(1, ended, ("first", 0.2))
        rpc.rpc_sync(2, drop, ("first",))
        assert rpc.rpc_sync(1, ended, ("first", LIMIT_S))

        root = rpc.remote(1, _root)
        root.backward()
        assert rpc.rpc_sync(1, _root_gradient) == 3

    on_workers(3, body)


def _root():
    kept["leaf"] = torch.tensor(2.0, requires_grad=True)
    return kept["leaf"] * 3


def _root_gradient():
    return kept["leaf"].grad

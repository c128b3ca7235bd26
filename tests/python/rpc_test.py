# SPDX-License-Identifier: BSD-3-Clause
"""`muster.rpc`: torch.distributed.rpc's calls, their errors, and workers that are slow or dead.
Workers are processes.
"""

import os
import pickle
import signal
import sys
import threading
import warnings

import torch
from ranks import LIMIT_S, fork
from rpc_workers import Odd, fail, on_workers, raised, same, scaled, who

import muster as dist

rpc = dist.rpc


def parts_of(structure):
    return (
        structure["list"][0] is structure["again"],
        [type(each).__name__ for each in structure["list"]],
        structure,
    )


def erase(tensor):
    tensor.zero_()


def relay(to, kind):
    return rpc.rpc_sync(to, fail, (kind,))


def unpicklable():
    return lambda: None


def grown(x, times: int):
    for _ in range(times):
        x = x + x
    return x


held = fork.Lock()


def held_one():
    with held:
        return 1


# spec: N2 rpc_sync and rpc_async by name, rank and WorkerInfo in Python, N10 callables, operators
# and TorchScript functions; N3 shape, stride and dtype in Python, N12 a change after rpc_async
# never shows in Python
def test_calls():
    def body(rank):
        if rank != 0:
            return
        x = torch.arange(6.0).view(2, 3)
        for to in ("worker1", 1, rpc.get_worker_info("worker1"), "worker0"):
            assert torch.equal(rpc.rpc_sync(to, scaled, args=(x,), kwargs={"by": 3}), x * 3)
            assert torch.equal(rpc.rpc_async(to, scaled, (x,)).wait(), x * 2)
        assert rpc.rpc_sync(1, who) == "worker1" and rpc.rpc_sync(0, who) == "worker0"
        assert torch.equal(
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)), torch.full((2,), 4.0)
        )
        assert torch.equal(
            rpc.rpc_sync("worker1", "aten::add", args=(torch.ones(2), 3)), torch.full((2,), 4.0)
        )
        assert rpc.rpc_sync("worker1", "aten::cat", ([x, x],)).shape == (4, 3)
        assert torch.equal(rpc.rpc_sync(1, torch.ops.aten.mul.Tensor, (x, x)), x * x)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # torch would have us use another compiler
            assert torch.equal(rpc.rpc_sync(1, torch.jit.script(grown), (x, 3)), x * 8)
        assert torch.equal(rpc.rpc_sync(1, torch.Tensor.view, (x, 3, 2)), x.view(3, 2))

        # Tensors anywhere, out of the pickle; what is one object stays one.
        given = {
            "list": [x, torch.nn.Parameter(x.clone()), 3, "text", None],
            "again": x,
            "sparse": x.to_sparse(),
            "empty": x[:0],
        }
        one, kinds, back = rpc.rpc_sync(1, parts_of, (given,))
        assert (
            one
            and kinds == ["Tensor", "Parameter", "int", "str", "NoneType"]
            and back["again"] is back["list"][0]
        )
        assert torch.equal(back["sparse"].to_dense(), x) and back["empty"].shape == (0, 3)
        assert isinstance(back["list"][1], torch.nn.Parameter)
        for tensor in (
            x.t(),
            x[:, ::2],
            x.to(torch.bfloat16),
            x.to(torch.complex64).conj(),
            torch.tensor(3),
            torch.rand(3000, 40).t(),
        ):
            came = rpc.rpc_sync(1, same, (tensor,))
            assert (
                came.dtype == tensor.dtype
                and came.shape == tensor.shape
                and torch.equal(came, tensor)
            )
        assert rpc.rpc_sync(1, same, (x.t(),)).stride() == x.t().stride()

        rpc.rpc_sync(1, erase, (x,))
        rpc.rpc_sync("worker0", erase, (x,))
        assert x.sum() == 15
        big = torch.ones(1 << 20)
        later = rpc.rpc_async(1, torch.sum, (big,))
        big.zero_()
        assert later.wait() == 1 << 20
        chained = [
            rpc.rpc_async(1, scaled, (torch.tensor(i),)).then(lambda done: done.wait() + 1)
            for i in range(20)
        ]
        assert [each.wait().item() for each in chained] == [2 * i + 1 for i in range(20)]
        many = torch.futures.wait_all(
            [rpc.rpc_async(1, scaled, (torch.tensor(i),)) for i in range(5)]
        )
        assert [each.item() for each in many] == [0, 2, 4, 6, 8]

    on_workers(2, body)


# spec: N2 the callee's exception comes back with its text and worker name in Python
def test_errors():
    def body(rank):
        if rank != 0:
            return
        error = raised(KeyError, rpc.rpc_sync, "worker1", fail, ("key",))
        assert (
            type(error) is KeyError
            and "on worker 'worker1' (rank 1), in 'fail'" in error.args[0]
            and "no such key" in error.args[0]
        )
        assert (error.worker, error.worker_id, error.remote_type, error.remote_text) == (
            "worker1",
            1,
            "builtins.KeyError",
            "'no such key'",
        )
        assert (
            'rpc_workers.py", line' in error.remote_traceback
            and "in fail" in error.remote_traceback
        )
        assert "inside.py" not in error.remote_traceback
        if sys.version_info >= (3, 11):
            assert any("in fail" in note for note in error.__notes__)
        assert "on worker 'worker1'" in str(
            raised(IndexError, rpc.rpc_async("worker1", fail, ("index",)).wait)
        )
        odd = raised(Odd, rpc.rpc_sync, 1, fail, ("odd",))
        assert "one and two" in str(odd) and "worker1" in str(odd)
        unknown = raised(dist.DistBackendError, rpc.rpc_sync, 1, fail, ("local",))
        assert (
            "of nobody's" in str(unknown)
            and unknown.remote_type.endswith("Unknown")
            and unknown.ranks == [1]
        )
        assert "SystemExit" in str(
            raised(dist.DistBackendError, rpc.rpc_sync, 1, fail, ("system",))
        )
        wrong = raised(dist.DistArgumentError, rpc.rpc_sync, 1, fail, ("dist",))
        assert (
            wrong.code == "invalid argument"
            and "a wrong argument" in str(wrong)
            and "in fail" in wrong.remote_traceback
        )
        twice = raised(KeyError, rpc.rpc_sync, 1, relay, ("worker2", "key"))
        assert "worker1" in twice.args[0] and "worker2" in twice.args[0]
        assert "must match" in str(
            raised(RuntimeError, rpc.rpc_sync, 1, torch.add, (torch.ones(2), torch.ones(3)))
        )
        assert "no overload" in str(
            raised(dist.DistArgumentError, rpc.rpc_sync, 1, "aten::add", ("text", 1))
        )
        assert "no function 'nothing'" in str(
            raised(dist.DistArgumentError, rpc.rpc_sync, 1, "nothing")
        )
        raised((pickle.PicklingError, AttributeError), rpc.rpc_sync, 1, lambda: None)
        assert "lambda" in str(
            raised((pickle.PicklingError, AttributeError), rpc.rpc_sync, 1, unpicklable)
        )
        assert "no worker 'nobody'" in str(
            raised(dist.DistArgumentError, rpc.rpc_sync, "nobody", who)
        )
        assert "not 3" in str(raised(dist.DistArgumentError, rpc.rpc_sync, 1, 3))
        assert "negative" in str(raised(dist.DistArgumentError, rpc.rpc_sync, 1, who, (), {}, -2))
        assert "no keyword" in str(
            raised(dist.DistArgumentError, rpc.rpc_sync, 1, "aten::add", (), {"other": 1})
        )

        def only_here():
            pass

        only_here.__qualname__ = "only_here"
        globals()["only_here"] = only_here
        assert "importable on both workers" in str(
            raised(AttributeError, rpc.rpc_sync, 1, only_here)
        )

    on_workers(3, body)


def test_before_and_after():
    for call in (
        lambda: rpc.rpc_sync(1, who),
        lambda: rpc.remote(1, who),
        lambda: rpc.RRef(1),
        rpc.shutdown,
        rpc.get_worker_info,
        lambda: dist.autograd.context().__enter__(),
    ):
        assert "init_rpc" in str(raised(dist.DistArgumentError, call))

    def body(rank):
        assert rpc.is_initialized() and not dist.is_initialized()
        again = raised(dist.DistArgumentError, rpc.init_rpc, "again", None, 0, 1)
        assert "called twice" in str(again)

    on_workers(1, body)


# ---- slow, dead and interrupted
# --------------------------------------------------------------------------------------

begun = released = None


def new_events():
    """Those that a test waits for: one that a killed process waited for is of no use any more."""
    global begun, released
    begun, released = fork.Event(), fork.Event()


def stay():
    begun.set()
    assert released.wait(LIMIT_S)


# spec: N2 timeouts in Python, thread-safe in Python
def test_timeouts_and_threads():
    new_events()

    def body(rank):
        if rank != 0:
            return
        assert rpc.get_rpc_timeout() == LIMIT_S
        error = raised(dist.DistBackendError, rpc.rpc_sync, 1, stay, (), None, 0.2)
        assert (
            error.code == "timed out"
            and "'stay' on worker 'worker1'" in str(error)
            and error.ranks == [1]
        )
        assert "timeout" in str(
            raised(dist.DistBackendError, rpc.rpc_async(1, stay, timeout=0.2).wait)
        )
        rpc.set_rpc_timeout(0)
        waits = rpc.rpc_async(1, stay)
        assert not waits.done()
        found = []

        def call(number):
            found.append(
                sum(rpc.rpc_sync(1, scaled, (torch.tensor(number),)).item() for _ in range(50))
            )

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(found) == [0, 100, 200, 300]
        released.set()
        assert waits.wait() is None

    on_workers(2, body, rpc_timeout=LIMIT_S)


def wait_nested(depth):
    def deeper(done):
        return done.wait() + (wait_nested(depth - 1).wait() if depth > 1 else 0)

    with held:  # the answer comes after the callback was given
        future = rpc.rpc_async(1, held_one).then(deeper)
    return future


# spec: N2 callbacks of futures may wait for each other deeper than a worker has threads, in Python
def test_callbacks_wait_deeper_than_the_pool():
    def body(rank):
        if rank == 0:
            assert wait_nested(6).wait() == 6

    on_workers(2, body, num_worker_threads=2)


def keeps_callbacks_apart(rank):
    if rank != 0:
        return
    goes_on = threading.Event()
    with held:
        future = rpc.rpc_async(1, held_one)
        called = future.then(lambda done: goes_on.wait(60))
    assert future.wait() == 1
    goes_on.set()
    assert called.wait()


# spec: N2 a thread that waits for a future waits for its value and not for its callbacks
def test_callbacks_keep_no_waiter():
    on_workers(2, keeps_callbacks_apart)


# spec: N6 a failed peer closes only its own in Python
def test_killed_worker_is_named():
    new_events()

    def body(rank):
        if rank == 2:
            released.wait(LIMIT_S)
            return None
        if rank == 0:
            pid = rpc.rpc_sync("worker2", os.getpid)
            doomed = rpc.rpc_async("worker2", stay)
            assert begun.wait(LIMIT_S)
            os.kill(pid, signal.SIGKILL)
            error = raised(dist.DistBackendError, doomed.wait)
            assert error.ranks == [2] and "worker 'worker2' (rank 2)" in str(error)
            raised(dist.DistBackendError, rpc.rpc_sync, 2, who)
        return rpc.rpc_sync(1 - rank, who)

    assert on_workers(3, body, killed=(2,)) == ["worker1", "worker0", None]


def test_interrupt_ends_a_call():
    new_events()

    def body(rank):
        if rank != 0:
            return
        for wait in (
            lambda: rpc.rpc_sync(1, stay),
            lambda: rpc.rpc_async(1, stay).wait(),
            lambda: rpc.remote(1, stay).to_here(),
        ):
            begun.clear()
            thread = threading.Thread(
                target=lambda: begun.wait(LIMIT_S) and os.kill(os.getpid(), signal.SIGINT)
            )
            thread.start()
            raised(KeyboardInterrupt, wait)
            thread.join()
        assert rpc.rpc_sync(1, who) == "worker1"
        released.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
    try:
        on_workers(2, body)
    finally:
        signal.signal(signal.SIGINT, before)


# spec: N4 it names the worker it waits for in Python
def test_shutdown_names_whom_it_waits_for():
    new_events()

    def body(rank):
        if rank == 0:
            error = raised(dist.DistBackendError, rpc.shutdown, True, 0.5)
            assert error.code == "timed out" and "worker1" in str(error) and error.ranks == [1]
            begun.set()
        else:
            assert begun.wait(LIMIT_S)
            rpc.shutdown(graceful=False)

    on_workers(2, body)

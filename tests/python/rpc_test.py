# SPDX-License-Identifier: BSD-3-Clause
"""`muster.rpc`: torch.distributed.rpc's names and behaviour. Workers are processes."""

import gc
import inspect
import os
import pickle
import signal
import socket
import sys
import threading
import warnings
import weakref

import pytest
import torch
from ranks import LIMIT_S, fork, meeting_file, reserve_port, run_ranks
from rpc_workers import on_workers

import muster as dist

rpc = dist.rpc


# ---- what workers ask each other for
# ---------------------------------------------------------------------------------


def scaled(tensor, by=2):
    return tensor * by


def who():
    return rpc.get_worker_info().name


def same(value):
    return value


def parts_of(structure):
    return (
        structure["list"][0] is structure["again"],
        [type(each).__name__ for each in structure["list"]],
        structure,
    )


def erase(tensor):
    tensor.zero_()


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


def raised(kind, call, *arguments):
    with pytest.raises(kind) as caught:
        call(*arguments)
    return caught.value


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
            'rpc_test.py", line' in error.remote_traceback and "in fail" in error.remote_traceback
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


class Server:
    def __init__(self, start=0):
        self.value = torch.tensor(float(start))

    def add(self, by, times=1):
        self.value = self.value + by * times
        return self.value

    @rpc.functions.async_execution
    def add_at(self, to, by):
        return rpc.rpc_async(to, scaled, (by,)).then(lambda done: self.add(done.wait()))


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


# ---- options


# spec: N5 options, set_device_map cumulative, set_devices in Python, N13 names, keyword-only, keys
# of maps
def test_options():
    assert rpc.TensorPipeRpcBackendOptions is rpc.RpcBackendOptions
    options = rpc.RpcBackendOptions()
    assert (options.num_worker_threads, options.rpc_timeout, options.init_method) == (
        16,
        60,
        "env://",
    )
    assert options.device_maps == {} and options.devices == []
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=LIMIT_S, device_maps={"worker1": {0: 1}}
    )
    options.set_device_map("worker1", {"cuda:1": torch.device("cuda", 2)})
    cuda = [torch.device("cuda", i) for i in range(3)]
    assert options.device_maps == {"worker1": {cuda[0]: cuda[1], cuda[1]: cuda[2]}}
    raised(dist.DistArgumentError, options.set_device_map, "worker1", {2: 1})
    options.set_devices([0, "cuda:1"])
    assert options.devices == cuda[:2]
    raised(dist.DistArgumentError, options.set_devices, ["cpu"])
    raised(TypeError, rpc.RpcBackendOptions, 8)
    options.rpc_timeout = 1.5
    assert options.rpc_timeout == 1.5
    assert (
        rpc.BackendType("tensorpipe") == rpc.BackendType.TENSORPIPE
        and rpc.BackendType.NATIVE.name == "NATIVE"
    )
    assert "NATIVE" in str(raised(dist.DistArgumentError, rpc.BackendType, "none"))
    raised(
        dist.DistArgumentError,
        rpc.init_rpc,
        "a",
        None,
        0,
        1,
        rpc.RpcBackendOptions(num_worker_threads=0),
    )


# spec: N10 signatures as torch's, N1 arguments of init_rpc in Python
def test_signatures():
    import torch.distributed.rpc as theirs
    from torch.distributed.optim import DistributedOptimizer

    def arguments(function):
        return [
            (each.name, each.default)
            for each in inspect.signature(function).parameters.values()
            if each.kind is not each.KEYWORD_ONLY
        ]

    for name in ("init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info"):
        mine = arguments(getattr(rpc, name))
        assert mine == arguments(getattr(theirs, name)), name
        assert len(getattr(rpc, name).__doc__.split()) > 5
    assert arguments(dist.optim.DistributedOptimizer.__init__) == arguments(
        DistributedOptimizer.__init__
    )
    for name in (
        "to_here",
        "local_value",
        "is_owner",
        "owner",
        "owner_name",
        "confirmed_by_owner",
        "backward",
        "rpc_sync",
        "rpc_async",
        "remote",
    ):
        assert hasattr(rpc.RRef, name)


# spec: N1 unique names in Python
def test_names_are_unique():
    where = "file://" + meeting_file()

    def body(rank):
        error = raised(
            dist.DistArgumentError,
            rpc.init_rpc,
            "twin",
            None,
            rank,
            2,
            rpc.RpcBackendOptions(init_method=where),
        )
        assert "ranks 0 and 1 both call themselves 'twin'" in str(error)

    run_ranks(2, body)


def test_workers_as_threads():
    where = "file://" + meeting_file()

    def body(rank):
        rpc.init_rpc(
            f"thread{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=where),
        )
        assert rpc.rpc_sync(1 - rank, who) == f"thread{1 - rank}"
        assert rpc.remote(1 - rank, Server, (rank,)).rpc_sync().add(1.0) == rank + 1
        rpc.shutdown()

    dist.spawn(body, nprocs=2, threads=True)


# ---- processes without the secret


class Mark:
    """Its pickle leaves a folder where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def listening_ports():
    """Those of this process."""
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    mine = {os.readlink(each) for each in links if os.path.islink(each)}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in open(f"/proc/net/{table}").readlines()[1:]
    ]
    return sorted(
        {
            int(line[1].rpartition(":")[2], 16)
            for line in lines
            if line[3] == "0A" and f"socket:[{line[9]}]" in mine
        }
    )


# spec: N2 a wrong secret is refused before any pickle is read
def test_outsiders_are_refused_before_anything_is_unpickled(tmp_path, monkeypatch):
    mark, address = str(tmp_path / "mark"), f"tcp://127.0.0.1:{reserve_port()}"
    monkeypatch.setenv("MUSTER_SECRET", "the secret of this job")
    ready, tried = fork.Event(), fork.Event()
    ports = fork.Array("i", 16)

    def worker(rank):
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=address, shared_memory=False),
        )
        assert rpc.rpc_sync(1 - rank, who) == f"worker{1 - rank}"
        if rank == 0:
            found = listening_ports()
            ports[: len(found)] = found
            ready.set()
        assert tried.wait(LIMIT_S)
        assert rpc.rpc_sync(1 - rank, who) == f"worker{1 - rank}"
        if rank == 1:  # from one of the job it is read: the pickle is a good one
            assert not os.path.exists(mark)
            rpc.rpc_sync(0, same, (Mark(mark),))
            assert os.path.isdir(mark)
        rpc.shutdown(timeout=LIMIT_S)

    def outsider():
        assert ready.wait(LIMIT_S)
        os.environ["MUSTER_SECRET"] = "some other job's words"
        error = raised(
            dist.DistError,
            rpc.init_rpc,
            "worker1",
            None,
            1,
            2,
            rpc.RpcBackendOptions(init_method=address),
        )
        assert "secret" in str(error)
        data = pickle.dumps((same, (Mark(mark),), {}), protocol=5)
        doors = [each for each in ports if each]
        assert doors
        for door in doors:
            # As it is, and as a message of so many bytes.
            for start in (b"", len(data).to_bytes(4, "little"), len(data).to_bytes(8, "little")):
                with socket.create_connection(("127.0.0.1", door), timeout=LIMIT_S) as connection:
                    try:
                        connection.sendall(start + data)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):
                            pass
                    except OSError:  # it has hung up
                        pass
        tried.set()

    def body(rank):
        worker(rank) if rank < 2 else outsider()

    run_ranks(3, body)

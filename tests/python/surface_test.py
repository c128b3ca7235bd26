# SPDX-License-Identifier: BSD-3-Clause
"""Clauses of the acceptance list's letters A to H that the other files leave out, from Python."""

import datetime
import inspect
import os
import re
import socket
import threading

import pytest
import torch
from ranks import meeting_file, reserve_port, run_ranks
from thread_ranks import SECONDS, on_processes, on_threads

import muster as dist


def summed(rank):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


# ---- backends


# spec: A1 the names of the native engine in Python, A7 the tensor's device picks the backend
@pytest.mark.parametrize(
    "name, shown",
    [
        (None, "cpu:native"),
        ("native", "native"),
        ("Gloo", "gloo"),
        ("tcp", "tcp"),
        ("cpu:native", "cpu:native"),
    ],
)
def test_names_of_the_engine(name, shown):
    def body(rank, size):
        assert dist.get_backend() == shown
        assert summed(rank) == 1
        if name == "cpu:native":
            with pytest.raises(dist.DistBackendError, match="(?s)cpu:native.*meta"):
                dist.send(torch.empty(2, device="meta"), 1 - rank)

    on_threads(2, body, backend=name)


class Receiver(dist.ProcessGroupBackend):
    """A backend that moves nothing."""

    def supports(self, op, dtype, device):
        return "it only listens"


# spec: A6 the backend and the operation are named in Python
def test_a_backend_says_what_it_lacks():
    dist.Backend.register_backend("receiver", lambda *_: Receiver(), devices="cpu")

    def body(rank, size):
        with pytest.raises(
            dist.DistBackendError, match="(?s)'receiver' cannot do all_reduce.*only listens"
        ) as caught:
            dist.all_reduce(torch.ones(2))
        assert caught.value.code == "unsupported"

    on_threads(1, body, backend="receiver")


class Late(dist.ProcessGroupBackend):
    """Does every call when it is waited for."""

    def supports(self, op, dtype, device):
        return True

    def submit(self, request):
        class Pending:
            def wait(self):
                for tensors in request.outputs:
                    tensors[0].fill_(9)

        return Pending()


# spec: A11 a synchronous receive by a backend in Python has its data on return
def test_a_receive_waits_for_a_backend_of_python():
    dist.Backend.register_backend("late", lambda *_: Late(), devices="cpu")

    def body(rank, size):
        if rank == 1:
            x = torch.zeros(2)
            assert dist.recv(x, 0) == 0
            assert x.tolist() == [9, 9]

    on_threads(2, body, backend="late")


class Raising(torch.Tensor):
    """Cannot be read."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        raise KeyError("of the user's own")


# spec: F18 a call whose tensors cannot be read is refused: the others learn it at once, and the
# user gets the exception of the tensor's class
def test_a_tensor_that_raises_is_told_to_the_others():
    def body(rank, size):
        if rank == 1:
            with pytest.raises(KeyError, match="of the user's own"):
                dist.all_reduce(Raising())
        with pytest.raises(dist.DistBackendError, match="refused there"):
            dist.all_reduce(torch.ones(2))

    on_threads(2, body)


# spec: A10.lengths lists of interfaces of different lengths in Python
def test_lists_of_interfaces_must_agree():
    name = meeting_file()

    def body(rank):
        os.environ["MUSTER_SOCKET_IFNAME"] = "lo,lo" if rank == 0 else "lo"
        with pytest.raises(dist.DistError, match="MUSTER_SOCKET_IFNAME|network interfaces"):
            dist.init_process_group(
                init_method="file://" + name, rank=rank, world_size=2, timeout=SECONDS
            )

    run_ranks(2, body)


CELLS = {
    "send": lambda x, rank: dist.send(x, 1) if rank == 0 else None,
    "broadcast": lambda x, rank: dist.broadcast(x, 0),
    "all_reduce": lambda x, rank: dist.all_reduce(x),
    "reduce": lambda x, rank: dist.reduce(x, 0),
    "all_gather": lambda x, rank: dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x),
    "gather": lambda x, rank: dist.gather(
        x, [torch.empty_like(x), torch.empty_like(x)] if rank == 0 else None
    ),
    "scatter": lambda x, rank: dist.scatter(x, [x.clone(), x.clone()] if rank == 0 else None),
    "reduce_scatter": lambda x, rank: dist.reduce_scatter(x, [x.clone(), x.clone()]),
    "all_to_all": lambda x, rank: dist.all_to_all(
        [torch.empty_like(x), torch.empty_like(x)], [x.clone(), x.clone()]
    ),
    "barrier": lambda x, rank: dist.barrier(),
}


# spec: A12.native the CPU cells of the backend tables in Python: the native engine has every
# operation; nccl is refused without a GPU
def test_cells_of_the_backend_table():
    def body(rank, size):
        for call in CELLS.values():
            call(torch.ones(4), rank)
            if call is CELLS["send"] and rank == 1:
                dist.recv(torch.empty(4), 0)

    on_threads(2, body)
    if not torch.cuda.is_available():
        with pytest.raises(dist.DistError, match="nccl"):
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


# ---- initialisation


# spec: B2 the store and init_method exclude each other in Python; B13 defaults, ranks out of range
def test_arguments_of_init_exclude_each_other():
    with pytest.raises(ValueError, match="(?s)store.*init_method|init_method.*store"):
        dist.init_process_group(init_method="env://", store=dist.HashStore(), rank=0, world_size=1)
    for missing in ({"rank": 0}, {"world_size": 1}):
        with pytest.raises(ValueError, match="rank|world_size"):
            dist.init_process_group(store=dist.HashStore(), **missing)
    for rank in (-2, 2):
        with pytest.raises(ValueError, match="rank"):
            dist.init_process_group(store=dist.HashStore(), rank=rank, world_size=2)
    text = str(inspect.signature(dist.init_process_group))
    for default in (
        "backend: str | None = None",
        "init_method: str | None = None",
        "timeout: datetime.timedelta | None = None",
        "= -1",
        "store: .*= None",
        "group_name: str = ''",
        "pg_options: object = None",
    ):
        assert re.search(default, text), (default, text)


# spec: B3 rank and world_size in the URL in Python, B5 tcp:// in Python
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_tcp(host):
    port = reserve_port()
    assert on_processes(
        2, summed, lambda rank: f"tcp://{host}:{port}?rank={rank}&world_size=2"
    ) == [1, 1]


# spec: B6 ranks assigned by the file in Python, B7.removed the file is removed by the last rank, B8
# group_name keeps jobs apart, B14 in Python
def test_file():
    name = meeting_file()
    ranks = on_processes(2, lambda rank: rank, lambda rank: "file://" + name, world_size=2)
    assert sorted(ranks) == [0, 1] and not os.path.exists(name)

    def body(which):
        job, rank = divmod(which, 2)
        dist.init_process_group(
            init_method="file://" + name,
            world_size=2,
            rank=rank,
            group_name=f"job{job}",
            timeout=SECONDS,
        )
        x = torch.tensor([float(10**job)])
        dist.all_reduce(x)
        dist.destroy_process_group()
        return x.item()

    assert run_ranks(4, body) == [2, 2, 20, 20]


# spec: B4.timeout B14 the timeout of a group in Python: 30 minutes, or what init was given
def test_timeouts():
    def body(rank, size):
        if rank == 0:
            with pytest.raises(dist.DistError, match="from rank 1") as caught:
                dist.recv(torch.empty(2), src=1)
            assert caught.value.code == "timed out"

    # In which the ranks must meet, too.
    on_threads(2, body, timeout=datetime.timedelta(seconds=5))
    assert dist.default_pg_timeout == datetime.timedelta(minutes=30)


# spec: B9 env:// in Python: what is missing or malformed is named
def test_environment(monkeypatch):
    port = str(reserve_port())
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "RANK": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name, wrong in [
        ("MASTER_PORT", None),
        ("WORLD_SIZE", None),
        ("RANK", None),
        ("MASTER_PORT", "seven"),
        ("RANK", "1x"),
    ]:
        with monkeypatch.context() as changed:
            changed.delenv(name) if wrong is None else changed.setenv(name, wrong)
            with pytest.raises(dist.DistError, match=name):
                dist.init_process_group()
    monkeypatch.delenv("MASTER_ADDR")  # rank 0's own
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    dist.init_process_group(rank=0, world_size=1)
    assert summed(0) == 0
    dist.destroy_process_group()


# ---- stores


# spec: C1 C4 C6 C11 C12 C14 stores in Python
def test_every_store_has_everything(tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, None, True)
    stores = {
        "tcp": server,
        "hash": dist.HashStore(),
        "file": dist.FileStore(str(tmp_path / "store")),
        "prefix": dist.PrefixStore("outer", dist.PrefixStore("inner", dist.HashStore())),
    }
    for kind, store in stores.items():
        assert isinstance(store, dist.Store)
        assert not store.check(["a"])
        store.set("a", "1")
        assert store.num_keys() == (2 if kind == "tcp" else 1), kind
        store.append("a", "2")
        store.multi_set(["b", "c"], ["x", "y"])
        assert store.check(["a", "b"]) and store.multi_get(["a", "b", "c"]) == [b"12", b"x", b"y"]
        store.queue_push("q", "first")
        store.queue_push("q", "second")
        assert (
            store.queue_len("q") == 2
            and store.queue_pop("q") == b"first"
            and store.queue_pop("q", block=False) == b"second"
        )
        assert {"a", "b", "c"} <= set(store.list_keys())
        copy = store.clone()
        copy.set("d", "from the copy")
        assert store.get("d") == b"from the copy"
        if kind == "file":
            with pytest.raises(dist.DistStoreError):
                store.delete_key("a")
        else:
            assert store.delete_key("a") and not store.delete_key("a") and not store.check(["a"])
        gathered = {}

        def member(index, mine):
            mine.barrier("here", 2, SECONDS)
            gathered[index] = mine.all_gather("all", index, 2, f"value {index}", SECONDS)

        others = [threading.Thread(target=member, args=(i, store.clone())) for i in range(2)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        assert gathered == {i: [b"value 0", b"value 1"] for i in range(2)}, kind
    nested = stores["prefix"]
    assert nested.underlying_store.underlying_store.get("inner/outer/b") == b"x"


# spec: C3 multi_tenant and master_listen_fd in Python
def test_servers_of_tcp_stores():
    port = reserve_port()
    first = dist.TCPStore("127.0.0.1", port, None, True, multi_tenant=True)
    second = dist.TCPStore("127.0.0.1", port, None, True, multi_tenant=True)
    first.set("key", "shared")
    assert second.get("key") == b"shared"
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    store = dist.TCPStore(
        "127.0.0.1", listener.getsockname()[1], None, True, master_listen_fd=listener.detach()
    )
    store.set("key", "bound before")
    assert dist.TCPStore("127.0.0.1", store.port).get("key") == b"bound before"

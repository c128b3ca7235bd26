"""`import muster as dist`: torch.distributed's names, signatures and behaviour. Ranks are threads where nothing dies."""

import datetime
import inspect
import operator
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch

import muster as dist
from ranks import fork, meeting_file, run_ranks


def on_threads(size, body, *arguments, backend=None):
    """Runs body(rank, size, ...) on ranks that are threads, between init and destroy."""
    store = dist.HashStore()

    def rank_body(rank):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
        body(rank, size, *arguments)
        dist.destroy_process_group()

    dist.spawn(rank_body, nprocs=size, threads=True)


def same(actual, expected):
    assert torch.equal(actual, expected), f"{actual}\nis not\n{expected}"


def row(rank, dtype=torch.int64):
    return (torch.arange(4) + 10 * rank).to(dtype)


DTYPES = [torch.int64, torch.float32, torch.complex64, torch.bfloat16]


# spec: F2 F3 F4 F5 F6 F7 F8 in Python, F15 of several dtypes in Python
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size, dtype):
    def body(rank, size):
        last, whole = size - 1, sum(row(r, dtype) for r in range(size))
        x = row(rank, dtype)
        assert dist.all_reduce(x) is None
        same(x, whole)
        x = row(rank, dtype)
        work = dist.all_reduce(x, op=dist.ReduceOp.SUM, async_op=True)
        assert isinstance(work, dist.Work) and work.wait() and work.is_completed()
        same(x, whole)
        x = row(rank, dtype)
        dist.broadcast(x, last)
        same(x, row(last, dtype))
        x = row(rank, dtype)
        dist.reduce(x, dst=last)
        same(x, whole if rank == last else row(rank, dtype))
        out = [torch.empty(4, dtype=dtype) for _ in range(size)]
        dist.all_gather(out, row(rank, dtype))
        for r in range(size):
            same(out[r], row(r, dtype))
        stacked = torch.empty(size, 4, dtype=dtype)
        dist.all_gather_into_tensor(stacked, row(rank, dtype))
        same(stacked, torch.stack([row(r, dtype) for r in range(size)]))
        out = [torch.empty(4, dtype=dtype) for _ in range(size)] if rank == 0 else None
        dist.gather(row(rank, dtype), out)
        if rank == 0:
            same(torch.stack(out), stacked)
        x = torch.empty(4, dtype=dtype)
        dist.scatter(x, [row(r, dtype) + 1 for r in range(size)] if rank == 0 else None)
        same(x, row(rank, dtype) + 1)

    on_threads(size, body)


# spec: F9 F10 F11 F12 F13 F17 in Python
@pytest.mark.parametrize("size", [1, 2, 3])
def test_exchanges(size):
    def body(rank, size):
        x = torch.empty(4, dtype=torch.int64)
        dist.reduce_scatter(x, [row(rank) + r for r in range(size)])
        same(x, sum(row(r) for r in range(size)) + size * rank)
        dist.reduce_scatter_tensor(x, torch.cat([row(rank) + r for r in range(size)]))
        same(x, sum(row(r) for r in range(size)) + size * rank)
        out = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(out, torch.arange(size) + 10 * rank)
        same(out, torch.arange(size) * 10 + rank)
        give, take = [rank + d for d in range(size)], [r + rank for r in range(size)]
        out = torch.empty(sum(take))
        dist.all_to_all_single(out, torch.full((sum(give),), float(rank)), take, give)
        same(out, torch.cat([torch.full((r + rank,), float(r)) for r in range(size)]))
        outs = [torch.empty(n) for n in take]
        dist.all_to_all(outs, [torch.full((n,), float(rank)) for n in give])
        for r in range(size):
            same(outs[r], torch.full((r + rank,), float(r)))
        tensors = [row(rank), row(rank) * 2]
        dist.all_reduce_coalesced(tensors)
        same(tensors[1], sum(row(r) for r in range(size)) * 2)
        lists = [[torch.empty(4, dtype=torch.int64) for _ in range(2)] for _ in range(size)]
        dist.all_gather_coalesced(lists, [row(rank), row(rank) * 2])
        for r in range(size):
            same(lists[r][1], row(r) * 2)
        dist.barrier()

    on_threads(size, body)


# spec: F14 ReduceOp in Python, F19 PREMUL_SUM and reduce_op in Python
def test_reductions():
    def body(rank, size):
        for op, expected in [(dist.ReduceOp.MAX, row(1)), (dist.ReduceOp.MIN, row(0)), (dist.ReduceOp.PRODUCT, row(0) * row(1)),
                             (dist.ReduceOp.BAND, row(0) & row(1)), (dist.ReduceOp.BOR, row(0) | row(1)),
                             (dist.ReduceOp.BXOR, row(0) ^ row(1)), (dist.reduce_op.SUM, row(0) + row(1))]:
            x = row(rank)
            dist.all_reduce(x, op)
            same(x, expected)
        x = row(rank, torch.float32)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        same(x, (row(0) + row(1)) / 2)
        x = row(rank, torch.float32)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        same(x, (row(0) + row(1)) * 0.5)

    assert dist.ReduceOp.SUM == dist.reduce_op.SUM != dist.ReduceOp.MAX
    assert not hasattr(dist.ReduceOp, "__members__")
    assert not hasattr(dist.reduce_op, "AVG")
    on_threads(2, body)


# spec: E1 E2 E3 E5 E7 in Python
def test_messages():
    def body(rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        got = torch.empty(4, dtype=torch.int64)
        work = dist.isend(row(rank), after, tag=7)
        assert dist.recv(got, before, tag=7) == before
        work.wait()
        same(got, row(before))
        if rank == 0:
            assert {dist.recv(got, tag=9) for _ in range(size - 1)} == set(range(1, size))
        else:
            dist.send(row(rank), 0, tag=9)
        ops = [dist.P2POp(dist.isend, row(rank), after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(got, row(before))
        future = dist.irecv(got, before).get_future() if rank == 1 else None
        if after == 1:
            dist.send(row(40), 1)
        if future:
            same(future.wait()[0], row(40))
        with pytest.raises(dist.DistError):
            dist.send(row(rank), rank)

    on_threads(3, body)
    with pytest.raises(ValueError, match="isend or irecv"):
        dist.P2POp(dist.send, row(0), 1)


# spec: G1 G2 G3 picklable objects in Python
def test_objects():
    def body(rank, size):
        out = [None] * size
        dist.all_gather_object(out, {"rank": rank, "data": "x" * rank})
        assert out == [{"rank": r, "data": "x" * r} for r in range(size)]
        out = [None] * size if rank == 0 else None
        dist.gather_object((rank, rank * 2), out)
        assert out == ([(r, r * 2) for r in range(size)] if rank == 0 else None)
        out = ["foo", 12, {1: 2}] if rank == 0 else [None, None, None]
        dist.broadcast_object_list(out)
        assert out == ["foo", 12, {1: 2}]
        out = [None]
        dist.scatter_object_list(out, ["foo", 12, {1: 2}] if rank == 0 else None, src=0)
        assert out == [["foo", 12, {1: 2}][rank]]
        if rank == 0:
            dist.send_object_list(["a", torch.ones(2)], 1)
        if rank == 1:
            out = [None, None]
            assert dist.recv_object_list(out) == 0
            assert out[0] == "a"
            same(out[1], torch.ones(2))
        with pytest.raises(Exception, match="pickle|local object"):
            dist.all_gather_object([None] * size, lambda: rank)
        with pytest.raises(dist.DistError, match="length"):
            dist.all_gather_object([None] * (size + (rank == 1)), rank)
        dist.barrier()

    on_threads(3, body)


# spec: B10 B11 B12 in Python, D1 D4 groups in Python, D7 split_group in Python
def test_groups():
    def body(rank, size):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        assert dist.get_backend() == "cpu:native" and dist.is_initialized()
        assert dist.group.WORLD.size() == size == dist.GroupMember.WORLD.size()
        pair = dist.new_group([0, 2])
        assert dist.get_process_group_ranks(pair) == [0, 2] and dist.get_group_rank(pair, 2) == 1 and dist.get_global_rank(pair, 1) == 2
        x = row(rank)
        dist.all_reduce(x, group=pair)
        same(x, row(0) + row(2) if rank != 1 else row(1))
        assert bool(pair) == (rank != 1) and dist.get_rank(pair) == (0, -1, 1)[rank]
        if rank == 1:
            assert dist.recv(x, group=pair) == -1 and dist.isend(x, 0, group=pair) is None and dist.barrier(pair, async_op=True) is None
        outside = dist.GroupMember.NON_GROUP_MEMBER
        assert (pair == outside) == (rank == 1) == (hash(pair) == hash(outside)) and dist.group.WORLD != outside and pair != -100
        assert dist.all_reduce(x, group=outside) is None and dist.get_rank(outside) == -1 and not outside
        part = dist.split_group(split_ranks=[[0, 1], [2]])
        assert part.size() == (2, 2, 1)[rank]
        with pytest.raises(dist.DistError, match="twice"):
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    with pytest.raises(dist.DistError, match="init_process_group"):
        dist.get_rank()
    for _ in range(2):
        on_threads(3, body)


# spec: D5 D6 D9 meshes in Python
def test_device_mesh():
    from muster.device_mesh import DeviceMesh, init_device_mesh

    def body(rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh.shape == (2, 2) and mesh.ndim == 2 and mesh.mesh_dim_names == ("dp", "tp")
        assert mesh.size() == 4 and mesh.size(0) == 2 and mesh.get_coordinate() == [rank // 2, rank % 2]
        x = row(rank)
        dist.all_reduce(x, group=mesh.get_group("dp"))
        same(x, row(rank % 2) + row(rank % 2 + 2))
        x = row(rank)
        dist.all_reduce(x, group=mesh["tp"].get_group())
        same(x, row(rank // 2 * 2) + row(rank // 2 * 2 + 1))
        assert mesh.get_local_rank("tp") == rank % 2 and mesh == DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        with mesh as entered:
            assert entered == mesh
        flat = mesh["dp", "tp"]._flatten()
        x = row(rank)
        dist.all_reduce(x, group=flat.get_group())
        same(x, sum(row(r) for r in range(4)))
        with pytest.raises(dist.DistError):
            init_device_mesh("cpu", (3,))

    on_threads(4, body)


# spec: A8 A9 A13 in Python
def test_backend_names():
    assert dist.Backend("GLOO") == "gloo" == dist.Backend.GLOO
    assert dist.Backend.NATIVE == "native"
    with pytest.raises(ValueError, match="native") as caught:
        dist.Backend("nonsense")
    assert isinstance(caught.value, dist.DistError) and caught.value.code == "invalid argument"
    with pytest.raises(dist.DistError):
        dist.Backend("undefined")
    assert dist.is_available() and dist.is_gloo_available() and not dist.is_nccl_available()
    on_threads(2, lambda rank, size: same(torch.tensor(dist.get_backend() == "gloo"), torch.tensor(True)), backend="GLOO")


# spec: C2 C5 C7 C8 C9 C10 C13 C15 C16 stores in Python
def test_stores(tmp_path):
    tcp = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=30))
    for store in (tcp, dist.HashStore(), dist.FileStore(str(tmp_path / "store")), dist.PrefixStore("p", dist.HashStore())):
        store.set("first_key", "first_value")
        assert store.get("first_key") == b"first_value"
        assert store.num_keys() == (2 if store is tcp else 1)
        store.set("first_key", b"\0\xff")
        assert store.get("first_key") == b"\0\xff"
        store.add("count", 1)
        assert store.add("count", 6) == 7 and store.get("count") == b"7"
        assert store.compare_set("first_key", b"\0\xff", "second") == b"second"
        store.set_timeout(datetime.timedelta(milliseconds=50))
        assert store.timeout == datetime.timedelta(milliseconds=50)
        with pytest.raises(dist.DistStoreError, match="bad_key"):
            store.get("bad_key")
        with pytest.raises(dist.DistStoreError, match="bad_key"):
            store.wait(["bad_key"], datetime.timedelta(milliseconds=10))
    assert tcp.port > 0
    client = dist.TCPStore("127.0.0.1", tcp.port, 1, False)
    assert client.get("first_key") == b"second" and client.delete_key("first_key")


def signature(function):
    """Names of the arguments in order, with the defaults as text: "-" for none, those of ReduceOp as muster shows them."""
    if not inspect.isbuiltin(function):
        return {name: "-" if each.default is each.empty else re.sub(r"<RedOpType\.(\w+): \d+>", r"<ReduceOp.\1>", repr(each.default))
                for name, each in inspect.signature(function).parameters.items()}
    text = function.__doc__.splitlines()[0]
    arguments = re.split(r", (?=\w+: )", text[text.index("(") + 1 : text.rindex(") ->")])
    return {each.partition(":")[0]: each.partition(" = ")[2] or "-" for each in arguments}


# What torch has and muster does not: devices of GPUs, and options that came later.
NOT_HERE = {"device_id", "_ranks", "enable_reconfigure", "sort_ranks", "weights_only", "use_batch", "backend_override", ("barrier", "timeout")}


HERE_ONLY = {"share_memory"}


# spec: F20 signatures and defaults as torch's
@pytest.mark.parametrize("name", [
    "broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "all_to_all", "barrier", "send", "recv", "isend", "irecv",
    "P2POp.__init__", "batch_isend_irecv", "split_group", "gather_into_tensor", "get_backend_config", "get_node_local_rank", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "init_process_group", "destroy_process_group", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "monitored_barrier", "get_rank", "get_world_size", "get_backend", "get_group_rank", "get_global_rank",
    "get_process_group_ranks", "init_device_mesh"])
def test_signatures(name):
    import torch.distributed as theirs

    get = operator.attrgetter(name)
    wanted = {each: default for each, default in signature(get(theirs)).items() if each not in NOT_HERE and (name, each) not in NOT_HERE}
    mine = {each: default for each, default in signature(get(dist)).items() if each not in HERE_ONLY}
    assert list(mine.items()) == list(wanted.items())


# Of torch.distributed's public names, those that muster does not have; docs/python.md says why.
LEFT_OUT = {
    "AllToAllOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "BarrierOptions", "BroadcastOptions", "GatherOptions",
    "ReduceOptions", "ReduceScatterOptions", "ScatterOptions", "BackendConfig", "BuiltinCommHookType", "GroupName", "Logger", "Reducer",
    "ProcessGroupGloo", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy", "QueueEmptyError", "get_backend_impl", "get_pg_count", "register_rendezvous_handler", "rendezvous"}


# spec: A8 F14 F19 H7 torch.distributed's public names are muster's
def test_public_names():
    from torch.distributed import distributed_c10d

    here = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "QueueEmptyError", "FileStore", "HashStore", "PrefixStore",
            "TCPStore", "Store", "GradBucket", "Logger", "Reducer", "BuiltinCommHookType", "DebugLevel", "set_debug_level",
            "set_debug_level_from_env", "breakpoint", "DeviceMesh", "init_device_mesh", "is_available", "rendezvous",
            "register_rendezvous_handler", "reduce_scatter_coalesced", "_make_nccl_premul_sum", "_all_gather_base", "_reduce_scatter_base"}
    wanted = here | set(distributed_c10d.__all__)
    assert {name for name in wanted if not hasattr(dist, name)} <= LEFT_OUT
    page = pathlib.Path(__file__).parents[2].joinpath("docs/python.md").read_text()
    assert [name for name in sorted(LEFT_OUT) if f"`{name}`" not in page] == []


def test_every_public_function_says_what_it_does():
    silent = []
    for name in dir(dist):
        each = getattr(dist, name)
        if name.startswith("_") or inspect.ismodule(each) or not callable(each):
            continue
        text = each.__doc__ or ""
        if inspect.isbuiltin(each):
            text = text.partition("\n")[2]
        if len(text.split()) < 3:
            silent.append(name)
    assert not silent


# spec: A9 in Python
def test_little_calls(monkeypatch):
    assert dist.is_backend_available("GLOO") and not dist.is_backend_available("nccl") and not dist.is_backend_available("nonsense")
    assert dist.get_default_backend_for_device("cpu") == "native" and dist.get_default_backend_for_device(torch.device("cuda", 1)) == "nccl"
    with pytest.raises(ValueError, match="meta"):
        dist.get_default_backend_for_device("meta")
    assert dist.supports_complex(dist.ReduceOp.SUM) and not dist.supports_complex(dist.ReduceOp.MAX)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(3) == 3
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert dist.get_node_local_rank() == 5
    assert not dist.is_torchelastic_launched() or "TORCHELASTIC_RUN_ID" in os.environ

    def body(rank, size):
        assert dist.get_backend_config() == "cpu:native"
        together = torch.empty(size, 4, dtype=torch.int64) if rank == 0 else None
        dist.gather_into_tensor(row(rank), together)
        if rank == 0:
            same(together, torch.stack([row(r) for r in range(size)]))
        joined = torch.empty(size * 4, dtype=torch.int64) if rank == 1 else None
        dist.gather_single(row(rank), joined, dst=1)
        if rank == 1:
            same(joined, torch.cat([row(r) for r in range(size)]))
        if rank == 0:
            with pytest.raises(ValueError, match="gather_into_tensor"):
                dist.gather_into_tensor(row(rank), torch.empty(3))
        with dist.record_comm("together"):
            dist.barrier()

    on_threads(2, body)


class Ledger(dist.ProcessGroupBackend):
    """Every message is an entry of the group's store."""

    def __init__(self, store, rank, size):
        self.store, self.rank, self.size, self.page, self.aborted = store, rank, size, 0, None

    def supports(self, op, dtype, device):
        return device == "cpu" if op in ("all_reduce", "all_gather", "barrier", "recv", "send") else "it keeps a ledger only"

    def submit(self, request):
        if request.op == "send":
            self.store.set(f"to {request.peer} {request.tag}", bytes(request.inputs[0][0].numpy().tobytes()))
            return None
        future = torch.futures.Future()
        if request.op == "recv":
            data = bytearray(self.store.get(f"to {self.rank} {request.tag}"))
            request.outputs[0][0].copy_(torch.frombuffer(data, dtype=request.outputs[0][0].dtype))
        else:
            self.page += 1
            mine = request.inputs[0][0].numpy().tobytes() if request.inputs else b""
            pages = self.store.all_gather(f"page {self.page}", self.rank, self.size, mine)
            if request.op == "all_reduce":
                assert request.reduce_op == dist.ReduceOp.SUM and request.timeout > datetime.timedelta(0)
                tensor = request.outputs[0][0]
                tensor.copy_(sum(torch.frombuffer(bytearray(each), dtype=tensor.dtype) for each in pages))
            for out, page in zip(request.outputs if request.op == "all_gather" else (), pages):
                out[0].copy_(torch.frombuffer(bytearray(page), dtype=out[0].dtype).view(out[0].shape))
        future.set_result(None)
        return future

    def abort(self, reason):
        self.aborted = reason


# spec: A11 a backend written in Python, with and without extended_api; its name becomes an attribute of Backend
def test_backend_of_python():
    given = []

    def extended(options, pg_options):
        given.append((options.group_rank, options.group_size, options.global_ranks_in_group, pg_options))
        return Ledger(options.store, options.group_rank, options.group_size)

    dist.Backend.register_backend("Ledger", lambda store, rank, size, timeout: Ledger(store, rank, size), devices="cpu")
    dist.Backend.register_backend("ledger2", extended, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("broken", lambda *_: None)
    assert dist.Backend.LEDGER == "ledger" == dist.Backend("LEDGER") and dist.is_backend_available("ledger")
    with pytest.raises(ValueError, match="ledger"):
        dist.Backend.register_backend("ledger", extended)

    def body(rank, size):
        x = row(rank, torch.float32)
        dist.all_reduce(x)
        same(x, sum(row(r, torch.float32) for r in range(size)))
        work = dist.all_reduce(x, async_op=True)
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        same(work.get_future().wait()[0], x)
        if rank == 0:
            dist.send(row(7), 1, tag=3)
        if rank == 1:
            got = torch.empty(4, dtype=torch.int64)
            assert dist.recv(got, 0, tag=3) == 0
            same(got, row(7))
        with pytest.raises(dist.DistBackendError, match="(?s)(?=.*ledger)(?=.*broadcast)(?=.*keeps a ledger only)"):
            dist.broadcast(x, 0)
        pair = dist.new_group([0, 1], backend="ledger2", pg_options={"ink": "blue"})
        dist.all_reduce(x, group=pair)

    on_threads(2, body, backend="ledger")
    assert sorted(given) == [(0, 2, [0, 1], {"ink": "blue"}), (1, 2, [0, 1], {"ink": "blue"})]
    with pytest.raises(dist.SpawnError, match="gave no backend"):
        on_threads(1, lambda rank, size: None, backend="broken")
    with pytest.raises(dist.SpawnError, match="pg_options"):
        on_threads(1, lambda rank, size: dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)))


def test_package_is_typed():
    package = pathlib.Path(dist.__file__).parent
    assert (package / "py.typed").is_file() and (package / "_C.pyi").is_file()
    tool = pathlib.Path(__file__).parents[2] / "tools/python_stubs"
    checked = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    public = {name for name in dir(dist) if not name.startswith("_") and not inspect.ismodule(getattr(dist, name))}
    assert set(dist.__all__) | {"__version__"} >= public and all(hasattr(dist, name) for name in dist.__all__)


# spec: H1 in Python
def test_monitored_barrier():
    def body(rank, size):
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier in 500 ms") as caught:
                dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=500))
            assert caught.value.ranks == [1]
        dist.barrier()

    on_threads(2, body)


# spec: J2 the first failure of threads is rethrown with its rank and text
def test_spawn_of_threads_names_the_failure():
    def body(rank, size):
        if rank == 1:
            raise KeyError("what went wrong")
        dist.all_reduce(torch.ones(2))

    with pytest.raises(dist.SpawnError, match="(?s)rank 1.*KeyError.*what went wrong"):
        on_threads(3, body)


# spec: H7 exception classes in Python
def test_killed_rank_is_named():
    name = meeting_file()

    def body(rank):
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=3)
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank 2") as caught:
            dist.all_reduce(torch.ones(4))
        assert isinstance(caught.value, dist.DistError) and isinstance(caught.value, RuntimeError)
        assert caught.value.ranks == [2] and caught.value.code == "peer failed"

    run_ranks(3, body, killed=(2,))


def test_interrupt_ends_a_blocked_call():
    """Ctrl-C on rank 0, which waits for rank 1; rank 1 is told."""
    name = meeting_file()
    inside = fork.Event()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        dist.barrier()
        if rank == 0:
            # As Ctrl-C does: to the process, while its main thread is in the call or about to enter it.
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(4))
            inside.set()
        else:
            assert inside.wait(60)
            with pytest.raises(dist.DistBackendError, match="rank 0"):
                dist.all_reduce(torch.ones(4))  # has rank 0's part already, and may do
                dist.all_reduce(torch.ones(4))

    run_ranks(2, body)


@pytest.mark.parametrize("batch", [False, True])
def test_interrupt_ends_the_wait_for_a_message_of_another_group(batch):
    """It ends that group and no other one."""
    name = meeting_file()
    after = fork.Event()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        pair = dist.new_group([0, 1])
        if rank == 0:
            x, y = torch.zeros(4), torch.zeros(4)
            if batch:
                first, work = dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, 1), dist.P2POp(dist.irecv, x, 1, pair)])
            else:
                first, work = dist.irecv(y, 1), dist.irecv(x, 1, pair)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            after.set()
            first.wait()
            same(y, torch.ones(4))
        else:
            assert after.wait(60)
            dist.send(torch.ones(4), 0)
            with pytest.raises(dist.DistBackendError, match="rank 0"):
                dist.recv(torch.zeros(4), 0, pair)
        dist.barrier()

    run_ranks(2, body)


class Deed:
    """Does something where it is pickled: within a call of an object collective, on the thread that calls."""

    def __init__(self, act):
        self.act = act

    def __reduce__(self):
        self.act()
        return int, (7,)


def test_interrupt_of_a_forked_child_is_its_own():
    name = meeting_file()

    def forked():
        """A child that waits for an interrupt, and a pipe that says so."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, b"x")
                while True:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.read(reading, 1) == b"x"
        return child

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        children = [forked() for _ in range(3)] if rank == 0 else []

        def interrupt_children():
            for child in children:
                os.kill(child, signal.SIGINT)
                assert os.waitpid(child, 0)[1] == 0
            time.sleep(0.2)  # where they wake this process's thread, that shows only once it has run

        out = [None, None]
        dist.all_gather_object(out, Deed(interrupt_children))
        assert out == [7, 7]
        dist.barrier()

    run_ranks(2, body)


def test_forked_child_keeps_out_of_the_job():
    name = meeting_file()

    def child():
        signal.alarm(60)  # ends it where a call hangs
        for call in (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.send(torch.ones(4), 1), lambda: dist.barrier(), lambda: dist.new_group([0])):
            with pytest.raises(dist.DistError):
                call()

    def body(rank):
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        dist.barrier()
        if rank == 0:
            forked = os.fork()
            if forked == 0:
                try:
                    child()
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            assert os.waitpid(forked, 0)[1] == 0
        x = row(rank)
        dist.all_reduce(x)
        same(x, row(0) + row(1))
        dist.destroy_process_group()

    run_ranks(2, body)


def test_interrupt_ends_the_wait_for_others():
    name = meeting_file()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.init_process_group(init_method="file://" + name, rank=0, world_size=2)

    run_ranks(1, body)


# spec: J3 muster run starts a script with the Python of the environment that it is installed in
def test_command_knows_its_environments_python(tmp_path):
    built = pathlib.Path(dist.__file__).parents[2] / "bin/muster"
    (tmp_path / "bin").mkdir()
    shutil.copy2(built, tmp_path / "bin/muster")
    (tmp_path / "bin/python3").write_text('#!/bin/sh\necho "own python: $RANK of $WORLD_SIZE ${2##*/}"\n')
    (tmp_path / "bin/python3").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_EXEC"}

    def lines():
        run = subprocess.run([tmp_path / "bin/muster", "run", "--standalone", "--nproc-per-node", "2", tmp_path / "train.py"],
                             capture_output=True, text=True, timeout=120, env=environment)
        return sorted(line.partition("own python: ")[2] for line in run.stdout.splitlines() if "own python" in line)

    (tmp_path / "train.py").write_text("")
    assert lines() == []
    (tmp_path / "pyvenv.cfg").write_text("")
    assert lines() == ["0 of 2 train.py", "1 of 2 train.py"]


def test_another_torch_is_refused_by_name(tmp_path):
    package = tmp_path / "muster"
    package.mkdir()
    for file in pathlib.Path(dist.__file__).parent.iterdir():
        if file.is_file() and file.name != "_build.py":
            (package / file.name).symlink_to(file.resolve())
    (package / "_build.py").write_text('VERSION = "0"\nTORCH_VERSION = "1.2.3"\n')
    run = subprocess.run([sys.executable, "-c", "import muster"], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 1 and "built for torch 1.2.3" in run.stderr and f"torch {torch.__version__} is installed" in run.stderr

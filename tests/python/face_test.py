# SPDX-License-Identifier: BSD-3-Clause
"""`import muster as dist`: torch.distributed's behaviour. Ranks are threads."""

import datetime
import threading

import pytest
import torch
from thread_ranks import on_threads, row, same

import muster as dist

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
        for op, expected in [
            (dist.ReduceOp.MAX, row(1)),
            (dist.ReduceOp.MIN, row(0)),
            (dist.ReduceOp.PRODUCT, row(0) * row(1)),
            (dist.ReduceOp.BAND, row(0) & row(1)),
            (dist.ReduceOp.BOR, row(0) | row(1)),
            (dist.ReduceOp.BXOR, row(0) ^ row(1)),
            (dist.reduce_op.SUM, row(0) + row(1)),
        ]:
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
        assert (
            dist.get_process_group_ranks(pair) == [0, 2]
            and dist.get_group_rank(pair, 2) == 1
            and dist.get_global_rank(pair, 1) == 2
        )
        x = row(rank)
        dist.all_reduce(x, group=pair)
        same(x, row(0) + row(2) if rank != 1 else row(1))
        assert bool(pair) == (rank != 1) and dist.get_rank(pair) == (0, -1, 1)[rank]
        if rank == 1:
            assert (
                dist.recv(x, group=pair) == -1
                and dist.isend(x, 0, group=pair) is None
                and dist.barrier(pair, async_op=True) is None
            )
        outside = dist.GroupMember.NON_GROUP_MEMBER
        assert (
            (pair == outside) == (rank == 1) == (hash(pair) == hash(outside))
            and dist.group.WORLD != outside
            and pair != -100
        )
        assert (
            dist.all_reduce(x, group=outside) is None
            and dist.get_rank(outside) == -1
            and not outside
        )
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
        assert (
            mesh.size() == 4
            and mesh.size(0) == 2
            and mesh.get_coordinate() == (rank // 2, rank % 2)
        )
        x = row(rank)
        dist.all_reduce(x, group=mesh.get_group("dp"))
        same(x, row(rank % 2) + row(rank % 2 + 2))
        x = row(rank)
        dist.all_reduce(x, group=mesh["tp"].get_group())
        same(x, row(rank // 2 * 2) + row(rank // 2 * 2 + 1))
        assert mesh.get_local_rank("tp") == rank % 2 and mesh == DeviceMesh(
            "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")
        )
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
    assert dist.is_available() and dist.is_gloo_available()
    on_threads(
        2,
        lambda rank, size: same(torch.tensor(dist.get_backend() == "gloo"), torch.tensor(True)),
        backend="GLOO",
    )


# spec: C2 C5 C7 C8 C9 C10 C13 C15 C16 stores in Python
def test_stores(tmp_path):
    tcp = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=30))
    for store in (
        tcp,
        dist.HashStore(),
        dist.FileStore(str(tmp_path / "store")),
        dist.PrefixStore("p", dist.HashStore()),
    ):
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


class Ledger(dist.ProcessGroupBackend):
    """Every message is an entry of the group's store."""

    def __init__(self, store, rank, size):
        self.store, self.rank, self.size, self.page, self.aborted = store, rank, size, 0, None

    def supports(self, op, dtype, device):
        return (
            device == "cpu"
            if op in ("all_reduce", "all_gather", "barrier", "recv", "send")
            else "it keeps a ledger only"
        )

    def submit(self, request):
        if request.op == "send":
            self.store.set(
                f"to {request.peer} {request.tag}", bytes(request.inputs[0][0].numpy().tobytes())
            )
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
                assert (
                    request.reduce_op == dist.ReduceOp.SUM
                    and request.timeout > datetime.timedelta(0)
                )
                tensor = request.outputs[0][0]
                tensor.copy_(
                    sum(torch.frombuffer(bytearray(each), dtype=tensor.dtype) for each in pages)
                )
            for out, page in zip(request.outputs if request.op == "all_gather" else (), pages):
                out[0].copy_(
                    torch.frombuffer(bytearray(page), dtype=out[0].dtype).view(out[0].shape)
                )
        future.set_result(None)
        return future

    def abort(self, reason):
        self.aborted = reason


class Held(Ledger):
    """Its asynchronous calls are over once `goes_on` is set."""

    goes_on = threading.Event()
    waited = []

    def submit(self, request):
        pending = super().submit(request)
        return self if request.async_op else pending

    def wait(self):
        self.goes_on.wait()
        self.waited.append(dist.get_rank())


# spec: A11 a Work of a backend written in Python has one future, whose callbacks know the group
# they belong to
def test_futures_of_a_backend_of_python():
    dist.Backend.register_backend(
        "held", lambda store, rank, size, timeout: Held(store, rank, size), devices="cpu"
    )

    def body(rank, size):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        ranks = [work.get_future().then(lambda _: dist.get_rank()) for _ in range(3)]
        Held.goes_on.set()
        assert [each.wait() for each in ranks] == [rank] * 3

    on_threads(2, body, backend="held")
    assert sorted(Held.waited) == [0, 1]


class Held2(Held):
    goes_on = threading.Event()
    waited = []


# spec: A11 a wait for a Work of a backend written in Python ends at its timeout; the call goes on
def test_a_wait_for_a_backend_of_python_has_a_timeout():
    dist.Backend.register_backend(
        "held2", lambda store, rank, size, timeout: Held2(store, rank, size), devices="cpu"
    )
    told = threading.Barrier(2)

    def body(rank, size):
        x = row(rank, torch.float32)
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(dist.DistBackendError, match="held2.*did not end within 10 ms"):
            work.wait(datetime.timedelta(milliseconds=10))
        assert not work.is_completed()
        told.wait()
        Held2.goes_on.set()
        assert work.wait(datetime.timedelta(seconds=60)) and work.is_success()
        same(x, sum(row(r, torch.float32) for r in range(size)))

    on_threads(2, body, backend="held2")


# spec: A11.attribute a backend written in Python, with and without extended_api; its name becomes
# an attribute of Backend
def test_backend_of_python():
    given = []

    def extended(options, pg_options):
        given.append(
            (options.group_rank, options.group_size, options.global_ranks_in_group, pg_options)
        )
        return Ledger(options.store, options.group_rank, options.group_size)

    dist.Backend.register_backend(
        "Ledger", lambda store, rank, size, timeout: Ledger(store, rank, size), devices="cpu"
    )
    dist.Backend.register_backend("ledger2", extended, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("broken", lambda *_: None)
    assert dist.Backend.LEDGER == "ledger" == dist.Backend("LEDGER") and dist.is_backend_available(
        "ledger"
    )
    with pytest.raises(ValueError, match="ledger"):
        dist.Backend.register_backend("ledger", extended)

    def body(rank, size):
        x = row(rank, torch.float32)
        dist.all_reduce(x)
        same(x, sum(row(r, torch.float32) for r in range(size)))
        work = dist.all_reduce(x, async_op=True)
        assert (
            work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        )
        same(work.get_future().wait()[0], x)
        if rank == 0:
            dist.send(row(7), 1, tag=3)
        if rank == 1:
            got = torch.empty(4, dtype=torch.int64)
            assert dist.recv(got, 0, tag=3) == 0
            same(got, row(7))
        with pytest.raises(
            dist.DistBackendError, match="(?s)(?=.*ledger)(?=.*broadcast)(?=.*keeps a ledger only)"
        ):
            dist.broadcast(x, 0)
        pair = dist.new_group([0, 1], backend="ledger2", pg_options={"ink": "blue"})
        dist.all_reduce(x, group=pair)

    on_threads(2, body, backend="ledger")
    assert sorted(given) == [(0, 2, [0, 1], {"ink": "blue"}), (1, 2, [0, 1], {"ink": "blue"})]
    with pytest.raises(dist.SpawnError, match="gave no backend"):
        on_threads(1, lambda rank, size: None, backend="broken")
    with pytest.raises(dist.SpawnError, match="pg_options"):
        on_threads(
            1,
            lambda rank, size: dist.new_group(
                pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            ),
        )

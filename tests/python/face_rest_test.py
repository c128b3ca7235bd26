# SPDX-License-Identifier: BSD-3-Clause
"""The rarer parts of torch.distributed's face: calls, keywords and names, each called once from
Python.
"""

import contextlib
import copy
import datetime
import functools
import pickle
import re

import pytest
import torch
from passing_store import passing_store
from ranks import run_ranks
from scratch import meeting_file
from thread_ranks import SECONDS, on_threads, row, same

import muster as dist
from muster.device_mesh import DeviceMesh, init_device_mesh

SHORT = datetime.timedelta(milliseconds=300)


# ---- starting


# spec: B1 device_id and what else torch's init_process_group takes
def test_init_takes_torchs_keywords():
    def body(rank):
        start = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        for wrong in (
            torch.device("cpu"),
            torch.device("meta", 0),
            torch.device("xpu", 0),
            torch.device("cuda", 99),
            99,
        ):
            with pytest.raises(ValueError, match="init_process_group: device_id"):
                dist.init_process_group(device_id=wrong, **start)
        with pytest.raises(ValueError, match="enable_reconfigure.*shrink_group"):
            dist.init_process_group(enable_reconfigure=True, **start)
        dist.init_process_group(device_id=torch.device("cpu", 0), _ranks=[0], **start)
        with pytest.raises(ValueError, match="new_group: device_id"):
            dist.new_group(device_id=torch.device("cpu"))
        assert dist.new_group(device_id=torch.device("cpu", 0)).size() == 1
        dist.destroy_process_group()

    dist.spawn(body, nprocs=1, threads=True)


# spec: B2 a store of torch.distributed's, and one that is written in Python
def test_init_over_torchs_stores():
    import torch.distributed as theirs

    def body(rank, store):
        dist.init_process_group(store=store, rank=rank, world_size=2, timeout=SECONDS)
        x = row(rank)
        dist.all_reduce(x)
        same(x, row(0) + row(1))
        dist.destroy_process_group()

    dist.spawn(body, args=(theirs.HashStore(),), nprocs=2, threads=True)
    name = meeting_file()
    mine = functools.partial(passing_store, theirs.Store)
    run_ranks(2, lambda rank: body(rank, mine(theirs.FileStore(name, 2))))


# spec: A9 in Python
def test_what_this_build_has():
    for name in ("mpi", "ucc"):
        available = getattr(dist, f"is_{name}_available")()
        assert available == dist.is_backend_available(name)
    assert (
        isinstance(dist.is_mpi_available(), bool)
        and isinstance(dist.is_ucc_available(), bool)
        and dist.is_xccl_available() is False
    )


# spec: A5 A12 ucc without libucc in Python: refused, and the error says what to install and to use
def test_ucc_is_refused():
    if dist.is_ucc_available():
        pytest.skip("libucc is here")
    for name in ("ucc", "cpu:native,cuda:ucc"):
        with pytest.raises(
            dist.DistBackendError, match="'ucc' cannot be.*install UCC.*use 'native' for"
        ):
            dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        assert not dist.is_initialized()


# spec: A11.refusal what is no plugin is named in Python
def test_what_is_no_plugin():
    with pytest.raises(dist.DistError, match="/no/such/library.so cannot be loaded"):
        dist.load_backend_plugin("/no/such/library.so")
    with pytest.raises(dist.DistError, match="is no backend plugin"):
        dist.load_backend_plugin("libm.so.6")


class Alone(dist.ProcessGroupBackend):
    """A backend of groups of one."""

    def submit(self, request):
        assert isinstance(request, dist.Request) and request.op == "all_reduce"


# spec: A11 what a backend is made of and gets
def test_what_backends_get():
    def make(options, pg_options):
        assert isinstance(options, dist.DistributedBackendOptions) and isinstance(
            options.store, dist.Store
        )
        return Alone()

    dist.Backend.register_backend("alone", make, extended_api=True, devices="cpu")
    on_threads(1, lambda rank, size: dist.all_reduce(torch.ones(2)), backend="alone")


# ---- stores


# spec: C2 use_libuv is taken, C14 a queue that is empty says so in a class of its own
def test_empty_queues():
    for store in (
        dist.HashStore(),
        dist.FileStore(meeting_file(), 1),
        dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False),
    ):
        for each in (store, dist.PrefixStore("under", store)):
            with pytest.raises(dist.QueueEmptyError, match="the queue is empty") as caught:
                each.queue_pop("q", block=False)
            assert isinstance(caught.value, dist.DistStoreError) and caught.value.code == "store"
            each.queue_push("q", "one")
            assert each.queue_pop("q", False) == b"one"
            each.set_timeout(SHORT)
            with pytest.raises(dist.DistStoreError, match="nothing came") as caught:
                each.queue_pop("q")
            assert not isinstance(caught.value, dist.QueueEmptyError)
            each.set_timeout(SECONDS)


# spec: C2 a server that is not there, and one whose port is taken
def test_no_server():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(dist.DistNetworkError, match=str(server.port)):
        dist.TCPStore("127.0.0.1", server.port, is_master=True, timeout=SHORT)
    with pytest.raises(dist.DistStoreError, match="could not reach the store at 127.0.0.1:1"):
        dist.TCPStore("127.0.0.1", 1, timeout=SHORT)


# spec: C2.refusal what can never begin is refused at once
@pytest.mark.parametrize("port, world_size", [(0, None), (1, 0)])
def test_no_port_and_no_users(port, world_size):
    with pytest.raises(ValueError, match="needs the port" if port == 0 else "world_size is 0"):
        dist.TCPStore("127.0.0.1", port, world_size=world_size)


# spec: U5.wait_for_worker the old spelling of wait_for_workers, which it overrules
def test_old_spelling_of_wait_for_workers():
    dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, wait_for_worker=False)
    with pytest.raises(dist.DistStoreError, match="1 of 2"):
        dist.TCPStore(
            *("127.0.0.1", 0),
            world_size=2,
            is_master=True,
            timeout=SHORT,
            wait_for_workers=False,
            wait_for_worker=True,
        )


# ---- groups


# spec: D1 sort_ranks in Python: the group's order is that of the list
def test_order_of_new_groups():
    def body(rank, size):
        for local in (False, True):
            if local and rank == 1:
                continue
            group = dist.new_group([2, 0], sort_ranks=False, use_local_synchronization=local)
            if rank == 1:
                assert not group
                continue
            assert dist.get_process_group_ranks(group) == [2, 0] and dist.get_rank(group) == (
                0 if rank == 2 else 1
            )
            out = [torch.empty(4, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(out, row(rank), group=group)
            same(torch.stack(out), torch.stack([row(2), row(0)]))
        dist.barrier()
        with pytest.raises(dist.DistError, match=r"\[0, 1\].*\[1, 0\]|\[1, 0\].*\[0, 1\]"):
            dist.new_group([0, 1] if rank == 0 else [1, 0], sort_ranks=False)

    on_threads(3, body)


# spec: D7 subgroups in Python
def test_subgroups():
    def body(rank, size):
        mine, all_of_them = dist.new_subgroups(2, group_desc="pairs")
        assert len(all_of_them) == 2 and [bool(each) for each in all_of_them] == [
            rank < 2,
            rank >= 2,
        ]
        assert (
            dist.get_process_group_ranks(mine) == ([0, 1] if rank < 2 else [2, 3])
            and mine.group_desc == "pairs"
        )
        x = torch.tensor([rank])
        dist.all_reduce(x, group=mine)
        assert x.item() == (1 if rank < 2 else 5)
        hosts, listed = dist.new_subgroups()
        assert dist.get_world_size(hosts) == 4 and len(listed) == 1
        mine, all_of_them = dist.new_subgroups_by_enumeration([[3, 0], [2]])
        assert [dist.get_process_group_ranks(each) for each in all_of_them] == [[0, 3], [2]]
        assert bool(mine) == (rank != 1)
        with pytest.raises(ValueError, match="groups of 3"):
            dist.new_subgroups(3)
        with pytest.raises(ValueError, match="rank 1 is named twice"):
            dist.new_subgroups_by_enumeration([[0, 1], [1]])

    on_threads(4, body)


# spec: D7 grow_group in Python: members keep their ranks, others join; a list that does not fit
def test_growing():
    def body(rank, size):
        pair = dist.new_group([1, 2])
        with pytest.raises(ValueError, match="must then not call it|must begin with"):
            dist.grow_group([2, 1], group=pair)
        grown = dist.grow_group([1, 2, 0], group=pair if pair else None)
        assert dist.get_process_group_ranks(grown) == [1, 2, 0]
        assert dist.get_rank(grown) == (rank + 2) % 3
        x = torch.ones(2)
        dist.all_reduce(x, group=grown)
        assert x.tolist() == [3, 3]

    on_threads(3, body)


# spec: D7 shrink_group in Python: without those that are named, and in place of the default group
def test_shrinking():
    def body(rank):
        part = dist.new_group([0, 1, 2])
        if rank in (0, 2):
            left = dist.shrink_group([1], group=part)
            assert dist.get_process_group_ranks(left) == [0, 2]
            x = torch.ones(2)
            dist.all_reduce(x, group=left)
            assert x.tolist() == [2, 2]
            with pytest.raises(ValueError, match="twice"):
                dist.shrink_group([1, 1], group=part)
        dist.barrier()
        if rank == 3:
            with pytest.raises(ValueError, match="must not call it"):
                dist.shrink_group([3])
            with contextlib.suppress(dist.DistBackendError):  # the others may have shrunk it
                dist.destroy_process_group()
            return
        dist.shrink_group([3], shrink_flags=dist.SHRINK_DEFAULT)
        assert dist.get_world_size() == 3 and dist.get_rank() == rank
        dist.barrier()
        dist.destroy_process_group()

    def rank_body(rank, store):
        dist.init_process_group(store=store, rank=rank, world_size=4, timeout=SECONDS)
        body(rank)

    dist.spawn(rank_body, args=(dist.HashStore(),), nprocs=4, threads=True)


# spec: H7 abort_process_group in Python: both sides learn who has done it
def test_aborting():
    def body(rank, size):
        group = dist.new_group()
        if rank == 0:
            dist.abort_process_group(group)
        with pytest.raises(dist.DistBackendError, match="abort_process_group") as caught:
            dist.barrier(group=group)
        assert caught.value.ranks == [0]
        dist.barrier()

    on_threads(2, body)


# spec: F13 a barrier's own timeout in Python
def test_timeout_of_a_barrier():
    def body(rank, size):
        dist.barrier(timeout=SECONDS)
        group = dist.new_group()
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"waited [\d.]+ m?s") as caught:
                dist.barrier(group, timeout=SHORT)
            amount, unit = re.search(r"waited ([\d.]+) (m?s)", str(caught.value)).groups()
            assert float(amount) * {"ms": 1, "s": 1000}[unit] >= SHORT.total_seconds() * 1000
            assert caught.value.code == "timed out" and caught.value.ranks == [1]
        dist.barrier()
        with contextlib.suppress(dist.DistBackendError):  # rank 1 learns of the failure here
            dist.destroy_process_group(group)

    on_threads(2, body)


# spec: D1 what a group says of itself, as torch's does
def test_what_a_group_says_of_itself():
    def body(rank, size):
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        assert (
            world.name() == "gloo"
            and world.group_name == "default"
            and world.group_desc == "default_pg"
        )
        pair = dist.new_group([0, 1], group_desc="the pair")
        assert pair.group_desc == "the pair" and pair.name() == "gloo" and "0, 1" in pair.group_name
        assert dist.new_group([0, 1]).group_desc == "undefined"
        assert dist.split_group(None, [[0, 1]], group_desc="split").group_desc == "split"
        assert dist.GroupMember.NON_GROUP_MEMBER.name() == "undefined"

    on_threads(2, body, backend="gloo")


# ---- collectives


# spec: F17 coalesced reduce_scatter in Python, F9 F5 the other spellings
def test_spellings():
    def body(rank, size):
        out = [torch.empty(4, dtype=torch.int64), torch.empty(2, dtype=torch.int64)]
        dist.reduce_scatter_coalesced(out, [[row(rank + r), row(rank + r)[:2]] for r in range(2)])
        same(out[0], row(rank) + row(rank + 1))
        same(out[1], (row(rank) + row(rank + 1))[:2])
        for gathers in (dist.all_gather_single, dist._all_gather_base):
            together = torch.empty(8, dtype=torch.int64)
            gathers(together, row(rank))
            same(together, torch.cat([row(0), row(1)]))
        for scatters in (dist.reduce_scatter_single, dist._reduce_scatter_base):
            mine = torch.empty(4, dtype=torch.int64)
            scatters(mine, torch.cat([row(rank), row(rank + 1)]))
            same(mine, row(rank) + row(rank + 1))

    on_threads(2, body)


# spec: E3 synchronize in Python
def test_synchronize():
    def body(rank, size):
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        assert (
            work.wait(datetime.timedelta(0))
            and work.synchronize() is None
            and work.is_completed()
            and x.tolist() == [2, 2, 2]
        )
        group = dist.new_group()
        if rank == 1:
            dist.abort_process_group(group)
        else:
            with pytest.raises(dist.DistBackendError, match="abort_process_group"):
                dist.barrier(group, async_op=True).synchronize()
        dist.barrier()

    on_threads(2, body)


# spec: F14 PREMUL_SUM is a ReduceOp in Python, F19 its factor travels with it
def test_reduce_ops_are_values():
    names = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "PREMUL_SUM")
    for op in (*(getattr(dist.ReduceOp, name) for name in names), dist._make_nccl_premul_sum(2.5)):
        for same_op in (
            pickle.loads(pickle.dumps(op)),
            copy.copy(op),
            copy.deepcopy(op),
            dist.ReduceOp(op),
        ):
            assert same_op == op and hash(same_op) == hash(op) and repr(same_op) == repr(op)
    assert dist._make_nccl_premul_sum(2.5) != dist.ReduceOp.PREMUL_SUM
    assert not hasattr(dist.ReduceOp, "__members__")

    def body(rank, size):
        for op, factor in (
            (dist.ReduceOp.PREMUL_SUM, 1.0),
            (pickle.loads(pickle.dumps(dist._make_nccl_premul_sum(2.5))), 2.5),
        ):
            x = torch.full((3,), 1.0 + rank)
            dist.all_reduce(x, op)
            assert x.tolist() == [3 * factor] * 3

    on_threads(2, body)


# spec: K4 what a hook gets
def test_hooks_get_buckets():
    from muster.nn.parallel import DistributedDataParallel

    def hook(state, bucket):
        assert isinstance(bucket, dist.GradBucket) and bucket.is_last()
        return (
            dist.all_reduce(bucket.buffer(), group=bucket.group, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    def body(rank, size):
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model.register_comm_hook(None, hook)
        model(torch.ones(1, 2)).sum().backward()

    on_threads(1, body)


# spec: B1 tensors that others read where they are, asked for one by one
def test_empty_shared():
    x = dist.empty_shared([2, 3], torch.int32)
    assert x.shape == (2, 3) and x.dtype == torch.int32 and dist.in_shared_memory(x)
    assert dist.empty_shared([4]).dtype == torch.get_default_dtype() and not dist.in_shared_memory(
        torch.empty(3)
    )


# ---- objects


class Thing:
    """Nothing that torch's restricted unpickler knows."""

    def __eq__(self, other):
        return isinstance(other, Thing)


# spec: G1 weights_only and use_batch, as torch has them
def test_objects_with_weights_only():
    plain = {"weights": torch.arange(3.0), "step": 7, "names": ["a", None]}

    def equal(one):
        return (
            one["step"] == 7
            and one["names"] == ["a", None]
            and torch.equal(one["weights"], plain["weights"])
        )

    def body(rank, size):
        out = [None, None]
        dist.all_gather_object(out, plain, weights_only=True)
        assert all(map(equal, out))
        out = [plain] if rank == 0 else [None]
        dist.broadcast_object_list(out, src=0, weights_only=True)
        assert equal(out[0])
        out = [None, None] if rank == 1 else None
        dist.gather_object(plain, out, dst=1, weights_only=True)
        assert out is None or all(map(equal, out))
        out = [None]
        dist.scatter_object_list(
            out, [plain, plain] if rank == 0 else None, src=0, weights_only=True
        )
        assert equal(out[0])
        if rank == 0:
            dist.send_object_list([plain, 3], 1, use_batch=True, weights_only=True)
        else:
            out = [None, None]
            assert (
                dist.recv_object_list(out, 0, use_batch=True, weights_only=True) == 0
                and equal(out[0])
                and out[1] == 3
            )
        out = [None, None]
        with pytest.raises(pickle.UnpicklingError, match="Thing"):
            dist.all_gather_object(out, Thing(), weights_only=True)
        dist.all_gather_object(out, Thing())
        assert out == [Thing(), Thing()]
        with pytest.raises(
            ValueError, match="pickle" if rank == 1 else "rank 1 could not take part"
        ):
            dist.all_gather_object(out, (lambda: 0) if rank == 1 else 0)
        with pytest.raises(dist.DistError, match="a list of length") as caught:
            dist.broadcast_object_list([0] * (rank + 1), src=0)
        assert caught.value.code == "mismatch"

    on_threads(2, body)


# ---- meshes


# spec: D5 backend_override in Python: by name, by number, with options; keys that are no dimension
def test_backends_of_a_mesh():
    def body(rank, size):
        mesh = init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("dp", "tp"),
            backend_override={"dp": "gloo", 1: ("cpu:native", None)},
        )
        assert mesh.get_group("dp").name() == "gloo" and mesh.get_group("tp").name() == "cpu:native"
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [rank % 2, rank % 2 + 2]
        x = torch.tensor([rank])
        dist.all_reduce(x, group=mesh.get_group("tp"))
        assert x.item() == (1 if rank < 2 else 5)
        for wrong in ({2: "gloo"}, {"pp": "gloo"}, {"dp": "gloo", 0: "gloo"}, {-1: "gloo"}):
            with pytest.raises(ValueError, match="backend_override"):
                init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=wrong)

    on_threads(4, body)


# spec: D6 a mesh on groups that are there
def test_mesh_from_groups():
    def body(rank, size):
        rows, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        columns, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        line = DeviceMesh.from_group(rows, "cpu")
        assert (
            line.ndim == 1
            and line.mesh.tolist() == dist.get_process_group_ranks(rows)
            and line.get_group() == rows
        )
        grid = dist.DeviceMesh.from_group(
            [columns, rows], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")
        )
        assert (
            grid.get_group("tp") == rows
            and grid.get_group("dp") == columns
            and grid.get_local_rank("tp") == rank % 2
        )
        x = torch.tensor([rank])
        dist.all_reduce(x, group=grid["dp"].get_group())
        assert x.item() == 2 + 2 * (rank % 2)
        assert grid._flatten().size() == 4
        for wrong in (
            lambda: DeviceMesh.from_group(rows, "cpu", [0, 3]),
            lambda: DeviceMesh.from_group([], "cpu"),
            lambda: DeviceMesh.from_group([rows, columns], "cpu"),
            lambda: DeviceMesh.from_group(
                [rows, columns], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")
            ),
            lambda: DeviceMesh.from_group(
                [columns, rows], "cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)
            ),
        ):
            with pytest.raises(ValueError, match="DeviceMesh.from_group"):
                wrong()

    on_threads(4, body)


# ---- stopping


stopped = []


def remember():
    """In the debugger's place."""
    stopped.append(dist.get_rank())


# spec: H8 skip counts the calls of one place; timeout_s is taken
def test_breakpoint_skips(monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", f"{__name__}.remember")

    def body(rank, size):
        for step in range(4):
            dist.breakpoint(1, skip=2, timeout_s=60)
            if rank == 1:
                assert len(stopped) == max(0, step - 1)
        dist.breakpoint(1, 1)
        with pytest.raises(ValueError, match="7"):
            dist.breakpoint(7)

    stopped.clear()
    on_threads(2, body)
    assert stopped == [1, 1]


# spec: E1.refusal a batch takes P2POp only
def test_batches_take_only_their_operations():
    with pytest.raises(ValueError, match="P2POp"):
        dist.batch_isend_irecv([dist.isend])

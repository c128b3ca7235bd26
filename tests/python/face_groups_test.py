# SPDX-License-Identifier: BSD-3-Clause
"""ProcessGroup, Work, Store and ReduceOp as libraries use torch's: their methods, hooks, options,
and stores written in Python.
"""

import datetime
import sys
import threading

import pytest
import torch
from thread_ranks import on_threads

import muster as dist
from muster import options
from muster.distributed import distributed_c10d as c10d

SHORT = datetime.timedelta(seconds=30)


def ranks_as(size, value):
    return [[torch.tensor([float(value)]) for _ in range(size)]]


# spec: U2.methods every collective as a method of ProcessGroup
def test_calls_as_methods():
    def body(rank, size):
        group = dist.group.WORLD
        x = torch.tensor([rank + 1.0])
        work = group.allreduce(x)
        assert work.wait() and x.item() == 3
        x, y = torch.tensor([float(rank)]), torch.tensor([10.0 * rank])
        several = group.allreduce([x, y], options.AllreduceOptions(reduceOp=dist.ReduceOp.MAX))
        several.wait()
        assert (x.item(), y.item()) == (1, 10) and several.is_success() and several.is_completed()
        assert several.result() == [x, y] and several.exception() is None
        assert several.get_future().wait() == [x, y]
        group.allreduce(x, dist.ReduceOp.SUM, SHORT).wait()
        assert x.item() == 2 and group.timeout > SHORT
        group.allreduce_coalesced([x, y]).wait()
        assert (x.item(), y.item()) == (4, 20)

        x = torch.tensor([float(rank)])
        group.broadcast(x, 1).wait()
        assert x.item() == 1
        x = torch.tensor([rank + 1.0])
        group.reduce(x, 1, dist.ReduceOp.PRODUCT).wait()
        assert x.item() == (2 if rank == 1 else 1)

        mine, outputs = torch.tensor([float(rank)]), ranks_as(size, -1)
        group.allgather(outputs, [mine]).wait()
        assert [each.item() for each in outputs[0]] == [0, 1]
        outputs = ranks_as(size, -1)
        group.allgather(outputs[0], mine).wait()
        assert [each.item() for each in outputs[0]] == [0, 1]
        whole = torch.empty(size)
        group._allgather_base(whole, mine).wait()
        assert whole.tolist() == [0, 1]
        group.all_gather_single_coalesced([whole], [mine + 1]).wait()
        assert whole.tolist() == [1, 2]
        lists = [[torch.empty(1)] for _ in range(size)]
        group.allgather_coalesced(lists, [mine]).wait()
        assert [each[0].item() for each in lists] == [0, 1]

        part = torch.empty(1)
        group.reduce_scatter([part], [[torch.tensor([1.0]), torch.tensor([5.0])]]).wait()
        assert part.item() == (2, 10)[rank]
        group.reduce_scatter_single(part, torch.tensor([3.0, 4.0])).wait()
        assert part.item() == (6, 8)[rank]
        group.reduce_scatter_tensor_coalesced([part], [torch.tensor([1.0, 2.0])]).wait()
        assert part.item() == (2, 4)[rank]

        gathered = ranks_as(size, -1) if rank == 0 else []
        group.gather(gathered, [mine], options.GatherOptions(rootRank=0)).wait()
        assert rank == 1 or [each.item() for each in gathered[0]] == [0, 1]
        group.gather_single(whole, mine + 5, options.GatherOptions(rootRank=1)).wait()
        assert rank == 0 or whole.tolist() == [5, 6]
        given = [[torch.tensor([7.0]), torch.tensor([8.0])]] if rank == 1 else []
        group.scatter([part], given, options.ScatterOptions(rootRank=1)).wait()
        assert part.item() == (7, 8)[rank]

        outputs = ranks_as(size, -1)[0]
        group.alltoall(
            outputs, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])]
        ).wait()
        assert [each.item() for each in outputs] == [rank, 10 + rank]
        group.alltoall_base(whole, torch.tensor([10.0 * rank, 10.0 * rank + 1]), [], []).wait()
        assert whole.tolist() == [rank, 10 + rank]

        if rank == 0:
            group.send([torch.tensor([4.0])], 1, 9).wait()
            group.send([torch.tensor([5.0])], 1, 9).wait()
        else:
            group.recv([part], 0, 9).wait()
            assert part.item() == 4
            work = group.recv_anysource([part], 9)
            work.wait()
            assert part.item() == 5 and work.source_rank() == 0
        assert group.barrier().wait() and group.barrier(timeout=SHORT).wait()
        group.monitored_barrier(SHORT)
        before = group._get_sequence_number_for_group()
        group.allreduce(torch.ones(1)).block_current_stream()
        assert group._get_sequence_number_for_group() == before + 1
        assert group.allreduce(torch.ones(1)).get_future_result().wait() == 0
        group._wait_for_pending_works()

        half = group.split_group([rank])
        assert half.size() == 1 and dist.get_process_group_ranks(half) == [rank]
        group.set_timeout(SHORT)
        assert group.timeout == SHORT
        assert group._device_types == [torch.device("cpu")]

    on_threads(2, body)


# spec: U2.attributes a group's store, device, names and end
def test_groups_say_what_they_are():
    def body(rank, size):
        group = dist.new_group([1, 0], group_desc="pair", device_id=torch.device("cpu", 0))
        assert group.bound_device_id == torch.device("cpu", 0)
        assert dist.group.WORLD.bound_device_id is None
        group._set_group_desc("two")
        assert group.group_desc == "two"
        store = group.get_group_store()
        if rank == 0:
            store.set("x", "1")
        assert store.get("x") == b"1"
        assert not c10d._get_default_store().check(["x"])
        assert c10d._resolve_process_group(c10d._get_process_group_name(group)) == group
        assert c10d._get_group_size_by_name(group.group_name) == 2
        assert c10d._get_default_group() == dist.group.WORLD
        with pytest.raises(ValueError, match="no group named 'other'"):
            c10d._resolve_process_group("other")
        assert dist.get_pg_count() == 2
        assert c10d._get_pg_default_device(group).type == c10d._get_object_coll_device() == "cpu"
        tensors = [torch.full((3,), float(rank)), torch.full((2,), rank)]
        c10d._broadcast_coalesced(group, tensors, 1 << 20, 1)
        assert tensors[0].tolist() == [1, 1, 1] and tensors[1].tolist() == [1, 1]
        data, length = c10d._object_to_tensor({"a": rank}, "cpu", group)
        assert c10d._tensor_to_object(data, length, group) == {"a": rank}
        with c10d._coalescing_manager(group) as manager:
            x = torch.ones(1)
            manager.append(dist.all_reduce(x, group=group, async_op=True))
        assert x.item() == 2
        group.shutdown()
        assert dist.get_pg_count() == 1

    on_threads(2, body)
    assert dist.get_pg_count() == 0


# spec: U2.hooks hooks that make calls of their own, also some that fail
def test_hooks_that_make_calls_change_no_numbers():
    def body(rank, size):
        group = dist.new_group()
        after = []
        calls = [
            lambda: dist.barrier(group),
            lambda: dist.broadcast(torch.ones(2), src=7, group=group),
        ]

        def calls_before(call):
            if call.name is options.HookOpName.ALLREDUCE:
                calls[0]()
                with pytest.raises(dist.DistError):
                    calls[1]()

        def calls_after(call):
            if call.name is options.HookOpName.ALLREDUCE:
                calls[0]()

        before = []
        group.register_pre_hook(1, before.append)
        group.register_pre_hook(2, calls_before)
        group.register_post_hook(3, calls_after)
        group.register_post_hook(4, after.append)
        for _ in range(2):
            dist.all_reduce(torch.ones(3), group=group)
        number_of = {each.op_id: each.name for each in before}
        assert len(after) == 6
        for each in after:
            assert number_of[each.op_id] is each.name
        assert len({each.op_id for each in after}) == 6

    on_threads(2, body)


# spec: U2.hooks hooks before and after calls, and at an abort
def test_hooks_see_calls():
    def body(rank, size):
        group = dist.new_group()
        before, after, ended = [], [], []
        group.register_pre_hook(1, before.append)
        group.register_post_hook(2, after.append)
        group.register_abort_hook(3, lambda: ended.append(rank))
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        work = dist.broadcast(x, group_src=1, group=group, async_op=True)
        work.wait()
        names = [each.name for each in before]
        assert names == [each.name for each in after]
        assert names == [options.HookOpName.ALLREDUCE, options.HookOpName.BROADCAST]
        assert [each.op_id for each in before] == [each.op_id for each in after] == [1, 2]
        assert [each.async_op for each in before] == [False, True]
        assert before[0].input_tensors[0].data_ptr() == x.data_ptr()
        assert (before[0].root, before[1].root) == (-1, 1)
        assert after[0].work is None and after[1].work.is_completed()
        dist.all_reduce(x)  # of another group
        group.unregister_pre_hook(1)
        with pytest.raises(KeyError):
            group.unregister_pre_hook(1)
        dist.barrier(group)
        assert len(before) == 2 and after[2].name is options.HookOpName.BARRIER

        def refuse(call):
            raise ZeroDivisionError("not now")

        group.unregister_post_hook(2)
        group._hooks.call = refuse  # what is shown calls while there are hooks
        dist.barrier(group)
        del group._hooks.call

        group.register_pre_hook(4, refuse)
        with pytest.raises(ZeroDivisionError, match="not now"):
            dist.barrier(group)
        dist.barrier()
        group.abort()
        assert ended == [rank]
        with pytest.raises(dist.DistError):
            group.unregister_pre_hook(4)
            dist.barrier(group)

    on_threads(2, body)


# spec: U2 a pre-hook that raises on one member fails the call on the others
def test_hooks_that_raise(monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: ignored.append(told.exc_type))

    def refuse(*call):
        raise ZeroDivisionError("not now")

    def body(rank, size):
        group = dist.new_group()
        if rank == 0:
            group.register_pre_hook(1, refuse)
            group.register_abort_hook(2, refuse)
        with pytest.raises(ZeroDivisionError if rank == 0 else dist.DistError):
            dist.barrier(group)
        group.abort()
        assert dist.get_pg_count() == 2

    on_threads(2, body)
    assert ignored == [ZeroDivisionError]  # the abort went on


class Dictionary(dist.Store):
    """A store of this process alone."""

    def __init__(self):
        super().__init__()
        self.values = {}
        self.changed = threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key):
        self.wait([key], SHORT)
        return self.values[key]

    def add(self, key, amount):
        with self.changed:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            self.changed.notify_all()
            return int(self.values[key])

    def wait(self, keys, timeout):
        with self.changed:
            if not self.changed.wait_for(
                lambda: all(key in self.values for key in keys), timeout.total_seconds()
            ):
                raise TimeoutError(f"no {keys}")

    def check(self, keys):
        return all(key in self.values for key in keys)


# spec: U2.store a Store subclassed in Python meets the ranks of a job
def test_store_subclass():
    store = Dictionary()

    def body(rank):
        dist.init_process_group(store=store, rank=rank, world_size=2)
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        assert x.item() == 3
        dist.destroy_process_group()

    dist.spawn(body, nprocs=2, threads=True)
    assert store.values

    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", "v")
    assert store.values["p/k"] == b"v" and prefixed.get("k") == b"v"
    assert dist.Store.check(store, ["p/k"])
    assert prefixed._underlying_non_prefix_store.check(["p/k"])
    with pytest.raises(dist.DistStoreError, match="Dictionary.*has no method delete_key"):
        prefixed.delete_key("k")
    with pytest.raises(dist.DistStoreError, match="p/absent.*not there after 5 ms"):
        prefixed.wait(["absent"], datetime.timedelta(milliseconds=5))
    kept = dist.PrefixStore("q", Dictionary())  # nothing else holds it
    kept.set("k", "v")
    assert kept.get("k") == b"v"


class Batches(Dictionary):
    """With methods of its own for several keys, and for what is put behind a value."""

    def __init__(self):
        super().__init__()
        self.called = []

    def multi_get(self, keys):
        self.called.append(("multi_get", keys))
        return [self.get(key) for key in keys]

    def multi_set(self, keys, values):
        self.called.append(("multi_set", keys, values))
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key, value):
        self.called.append(("append", key, value))
        self.set(key, self.values.get(key, b"") + value)


# spec: U2 a subclass's own multi_get, multi_set and append are called, through prefixes too
def test_several_keys_of_a_store_subclass():
    store = Batches()
    prefixed = dist.PrefixStore("p", dist.PrefixStore("q", store))
    prefixed.multi_set(["a", "b"], ["1", b"\xff"])
    assert store.called == [("multi_set", ["q/p/a", "q/p/b"], [b"1", b"\xff"])]
    assert prefixed.multi_get(["b", "a"]) == [b"\xff", b"1"]
    assert store.called[1:] == [("multi_get", ["q/p/b", "q/p/a"])]
    prefixed.append("a", "2")
    assert store.called[2:] == [("append", "q/p/a", b"2")]
    assert store.values == {"q/p/a": b"12", "q/p/b": b"\xff"}


# spec: U2 without multi_get and multi_set, its get and set serve several keys
def test_several_keys_of_a_plain_store_subclass():
    store = Dictionary()
    prefixed = dist.PrefixStore("p", store)
    prefixed.multi_set(["a", "b"], ["1", "2"])
    assert store.values == {"p/a": b"1", "p/b": b"2"}
    assert prefixed.multi_get(["b", "a"]) == [b"2", b"1"]
    assert dist.Store.multi_get(store, ["p/b"]) == [b"2"]
    with pytest.raises(dist.DistStoreError, match="Dictionary.*has no method append"):
        prefixed.append("a", "3")


# spec: U2.rendezvous register_rendezvous_handler: a scheme of the program's own
def test_handlers_of_schemes():
    store, asked = dist.HashStore(), []

    def handler(url, timeout=None, **_):
        asked.append((url, timeout))
        yield store, int(url.partition("rank=")[2][0]), 2

    dist.register_rendezvous_handler("mine", handler)
    with pytest.raises(RuntimeError, match="mine://"):
        dist.register_rendezvous_handler("mine", handler)
    with pytest.raises(RuntimeError, match="tcp://"):
        dist.register_rendezvous_handler("tcp", handler)
    with pytest.raises(RuntimeError, match="No rendezvous handler for other://"):
        dist.rendezvous("other://x", 0, 1)
    with pytest.raises(ValueError, match="rank"):
        next(dist.rendezvous("file:///tmp/unused"))
    with pytest.raises(ValueError, match="rank is 1, and 0 in file:///tmp/unused"):
        dist.rendezvous("file:///tmp/unused?rank=0&world_size=2", 1, 2)

    def body(rank):
        dist.init_process_group(init_method="mine://here", rank=rank, world_size=2)
        x = torch.tensor([1.0])
        dist.all_reduce(x)
        assert x.item() == 2
        dist.destroy_process_group()

    dist.spawn(body, nprocs=2, threads=True)
    assert {url for url, _ in asked} == {
        "mine://here?rank=0&world_size=2",
        "mine://here?rank=1&world_size=2",
    }


def test_rendezvous_by_file_and_address(tmp_path):
    store, rank, size = next(dist.rendezvous(f"file://{tmp_path}/meeting", 0, 1))
    assert isinstance(store, dist.FileStore) and (rank, size) == (0, 1)
    store, rank, size = next(dist.rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1"))
    store.set("x", "y")
    assert store.get("x") == b"y" and store.host == "127.0.0.1" and not store.libuvBackend


# spec: U2 ReduceOp's attributes, the maker of PREMUL_SUM
def test_reduce_op_says_what_it_is():
    double = dist._make_nccl_premul_sum(2.0)
    assert (
        double.factor == 2.0
        and double.op == dist.ReduceOp.PREMUL_SUM
        and double.name == "PREMUL_SUM"
    )
    assert dist.ReduceOp.MAX.name == "MAX" and int(dist.ReduceOp.AVG) == dist.ReduceOp.AVG.value
    assert dist.ReduceOp.RedOpType.SUM == dist.ReduceOp(dist.ReduceOp.SUM)

    def body(rank, size):
        x = torch.tensor([3.0])
        dist.all_reduce(x, double)
        assert x.item() == 12

    on_threads(2, body)


def test_errors_that_programs_construct():
    error = dist.DistBackendError("by hand")
    assert error.ranks == () and error.code == "" and isinstance(error, RuntimeError)


def test_backends_by_device():
    config = dist.BackendConfig("cpu:gloo,cuda:nccl")
    assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
    assert repr(config) == "cpu:gloo,cuda:nccl"
    assert dist.BackendConfig(dist.Backend.GLOO).device_backend_map["cpu"] == "gloo"
    with pytest.raises(ValueError, match="cpu"):
        dist.BackendConfig("cpu:gloo,cpu:gloo")
    assert "native" in dist.Backend.backend_list
    dist.BuiltinCommHookType.ALLREDUCE, dist.BarrierOptions(), dist.AllToAllOptions()
    dist.ReduceScatterOptions(), dist.AllreduceCoalescedOptions(), dist.ReduceOptions()
    dist.AllreduceOptions(), dist.BroadcastOptions(), dist.GatherOptions(), dist.ScatterOptions()

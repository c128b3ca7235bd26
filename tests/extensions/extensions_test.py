# SPDX-License-Identifier: BSD-3-Clause
"""Backends of others beside muster: store_backend.cc, which registers itself with stock torch, and
plugin libraries of muster's own kind.
"""

import datetime
import os

import pytest
import torch
import torch.distributed as dist
from ranks import meeting_file, run_ranks

import muster
import muster.torch

CALLS = ["allreduce", "broadcast", "allgather"]
LEDGER, OLD = os.environ["MUSTER_LEDGER_PLUGIN"], os.environ["MUSTER_OLD_PLUGIN"]


def on_ranks(size, backend, body, *, before=lambda: None):
    """Runs body(rank) between torch's init and destroy; the extension is there."""
    meeting = meeting_file()

    def rank_body(rank):
        import store_backend

        assert store_backend.StoreBackend
        before()
        dist.init_process_group(
            backend,
            store=dist.FileStore(meeting, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=60),
        )
        result = body(rank)
        dist.destroy_process_group()
        return result

    return run_ranks(size, rank_body)


def backend_of(group, device="cpu"):
    return (group or dist.group.WORLD)._get_backend(torch.device(device))


def check_calls(rank, group=None, device="cpu"):
    """The extension's calls, on 2 ranks."""
    x = torch.full((3,), rank + 1.0).to(device)
    dist.all_reduce(x, group=group)
    assert x.cpu().tolist() == [3.0] * 3
    work = dist.broadcast(x.add_(rank), src=1, group=group, async_op=True)
    work.wait()
    assert work.is_completed() and x.cpu().tolist() == [4.0] * 3
    parts = [torch.zeros(2).to(device) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)).to(device), group=group)
    assert [part.cpu().tolist() for part in parts] == [[0.0] * 2, [1.0] * 2]
    dist.barrier(group=group)


def muster_and_extension_by_device(rank):
    ours, theirs = backend_of(None, "cpu"), backend_of(None, "deferred")
    assert type(ours).__name__ == "ProcessGroupMuster" and type(theirs).__name__ == "StoreBackend"
    check_calls(rank)
    assert theirs.calls() == []
    check_calls(rank, device="deferred")
    assert theirs.calls() == CALLS  # torch makes barriers by the CPU's backend
    part = dist.new_group([0, 1])
    assert type(backend_of(part, "deferred")).__name__ == "StoreBackend"
    check_calls(rank, part, "deferred")
    check_calls(rank, part)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


# spec: A7 the tensor's device picks the backend of each call in stock torch: muster for one kind,
# another's C++ backend for the other, in either order
@pytest.mark.parametrize("name", ["muster", "gloo"])
@pytest.mark.parametrize("text", ["cpu:{},deferred:over_store", "deferred:over_store,cpu:{}"])
def test_another_backend_in_the_same_group(name, text):
    before = muster.torch.replace_gloo if name == "gloo" else lambda: None
    on_ranks(2, text.format(name), muster_and_extension_by_device, before=before)


def extension_for_two_devices(rank):
    assert type(backend_of(None, "xpu")).__name__ == "StoreBackend"
    muster_and_extension_by_device(rank)


# spec: A7 another's backend for two kinds of devices, muster for the third
@pytest.mark.parametrize(
    "backend",
    [
        "cpu:muster,deferred:over_store,xpu:over_store",
        "xpu:over_store,deferred:over_store,cpu:muster",
    ],
)
def test_another_backend_for_two_devices(backend):
    on_ranks(2, backend, extension_for_two_devices)


def muster_on_the_device(rank):
    check_calls(rank)
    assert backend_of(None).calls() == [*CALLS, "barrier"]
    check_calls(rank, device="deferred")
    assert backend_of(None).calls() == [*CALLS, "barrier", "barrier"]
    dist.reduce(x := torch.ones(2).to("deferred"), 0)  # which the extension has not
    assert x.cpu().tolist() == [2.0 - rank] * 2


# spec: A7 the same with muster for the accelerator
@pytest.mark.parametrize(
    "backend", ["cpu:over_store,deferred:muster", "deferred:muster,cpu:over_store"]
)
def test_muster_for_the_other_device(backend):
    on_ranks(2, backend, muster_on_the_device)


def groups_side_by_side(rank, other):
    group = dist.new_group([0, 1], backend=other)
    theirs = {type(backend_of(each)).__name__ for each in (None, group)}
    assert theirs == {"ProcessGroupMuster", "StoreBackend"}
    for _ in range(2):
        check_calls(rank, group)
        check_calls(rank)
    extension = group if other == "over_store" else None
    assert backend_of(extension).calls() == [*CALLS, "barrier"] * 2
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(2, 2), process_group=extension
    )
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]] * 2
    assert model._get_ddp_logging_data()["backend_name"] == "custom"
    dist.destroy_process_group(group)
    check_calls(rank)


# spec: A11 in stock torch, another's C++ backend in a group of its own, beside muster's: each the
# default group's backend, by muster's name and as gloo
@pytest.mark.parametrize("name", ["muster", "gloo"])
@pytest.mark.parametrize("is_default", [False, True])
def test_another_backend_in_a_group_of_its_own(name, is_default):
    before = muster.torch.replace_gloo if name == "gloo" else lambda: None
    backend, other = ("over_store", name) if is_default else (name, "over_store")
    on_ranks(2, backend, lambda rank: groups_side_by_side(rank, other), before=before)


def init_alone(backend):
    muster.init_process_group(backend, store=muster.HashStore(), rank=0, world_size=1)


# spec: A11 what makes a backend of torch.distributed is none of muster's own package, which says
# where it can be used
def test_a_backend_of_torch_in_the_package():
    import store_backend

    muster.Backend.register_backend("theirs", store_backend.create)
    muster.Backend.register_backend(
        "made", lambda *_: store_backend.create(dist.HashStore(), 0, 1, datetime.timedelta(1))
    )
    for name in ("theirs", "made"):
        with pytest.raises(
            muster.DistError, match=f"(?s)'{name}'.*torch.distributed.*muster.torch"
        ):
            init_alone(name)
        assert not muster.is_initialized()


def ledger(rank, meeting):
    assert muster.load_backend_plugin(LEDGER) == ["ledger"]
    assert muster.Backend("LEDGER") == "ledger" == muster.Backend.LEDGER
    assert muster.Backend.backend_capability["ledger"] == ["cpu"]
    with pytest.raises(muster.DistError, match="there is a backend 'ledger' already"):
        muster.load_backend_plugin(LEDGER)
    muster.init_process_group("ledger", init_method="file://" + meeting, rank=rank, world_size=2)
    assert muster.get_backend() == "ledger"
    muster.all_reduce(x := torch.full((3,), rank + 1.0))
    assert x.tolist() == [3.0] * 3
    with pytest.raises(muster.DistBackendError, match="'ledger' cannot do reduce.*: it has all"):
        muster.reduce(x, 0)
    with pytest.raises(muster.DistBackendError, match="it only sums"):
        muster.all_reduce(x, muster.ReduceOp.MAX)
    both = muster.new_group(backend="cpu:native")
    muster.reduce(x, 0, group=both)
    muster.destroy_process_group()


# spec: A11.plugin a plugin library, loaded from a path in Python; its name becomes an attribute of
# Backend; a second time it is refused
def test_a_plugin_library():
    run_ranks(2, ledger, meeting_file())


# spec: A11.refusal a plugin library of another plugin interface is refused with both numbers
def test_a_plugin_of_another_interface():
    with pytest.raises(
        muster.DistError,
        match="old_plugin.so was made for plugin interface 0, this muster has [1-9]",
    ):
        muster.load_backend_plugin(OLD)

# SPDX-License-Identifier: BSD-3-Clause
"""The Python package on an accelerator: the fake one, which torch has loaded by itself
(muster_test_device.py).
"""

import contextlib
import os

import pytest
import torch
import torch.distributed as stock
from mpi_test import run as run_under_mpirun
from ranks import meeting_file, run_ranks
from rpc_workers import on_workers
from surface_test import CELLS
from torch.nn.parallel import DistributedDataParallel as StockDDP

import muster as dist
import muster.torch
from muster.nn.parallel import DistributedDataParallel

rpc, autograd = dist.rpc, dist.autograd
HERE, THERE = torch.device("deferred", 0), torch.device("deferred", 1)
MAPS = {"worker1": {0: 1, "deferred:2": torch.device("deferred", 3)}}


def on_ranks(size, body, *arguments, backend="cpu:native,deferred:native"):
    meeting = meeting_file()

    def rank_body(rank):
        dist.init_process_group(
            backend,
            init_method="file://" + meeting,
            rank=rank,
            world_size=size,
        )
        result = body(rank, *arguments)
        dist.destroy_process_group()
        return result

    return run_ranks(size, rank_body)


def where_and_twice(x):
    return str(x.device), x * 2


def twice(x):
    return x * 2


def halves_on_another(x):
    return (x / 2).to("deferred:5")


def calls_over_maps(rank):
    if rank == 1:
        return
    x = torch.arange(6.0).view(2, 3).t().to(0)
    place, doubled = rpc.rpc_sync("worker1", where_and_twice, (x,))
    assert place == str(THERE)
    assert doubled.device == HERE and doubled.stride() == x.stride()
    assert torch.equal(doubled.cpu(), x.cpu() * 2)
    assert rpc.rpc_sync("worker1", where_and_twice, (x.to(2),))[0] == "deferred:3"
    later = rpc.rpc_async("worker1", twice, (x,)).wait()
    assert later.device == HERE and torch.equal(later.cpu(), x.cpu() * 2)
    with pytest.raises(
        dist.DistError, match="deferred:1 cannot go to worker 'worker1'.*device_map"
    ):
        rpc.rpc_sync("worker1", twice, (x.to(1),))
    with pytest.raises(dist.DistError, match="deferred:5 cannot go to worker 'worker0'"):
        rpc.rpc_sync("worker1", halves_on_another, (x,))
    assert rpc.rpc_sync("worker1", twice, (torch.ones(1),)).item() == 2  # the worker goes on


# spec: N3 N5 U4.device_maps tensors of accelerators go by the device maps, answers by the inverse,
# or are refused
def test_calls_over_device_maps():
    on_workers(2, calls_over_maps, device_maps=MAPS)


def references_over_maps(rank):
    if rank == 1:
        return
    x = torch.ones(2, 3).to(0).requires_grad_()
    reference = rpc.remote("worker1", twice, (x,))
    assert reference.to_here().device == HERE
    with autograd.context() as context:
        kept = rpc.rpc_sync("worker1", twice, (x,))
        autograd.backward(context, [(kept * 3).sum()])
        gradient = autograd.get_gradients(context)[x]
        assert gradient.device == HERE and torch.equal(gradient.cpu(), torch.full((2, 3), 6.0))
    module = dist.nn.RemoteModule("worker1/deferred:1", torch.nn.Linear, (3, 4))
    weight, bias = (each.to_here() for each in module.remote_parameters())
    assert weight.device == HERE
    expected = torch.nn.functional.linear(torch.ones(2, 3), weight.cpu(), bias.cpu())
    for given in (module(x), module.forward_async(x).wait(), module(torch.ones(2, 3))):
        assert given.device == HERE
        torch.testing.assert_close(given.cpu(), expected)
    with autograd.context() as context:
        autograd.backward(context, [module(x).sum()])
        gradient = autograd.get_gradients(context)[x]
        torch.testing.assert_close(gradient.cpu(), weight.cpu().sum(0).expand(2, 3))


# spec: N14 accelerators in RRef, RemoteModule and autograd work through device maps
def test_references_and_gradients_over_device_maps():
    on_workers(2, references_over_maps, device_maps=MAPS)


def module_without_a_map(rank):
    if rank == 0:
        module = dist.nn.RemoteModule("worker1/deferred:1", torch.nn.Linear, (3, 4))
        assert module(torch.ones(2, 3)).device.type == "cpu"


# spec: N14 without a map, a module on an accelerator answers on the CPU
def test_remote_modules_without_a_map():
    on_workers(2, module_without_a_map)


def object_collectives(rank):
    here = torch.device("deferred", rank)
    objects = [{"of": rank}, "x" * (rank + 1)]
    dist.broadcast_object_list(objects, src=1, device=here)
    assert objects == [{"of": 1}, "xx"]
    if rank == 0:
        dist.send_object_list(objects, dst=1, device=here)
    else:
        received = [None, None]
        assert dist.recv_object_list(received, src=0, device=here) == 0
        assert received == objects
    with pytest.raises(dist.DistError):
        dist.broadcast_object_list(objects, src=0, device=torch.device("meta"))


# spec: G3 bytes travel on `device`
def test_objects_travel_on_the_device():
    on_ranks(2, object_collectives)


def one_device_for_all(rank, count):
    other = 1 - rank

    def full(value, size=count):
        return torch.full((size,), float(value)).to(HERE)

    def is_now(tensor, *values):
        assert tensor.device == HERE
        for part, value in zip(tensor.cpu().chunk(len(values)), values, strict=True):
            assert part.eq(value).all(), (part, value)

    x = full(rank + 1)
    dist.all_reduce(x)
    is_now(x, 3)
    dist.broadcast(x := full(rank), 1)
    is_now(x, 1)
    parts = [full(-1), full(-1)]
    dist.all_gather(parts, full(rank))
    is_now(torch.cat(parts), 0, 1)
    dist.all_gather_into_tensor(whole := full(-1, 2 * count), full(rank))
    is_now(whole, 0, 1)
    dist.reduce_scatter(x := full(-1), [full(rank), full(rank + 10)])
    is_now(x, 1 if rank == 0 else 21)
    dist.reduce_scatter_tensor(x := full(-1), torch.cat([full(rank + 1), full(rank + 5)]))
    is_now(x, 3 if rank == 0 else 11)
    if rank == 0:
        dist.send(full(7), other)
        dist.recv(x, other)
    else:
        dist.recv(x, other)
        dist.send(x * 2, other)
    is_now(x, 14 if rank == 0 else 7)


# spec: A2 processes that share one device, whose tensors go through the host's memory: short ones
# and ones of several MiB
@pytest.mark.parametrize("count", [3, 1 << 20])
def test_ranks_share_a_device(count):
    on_ranks(2, one_device_for_all, count)


def in_stock_torch(rank, meeting, name):
    if name == "gloo":
        muster.torch.replace_gloo()
    stock.init_process_group(
        f"cpu:{name},deferred:{name}",
        store=stock.FileStore(meeting, 2),
        rank=rank,
        world_size=2,
    )
    here = torch.device("deferred", rank)
    for device in (here, "cpu", HERE):
        x = torch.full((3,), rank + 1.0).to(device)
        stock.all_reduce(x)
        assert x.cpu().tolist() == [3.0] * 3
        whole = torch.zeros(6).to(device)
        stock.all_gather_into_tensor(whole, x.mul_(rank + 1))
        assert whole.cpu().tolist() == [3.0] * 3 + [6.0] * 3
        stock.reduce_scatter_tensor(x, whole)
        assert x.cpu().tolist() == [6.0 + 6 * rank] * 3
        stock.broadcast(x, 1, async_op=True).wait()
        assert x.cpu().tolist() == [12.0] * 3
        if rank == 0:
            stock.send(x + 1, 1)
        else:
            stock.recv(x, 0)
            assert x.cpu().tolist() == [13.0] * 3
    model = StockDDP(Layers(1).to(rank), device_ids=[rank])
    model(torch.ones(1, 4)).sum().backward()
    assert all(each.grad.device == here for each in model.parameters())
    stock.destroy_process_group()


# spec: A2 an accelerator's tensors in stock torch, staged through the host's memory, by muster's
# name and as gloo
@pytest.mark.parametrize("name", ["muster", "gloo"])
def test_in_stock_torch(name):
    run_ranks(2, in_stock_torch, meeting_file(), name)


class Layers(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def saved_and_resumed(rank, path):
    def train(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            x = torch.arange(12.0).view(3, 4).cos() * (rank + step + 1)
            model(x).square().mean().backward()  # x is on the CPU
            optimizer.step()

    model = DistributedDataParallel(Layers(1).to(rank), device_ids=[rank])
    assert model.output_device == rank and model.device_ids == [rank]
    train(model, range(3))
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    train(model, range(3, 5))

    other = DistributedDataParallel(Layers(50 + rank).to(rank), device_ids=[rank])
    assert {each.device for each in torch.load(path).values()} == {HERE}, (
        "where rank 0 has saved it"
    )
    states = torch.load(path, map_location={"deferred:0": f"deferred:{rank}"})
    assert all(each.device == torch.device("deferred", rank) for each in states.values())
    other.load_state_dict(states)
    train(other, range(3, 5))
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())
    return [each.tolist() for each in model.state_dict().values()]


# spec: K5 rank 0 saves, barrier, the others load with a device map: each onto its own device
# spec: K9 with device_ids, forward moves inputs of the CPU to the device; output_device is
# device_ids[0]
def test_checkpoint_with_a_device_map(tmp_path):
    first, second = on_ranks(2, saved_and_resumed, str(tmp_path / "checkpoint"))
    assert first == second


def refused_devices(rank):
    model = Layers(1).to(rank)
    for ids, match in (([0, 1], "one process drives one device"), ([rank + 1], "move the module")):
        with pytest.raises(ValueError, match=match):
            DistributedDataParallel(model, device_ids=ids)
    apart = Layers(1)
    apart.first.to(2 * rank), apart.last.to(2 * rank + 1)
    with pytest.raises(ValueError, match="leave it out"):
        DistributedDataParallel(apart, device_ids=[2 * rank])


# spec: K9 more than one id is an error; device_ids is None for models on several devices
def test_devices_that_cannot_be():
    on_ranks(2, refused_devices)


def cells_on_nccl(rank):
    assert dist.is_nccl_available()
    for operation, call in CELLS.items():
        call(torch.ones(4).to(rank), rank)
        if operation == "send" and rank == 1:
            got = torch.zeros(4).to(rank)
            dist.recv(got, 0)
            assert torch.equal(got.cpu(), torch.ones(4))
    x = torch.full((4,), rank + 1.0).to(rank)
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), torch.full((4,), 3.0))
    dist.barrier(device_ids=[rank])
    with pytest.raises(dist.DistBackendError, match="(?s)'nccl'.*cpu"):
        dist.all_reduce(torch.ones(4))
    with pytest.raises(dist.DistBackendError, match="NCCL has no BAND"):
        dist.all_reduce(torch.ones(4, dtype=torch.int64).to(rank), dist.ReduceOp.BAND)
    assert dist.get_backend() == "nccl"


# spec: A12.cuda_on_mpi an accelerator's tensors are staged, or refused by name, on all ranks alike
def test_tensors_on_mpi():
    ended = run_under_mpirun("openmpi", 2, ["devices"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = [line for line in ended.stdout.splitlines() if "all were" in line]
    assert len(said) == 2 and len(set(said)) == 1, ended.stdout


# spec: A12 nccl's cells of the backend tables in Python; a CPU tensor on nccl throws
# DistBackendError
def test_cells_of_nccl():
    on_ranks(2, cells_on_nccl, backend="nccl")


def every_operation_on_nccl(rank):
    def full(value, count=2, dtype=torch.float32):
        return torch.full((count,), value, dtype=dtype).to(rank)

    def is_now(tensor, values):
        assert tensor.cpu().tolist() == values, (tensor.cpu(), values)

    x = full(float(rank + 1))
    dist.all_reduce(x)
    is_now(x, [3, 3])
    dist.broadcast(x := full(float(rank)), 1)
    is_now(x, [1, 1])
    dist.reduce(x := full(float(rank + 1)), 1)
    is_now(x, [1, 1] if rank == 0 else [3, 3])
    parts = [full(-1.0), full(-1.0)]
    dist.all_gather(parts, full(float(rank)))
    is_now(torch.cat(parts), [0, 0, 1, 1])
    uneven = [full(-1.0, 3), full(-1.0, 1)]
    dist.all_gather(uneven, full(float(rank), 3 - 2 * rank))
    is_now(torch.cat(uneven), [0, 0, 0, 1])
    dist.all_gather_into_tensor(whole := full(-1.0, 4), full(float(rank)))
    is_now(whole, [0, 0, 1, 1])
    dist.gather(full(float(rank)), parts if rank == 1 else None, dst=1)
    if rank == 1:
        is_now(torch.cat(parts), [0, 0, 1, 1])
    dist.scatter(x, [full(5.0), full(6.0)] if rank == 0 else None, src=0)
    is_now(x, [5 + rank] * 2)
    dist.reduce_scatter(x, [full(1.0), full(2.0)])
    is_now(x, [2 * rank + 2] * 2)
    dist.reduce_scatter_tensor(x, full(float(rank), 4))
    is_now(x, [1, 1])
    dist.all_to_all(parts, [full(float(rank)), full(rank + 1.0)])
    is_now(torch.cat(parts), [rank, rank, 1 + rank, 1 + rank])
    out = full(-1.0, 2 if rank == 0 else 4)
    dist.all_to_all_single(out, full(float(rank), 3), [1 + rank, 1 + rank], [1, 2])
    is_now(out, [0, 1] if rank == 0 else [0, 0, 1, 1])
    dist.all_reduce_coalesced(both := [full(1.0), full(2.0, 3)])
    is_now(torch.cat(both), [2, 2, 4, 4, 4])
    if rank == 0:
        dist.send(full(7.0), 1)
    else:
        dist.recv(x, 0)
        is_now(x, [7, 7])
    got = full(-1.0)
    ops = [
        dist.P2POp(dist.isend, full(float(rank)), 1 - rank),
        dist.P2POp(dist.irecv, got, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    is_now(got, [1 - rank] * 2)
    torch.accelerator.set_device_index(rank)  # on which objects travel
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    reduce_op = dist.ReduceOp
    for op, result in ((reduce_op.PRODUCT, 2), (reduce_op.MIN, 1), (reduce_op.MAX, 2)):
        dist.all_reduce(x := full(rank + 1, dtype=torch.int32), op)
        is_now(x, [result, result])
    dist.all_reduce(x := full(float(rank)), reduce_op.AVG)
    is_now(x, [0.5, 0.5])
    dist.all_reduce(x := full(rank + 1.0), dist._make_nccl_premul_sum(2.0))
    is_now(x, [6, 6])
    for op in ("BAND", "BOR", "BXOR"):
        with pytest.raises(dist.DistBackendError, match=f"'nccl'.*NCCL has no {op}"):
            dist.all_reduce(full(1, dtype=torch.int32), getattr(reduce_op, op))
    dist.all_reduce(x := full(1.0))  # the group stays usable
    is_now(x, [2, 2])


# spec: A3 nccl in Python: every operation that NCCL has, on an accelerator's tensors; BAND, BOR and
# BXOR are refused by name, and the group stays usable
def test_every_operation_of_nccl():
    on_ranks(2, every_operation_on_nccl, backend="nccl")


def usable_after_wait(rank):
    x = torch.ones(4).to(rank)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed()
    assert (x * 2).cpu().tolist() == [8] * 4  # on the stream that was current at wait


def completed_on_a_device_that_hangs(rank, meeting):
    os.environ["NCCL_STANDIN_HANG"] = "1:2"
    dist.init_process_group(
        "cpu:native,deferred:nccl", init_method="file://" + meeting, rank=rank, world_size=2
    )
    x = torch.ones(4).to(rank)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()  # the device never gets there
    assert work.is_completed()
    dist.barrier()
    dist.abort_process_group()
    with contextlib.suppress(dist.DistError):
        dist.destroy_process_group()


# spec: F21 in Python: a Work on an accelerator is completed, and wait returns, once the operation
# is enqueued; its output is then usable on the current stream
def test_a_work_is_completed_once_enqueued():
    on_ranks(2, usable_after_wait, backend="nccl")
    run_ranks(2, completed_on_a_device_that_hangs, meeting_file())

# SPDX-License-Identifier: BSD-3-Clause
"""fully_shard over meshes of several dimensions: tensor parallelism below it, replicas, names."""

import copy
import os

import pytest
import torch
from sharded_programs import Job, Net, Sharded, notes_of
from torch import nn
from torch.distributed.tensor import DTensor
from training import on_ranks

import muster as dist
from muster import checkpoint, fsdp
from muster.fsdp import fully_shard
from muster.tensor import Replicate, as_torch
from muster.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def parallel(job):
    """torchtitan's order: tensor parallelism first, then the rest of the mesh."""
    model = Net()
    sizes = {1: (1, 1), 2: (1, 2), 4: (2, 2)}[job.size]
    mesh = job.mesh(sizes, ("dp", "tp"))
    if mesh is None:
        job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return model
    for block in model.blocks:
        plan = {"up": job.parallel.ColwiseParallel(), "down": job.parallel.RowwiseParallel()}
        job.parallel.parallelize_module(block, mesh["tp"], plan)
    job.net(model, mesh=mesh["dp"])
    up = model.blocks[0].up.weight
    assert up.shape == (24, 12) and up.device_mesh.ndim == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = mesh.get_local_rank("dp")
    for step in range(3):
        job.rank, rank = place, job.rank  # data by the place in "dp"
        job.loss(model, step).backward()
        job.rank = rank
        optimizer.step()
        optimizer.zero_grad()
    return model


def as_alone(rank, size, kind):
    job = Job(rank, {1: 1, 2: 1, 4: 2}[size])
    job.mesh, job.size_of_mesh = (lambda *_: None), size
    alone = Net()
    job.steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    expected = job.whole(alone)
    weights, _ = notes_of(Sharded(kind, rank, size), parallel)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


# spec: M5, T3.tensor tensor parallelism below fully_shard gives one process's weights
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel(size):
    on_ranks(size, as_alone, "ours")


if "MUSTER_TEST_LONG" in os.environ:

    @pytest.mark.parametrize("size", [2, 4])
    def test_stock_tensor_parallel(size):
        on_ranks(size, as_alone, "stock", gloo=True)


def two_dimensional(mesh, **options):
    model = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        fsdp.fully_shard(block, mesh=mesh["dp"], **options)
    return fsdp.fully_shard(model, mesh=mesh["dp"], **options)


def states(rank, size, path):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = two_dimensional(mesh)
    full = fsdp.StateDictOptions(full_state_dict=True)
    expected = Net().state_dict()
    state = fsdp.get_model_state_dict(model, options=full)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    doubled = {name: each * 2 for name, each in expected.items()}
    fsdp.set_model_state_dict(model, doubled, options=full)
    for name, each in model.named_parameters():
        assert torch.equal(each.full_tensor(), doubled[name])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    alone, reference = Net(), None
    alone.load_state_dict(doubled)
    reference = torch.optim.Adam(alone.parameters(), lr=0.01)
    job, data = Job(rank, 2), Sharded("ours", mesh.get_local_rank("dp"), 2)
    data.loss(model, 0).backward()
    job.loss(alone, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), norm, rtol=1e-12, atol=0)
    optimizer.step()
    reference.step()
    for name, each in model.named_parameters():
        torch.testing.assert_close(
            each.full_tensor(), alone.get_parameter(name), rtol=1e-9, atol=1e-11
        )
    of = fsdp.get_optimizer_state_dict(model, optimizer, options=full)
    for number, (name, _) in enumerate(alone.named_parameters()):
        theirs = reference.state_dict()["state"][number]["exp_avg"]
        torch.testing.assert_close(of["state"][name]["exp_avg"], theirs, rtol=1e-9, atol=1e-12)
    other = two_dimensional(mesh)
    again = torch.optim.Adam(other.parameters(), lr=0.01)
    fsdp.set_state_dict(
        other,
        again,
        model_state_dict=fsdp.get_model_state_dict(model, options=full),
        optim_state_dict=of,
        options=full,
    )
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
        assert torch.equal(
            again.state[mine]["exp_avg"].full_tensor(),
            optimizer.state[theirs]["exp_avg"].full_tensor(),
        )


# spec: M5 whole states, clipping and states of optimizers over two dimensions
def test_states_over_two_dimensions(tmp_path):
    on_ranks(4, states, str(tmp_path))


def resharded(rank, size, path):
    model = fsdp.fully_shard(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    Sharded("ours", rank, size).steps(model, optimizer, 2)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = Net()
    for block in other.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(other, mesh=mesh, shard_placement_fn=last)
    fresh = torch.optim.Adam(other.parameters(), lr=0.01)
    checkpoint.load({"model": other, "optimizer": fresh}, checkpoint_id=path)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
        assert torch.equal(
            fresh.state[mine]["exp_avg_sq"].full_tensor(),
            optimizer.state[theirs]["exp_avg_sq"].full_tensor(),
        )


def by_torchs_checkpoint(rank, size, path):
    import torch.distributed.checkpoint as dcp

    model = fsdp.fully_shard(Net())
    with torch.no_grad():
        model.scale.fill_(3)
    dcp.save({"model": model.state_dict(), "step": 5}, checkpoint_id=path)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = fsdp.fully_shard(Net(), mesh=mesh, shard_placement_fn=last)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    state = {"model": other.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    assert state["step"] == 5 and not torch.distributed.is_initialized()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


# spec: M5 torch's own DCP saves and loads the DTensors
def test_torchs_checkpoints(tmp_path):
    on_ranks(4, by_torchs_checkpoint, str(tmp_path / "c"))


def last(parameter):
    from muster.tensor import Shard

    return Shard(-1)


# spec: M5 K8 a checkpoint of rows loads into another division
def test_checkpoints_are_divided_anew(tmp_path):
    on_ranks(4, resharded, str(tmp_path / "c"))


def by_names(rank, size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    expected = Job(rank, size)
    alone = Net()
    expected.steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 2)
    dims = fsdp.DataParallelMeshDims
    for names in (
        dims(shard="a", replicate="b"),  # another order than the mesh's
        dims(shard="b", replicate="a"),
        dims(shard=("a", "b")),
        dims(replicate=("a", "b")),
    ):
        model = fsdp.fully_shard(Net(), mesh=mesh, dp_mesh_dims=names)
        assert isinstance(model.head.weight, DTensor)
        job = Sharded("ours", rank, size)
        job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        for name, each in model.named_parameters():
            torch.testing.assert_close(
                each.full_tensor(), alone.get_parameter(name), rtol=1e-12, atol=1e-12
            )
    model = fsdp.fully_shard(Net(), mesh=as_torch(mesh))
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert model.head.weight.full_tensor().allclose(alone.head.weight, rtol=1e-12)


# spec: M5 dp_mesh_dims in any order, and torch's mesh
def test_dimensions_by_name():
    on_ranks(4, by_names)


def without_a_common_mesh(rank, size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
    for over in (None, other, mesh["tp"]):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        with pytest.raises(dist.DistArgumentError, match="0.weight is (a DTensor|divided) over"):
            fsdp.fully_shard(model, mesh=over)


# spec: M5.refusal tensor parallelism over another mesh
def test_no_common_mesh():
    on_ranks(4, without_a_common_mesh)


def assert_gradients_as_alone(model, alone, place, size):
    def rows(at):
        return torch.arange(8.0).double().reshape(2, 4) + 10 * at

    model(rows(place)).square().mean().backward()
    alone(torch.cat([rows(at) for at in range(size)])).square().mean().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=0, atol=0)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)


def meshes_of_torch(rank, size):
    """Meshes without names, equal ones, of which torch keeps the first, and one with dp and tp in
    the other order.
    """

    def pair():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 4)).double()
        return model, copy.deepcopy(model)

    mesh = as_torch(dist.init_device_mesh("cpu", (2, 2)))
    model, alone = pair()
    fully_shard(model, mesh=mesh)
    assert model[0].weight.to_local().shape == (2, 4)
    assert_gradients_as_alone(model, alone, rank, size)
    for names in (("dp", "tp"), ("dp", "tp"), ("tp", "dp")):
        mesh = as_torch(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        model, alone = pair()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp"])
        assert model[0].weight.to_local().shape == (1, 4)
        assert_gradients_as_alone(model, alone, mesh.get_local_rank("dp"), 2)


# spec: M5 T8 meshes that torch takes: without names, and a second one of the same shape
def test_meshes_of_torch():
    on_ranks(4, meshes_of_torch)


def norm_of(parameters, norm_type):
    return torch.nn.utils.get_total_norm([each.grad for each in parameters], norm_type)


def clipped(rank, size):
    """Parameters in no unit have another gradient on each rank, and some ranks no row of a bias."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for norm_type in (2.0, 3.0, torch.inf):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(1, 2)).double()
        alone = [each.detach().clone() for each in model[:2].parameters()]
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"], ignored_params=set(model[2].parameters()))
        for part, whole in zip(model[:2].parameters(), alone, strict=True):
            whole.grad = whole * 5
            part.grad = part.detach() * 5
        for each in model[2].parameters():
            each.grad = torch.full_like(each, rank + 1.0)
        power = 4 * sum((1 + each) ** norm_type for each in range(size)) / size
        expected = norm_of(alone, norm_type)
        if norm_type == torch.inf:
            expected = max(expected, torch.tensor(4.0).double())
        else:
            expected = (expected**norm_type + power) ** (1 / norm_type)
        found = model.clip_grad_norm_(1.0, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for part, whole in zip(model[:2].parameters(), alone, strict=True):
            scaled = whole.grad / (expected + 1e-6)
            torch.testing.assert_close(part.grad.full_tensor(), scaled, rtol=1e-12, atol=0)
        for wrong in (-1.0, 0.0, torch.nan):
            with pytest.raises(dist.DistArgumentError, match="norm_type is"):
                model.clip_grad_norm_(1.0, wrong)


# spec: M5, T3.tensor clipping with plain gradients that differ, and with ranks that have no row
def test_clipping_with_plain_gradients():
    on_ranks(4, clipped)

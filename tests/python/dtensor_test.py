# SPDX-License-Identifier: BSD-3-Clause
"""DTensor over muster's groups, without torch.distributed.init_process_group."""

import pytest
import torch
import torch.distributed
from ranks import meeting_file, run_ranks
from thread_ranks import on_threads
from torch import nn
from torch.distributed.tensor import DTensor

import muster as dist
from muster.fsdp import fully_shard
from muster.tensor import Partial, Replicate, Shard, _meshes, as_torch, distribute_tensor
from muster.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def on_ranks(size, body, *arguments):
    meeting = meeting_file()

    def rank_body(rank):
        dist.init_process_group(init_method=f"file://{meeting}", rank=rank, world_size=size)
        result = body(rank, size, *arguments)
        dist.destroy_process_group()
        return result

    return run_ranks(size, rank_body)


def whole(*sizes):
    return torch.arange(float(torch.Size(sizes).numel()), dtype=torch.float64).reshape(sizes)


# spec: T8.tensor a DTensor is divided, changed and gathered over muster's groups
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_placements_change_as_torchs_do(size):
    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        x = distribute_tensor(whole(5, 6), mesh, [Shard(0)])
        assert isinstance(x, DTensor) and x.device_mesh == as_torch(mesh)
        assert torch.equal(x.to_local(), whole(5, 6)[slice_of(5, size, rank)])
        assert torch.equal(x.full_tensor(), whole(5, 6))
        other = x.redistribute(placements=[Shard(1)])
        assert torch.equal(other.to_local(), whole(5, 6)[:, slice_of(6, size, rank)])
        assert torch.equal(other.redistribute(placements=[Replicate()]).to_local(), whole(5, 6))
        part = DTensor.from_local(torch.full((3,), rank + 1.0), as_torch(mesh), [Partial()])
        assert torch.equal(part.full_tensor(), torch.full((3,), size * (size + 1) / 2))
        assert (x @ other.t()).full_tensor().equal(whole(5, 6) @ whole(5, 6).t())
        assert x.norm().full_tensor().isclose(whole(5, 6).norm(), rtol=1e-14)
        assert not torch.distributed.is_initialized()

    on_ranks(size, body)


def slice_of(rows, size, rank):
    each = -(-rows // size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


# spec: T8.tensor parts and flattened dimensions of a mesh are those of torch's mesh
def test_meshes_of_several_dimensions():
    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torchs = as_torch(mesh)
        assert torchs.mesh.tolist() == mesh.mesh.tolist() and as_torch(mesh) is torchs
        assert torchs.get_coordinate() == mesh.get_coordinate()
        for name in ("dp", "tp"):
            part = as_torch(mesh[name])
            assert part == torchs[name] and part._get_root_mesh() is torchs
            assert torchs.get_local_rank(name) == mesh.get_local_rank(name)
            assert part.get_group() is torchs.get_group(name)
            assert torch.distributed.get_backend(part.get_group()) == "muster"
            ranks = torch.distributed.get_process_group_ranks(part.get_group())
            assert ranks == dist.get_process_group_ranks(mesh.get_group(name))
        flat = mesh["dp", "tp"]._flatten("both")
        assert as_torch(flat).mesh.tolist() == [0, 1, 2, 3]
        x = distribute_tensor(whole(4, 4), mesh, [Shard(0), Shard(1)])
        place = slice_of(4, 2, rank // 2), slice_of(4, 2, rank % 2)
        assert torch.equal(x.to_local(), whole(4, 4)[place])
        assert torch.equal(x.full_tensor(), whole(4, 4))
        y = distribute_tensor(whole(4, 4), mesh["tp"], [Shard(1)])
        assert torch.equal(y.full_tensor(), whole(4, 4))
        with mesh["tp"]:
            assert distribute_tensor(whole(4), None, [Shard(0)]).to_local().numel() == 2
        unnamed = dist.init_device_mesh("cpu", (2, 2))
        z = distribute_tensor(whole(4, 4), unnamed, [Replicate(), Shard(0)])
        assert torch.equal(z.full_tensor(), whole(4, 4))
        with pytest.raises(dist.DistArgumentError, match="takes a DeviceMesh, and a int"):
            distribute_tensor(whole(4), 5)

    on_ranks(4, body)


# spec: T8.tensor meshes end with their groups, and others take their place
def test_meshes_end_with_their_groups():
    def body(rank):
        for name in names:
            dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
            mesh = as_torch(dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
            rows = distribute_tensor(whole(4), mesh, [Shard(0)])
            assert torch.equal(rows.full_tensor(), whole(4))
            dist.destroy_process_group()
            assert not _meshes._roots

    names = [meeting_file() for _ in range(3)]
    run_ranks(2, body)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.LayerNorm(6)).double()


# spec: T8.parallel torch's styles of tensor parallelism give one process's losses and gradients
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parallel_styles(size):
    torch.manual_seed(3)
    x = torch.randn(6, 6, dtype=torch.float64)
    model = mlp()
    model(x).pow(2).sum().backward()
    expected = {name: each.grad for name, each in model.named_parameters()}

    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
            "3": SequenceParallel(sequence_dim=0, use_local_output=False),
        }
        ours = parallelize_module(mlp(), mesh, plan)
        ours = parallelize_module(
            ours,
            mesh,
            PrepareModuleInput(
                input_layouts=Replicate(),
                desired_input_layouts=Shard(0),
                use_local_output=True,
            ),
        )
        out = ours(x)
        assert out.full_tensor().allclose(mlp()(x), rtol=1e-12)
        out.pow(2).sum().full_tensor().backward()
        for name, each in ours.named_parameters():
            assert each.grad.full_tensor().allclose(expected[name], rtol=1e-12), name

    on_ranks(size, body)


# spec: T8.tensor norms, clipping and optimizers of torch are right for DTensors
@pytest.mark.parametrize("kind", ["sgd", "foreach", "fused", "adagrad"])
def test_torchs_clipping_and_optimizers(kind):
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }[kind]

    def train(parameters):
        optimizer = make(parameters)
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            sum((each * (each + step)).sum() for each in parameters).backward()
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
        return norms

    alone = [nn.Parameter(whole(5, 3)), nn.Parameter(whole(7))]
    norms = train(alone)

    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        ours = [
            nn.Parameter(distribute_tensor(whole(*s), mesh, [Shard(0)])) for s in ((5, 3), (7,))
        ]
        for mine, theirs in zip(train(ours), norms, strict=True):
            assert mine.isclose(theirs, rtol=1e-13)
        for mine, theirs in zip(ours, alone, strict=True):
            assert mine.full_tensor().allclose(theirs, rtol=1e-12)

    on_ranks(3, body)


# spec: T8.tensor torch's own init beside it, first or later; its end does not end ours
@pytest.mark.parametrize("theirs_first", [True, False])
def test_beside_torchs_own_groups(theirs_first, tmp_path):
    def body(rank, size, path):
        def init():
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{path}", rank=rank, world_size=size
            )

        if theirs_first:
            init()
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        x = distribute_tensor(whole(6), mesh, [Shard(0)])
        if not theirs_first:
            init()
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total == size and torch.equal(x.full_tensor(), whole(6))
        theirs = torch.distributed.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        other = torch.distributed.tensor.distribute_tensor(whole(6), theirs, [Shard(0)])
        assert torch.equal(other.full_tensor(), whole(6))
        assert torch.distributed.get_backend() == "gloo"
        assert torch.distributed.get_backend(x.device_mesh.get_group()) == "muster"
        group = torch.distributed.new_group([0])
        assert group is not None
        torch.distributed.destroy_process_group()
        assert not torch.distributed.is_initialized()
        assert torch.equal(x.full_tensor(), whole(6))
        assert torch.equal(distribute_tensor(whole(4), mesh, [Shard(0)]).full_tensor(), whole(4))
        with pytest.raises(dist.DistArgumentError, match="muster.destroy_process_group ends it"):
            torch.distributed.destroy_process_group(x.device_mesh.get_group())
        assert torch.equal(x.full_tensor(), whole(6))

    on_ranks(2, body, tmp_path / "theirs")


# spec: T8.tensor a DTensor of a group that has ended fails by name; a second default group has its
# own
def test_a_second_default_group():
    meetings = [meeting_file(), meeting_file()]

    def rank_body(rank):
        kept = []
        for meeting in meetings:
            dist.init_process_group(init_method=f"file://{meeting}", rank=rank, world_size=2)
            mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
            kept.append(distribute_tensor(whole(6), mesh, [Shard(0)]))
            assert torch.equal(kept[-1].full_tensor(), whole(6))
            assert torch.equal((kept[-1] * 2).full_tensor(), whole(6) * 2)
            dist.destroy_process_group()
            with pytest.raises(RuntimeError, match="muster:"):
                kept[-1].full_tensor()

    run_ranks(2, rank_body)


# spec: T8.refusal calls on the part that a rank has of a DTensor are refused on all ranks
@pytest.mark.parametrize(
    "call",
    [
        dist.all_reduce,
        lambda x: dist.broadcast(x, src=0),
        lambda x: dist.all_gather([x, x], x),
        lambda x: dist.all_gather_into_tensor(x, torch.ones(2)),
        lambda x: dist.reduce_scatter_tensor(torch.ones(2), x),
        lambda x: dist.all_reduce_coalesced([torch.ones(4), x]),
        lambda x: dist.all_to_all_single(x, x),
        lambda x: dist.send(x, 1 - dist.get_rank()),
    ],
)
def test_calls_refuse_a_dtensor(call):
    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        for each in (whole(4), nn.Parameter(whole(4))):
            x = distribute_tensor(each, mesh, [Shard(0)])
            before = x.to_local().clone()
            with pytest.raises(dist.DistArgumentError, match="is a DTensor.*to_local()"):
                call(x)
            assert torch.equal(x.to_local(), before)

    on_ranks(2, body)


# spec: T8.refusal wrappers that would keep a copy of each part, or divide it again
def test_ddp_and_zero_refuse_dtensors():
    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel()})
        with pytest.raises(dist.DistArgumentError, match="Parallel: 0.weight, 0.bias are DTensors"):
            dist.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(dist.DistArgumentError, match="parameters: 0, 1 are DTensors"):
            dist.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        ignored = [name for name, _ in model[0].named_parameters(prefix="0")]
        model._ddp_params_and_buffers_to_ignore = ignored
        dist.nn.parallel.DistributedDataParallel(model)

    on_ranks(2, body)


# spec: T8.tensor ranks that are threads have meshes of their own
def test_ranks_as_threads():
    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        x = distribute_tensor(whole(5), mesh, [Shard(0)])
        assert torch.equal(x.to_local(), whole(5)[slice_of(5, size, rank)])
        assert torch.equal(x.full_tensor(), whole(5))
        dist.barrier()

    on_threads(3, body)


# spec: T8.tensor compiled functions of DTensors
def test_compiled():
    def body(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))

        @torch.compile(backend="aot_eager", fullgraph=True)
        def double(x):
            return (x * 2).redistribute(placements=[Replicate()]).to_local()

        assert torch.equal(double(distribute_tensor(whole(6), mesh, [Shard(0)])), whole(6) * 2)

    on_ranks(2, body)


# spec: T8 calls take torch's object over a group, which a mesh gives that torch's functions take
def test_calls_take_a_group_of_a_mesh():
    def body(rank, size):
        mesh = as_torch(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")))
        group = mesh.get_group("columns")
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, group=group)
        assert x[0] == 4 * (rank // 2) + 1
        assert dist.get_world_size(group) == 2
        assert dist.get_process_group_ranks(group) == [2 * (rank // 2), 2 * (rank // 2) + 1]
        found = [None, None]
        dist.all_gather_object(found, rank, group=group)
        assert found == dist.get_process_group_ranks(group)
        model = fully_shard(nn.Linear(4, 4), process_group=group)
        assert model.weight.to_local().shape == (2, 4)
        theirs = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
        with pytest.raises(dist.DistArgumentError, match="is torch.distributed's own.*new_group"):
            dist.all_reduce(x, group=theirs)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            dist.all_reduce(x, group="columns")

    on_ranks(4, body)

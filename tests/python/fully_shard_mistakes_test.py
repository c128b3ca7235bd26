# SPDX-License-Identifier: BSD-3-Clause
"""What cannot be right with fully_shard raises by name; what looks odd and is right is right."""

import copy
import dataclasses
import gc
import io
import weakref

import pytest
import torch
from sharded_programs import Block, Job, Net, Sharded, batch, loss_of
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from training import on_ranks

import muster as dist
from muster import fsdp
from muster.fsdp import fully_shard
from muster.tensor import Replicate, Shard, distribute_tensor
from muster.tensor.parallel import ColwiseParallel, parallelize_module


def job_of(rank, size):
    job = Sharded("ours", rank, size)
    model = job.net()
    return job, model, torch.optim.SGD(model.parameters(), lr=0.1)


def assert_as_alone(model, size, steps):
    job, alone = Job(0, size), Net()
    job.steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), steps)
    for name, each in model.named_parameters():
        torch.testing.assert_close(
            each.full_tensor(), alone.get_parameter(name), rtol=1e-12, atol=1e-12
        )


class Broken(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.breaks = inner, False

    def forward(self, x):
        x = self.inner(x)
        if self.breaks:
            raise KeyError("between")
        return x


def exceptions(rank, size):
    model = Net()
    model.blocks[0] = Broken(model.blocks[0])
    fully_shard([model.table, model.head])
    fully_shard(model.blocks[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[0].breaks = True
    with pytest.raises(KeyError, match="between"):
        loss_of(model, rank, 0)
    model.blocks[0].breaks = False
    assert all(isinstance(each, DTensor) for each in model.parameters())
    Sharded("ours", rank, size).steps(model, optimizer, 2)
    job, alone = Job(rank, size), Net()
    job.steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 2)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


# spec: M5 an exception between modules of one unit leaves all of them as they were
def test_exceptions_between_modules():
    on_ranks(2, exceptions)


def states_while_whole(rank, size):
    job, model, optimizer = job_of(rank, size)
    expected = {name: each.full_tensor() for name, each in model.named_parameters()}
    for module in (model, *model.blocks):
        module.unshard()
    assert type(model.head.weight) is nn.Parameter
    state = model.state_dict()
    assert all(isinstance(each, DTensor) for each in state.values())
    for name, each in state.items():
        assert torch.equal(each.full_tensor(), expected[name])
    for module in (model, *model.blocks):
        module.unshard()
    model.load_state_dict({name: each * 1 for name, each in state.items()})
    job.steps(model, optimizer, 2)
    assert_as_alone(model, size, 2)

    class Curious(nn.Linear):
        def forward(self, x):
            self.state_dict()
            return super().forward(x)

    curious = fully_shard(Curious(4, 4))
    with pytest.raises(dist.DistArgumentError, match="state_dict is taken and loaded between"):
        curious(torch.ones(2, 4))


# spec: M5 state_dict and load_state_dict while parameters are whole
def test_states_while_whole():
    on_ranks(2, states_while_whole)


def optimizers_before(rank, size):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Sharded("ours", rank, size).net(model)
    loss_of(model, rank, 0).backward()
    with pytest.raises(dist.DistArgumentError, match="make the optimizer after sharding"):
        optimizer.step()
    for group in optimizer.param_groups:  # as accelerate does
        group["params"] = list(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert_as_alone(model, size, 1)


# spec: M5 an optimizer that was made before sharding is refused by name
def test_optimizers_made_before():
    on_ranks(2, optimizers_before)


def hooks_before(rank, size):
    model, seen = Net(), []
    alone = Net()
    model.head.weight.register_post_accumulate_grad_hook(seen.append)
    model.table.register_forward_pre_hook(lambda module, _: seen.append(module.weight.shape))
    weights = []
    job = Sharded("ours", rank, size)
    handle = model.scale.register_hook(weights.append)
    with pytest.raises(dist.DistArgumentError, match="scale has a hook on its gradient"):
        fully_shard(model)
    handle.remove()
    job.net(model)
    model.scale.register_hook(lambda gradient: weights.append(gradient) or gradient * 2)
    job.loss(model, 0).backward()
    assert seen[0] == (10, 12) and seen[1] is model.head.weight and len(seen) == 2
    Job(rank, size).loss(alone, 0).backward()
    torch.testing.assert_close(seen[1].grad.full_tensor(), alone.head.weight.grad)
    torch.testing.assert_close(weights[0].full_tensor(), alone.scale.grad)
    torch.testing.assert_close(model.scale.grad.full_tensor(), alone.scale.grad * 2)


# spec: M5 hooks that were registered before sharding
def test_hooks_registered_before():
    on_ranks(2, hooks_before)


def ignored_dtensors(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    model = Net()
    model.scale = nn.Parameter(distribute_tensor(torch.ones(3).double(), mesh, [Shard(0)]))
    fully_shard(model, ignored_params={model.scale})
    model.head.weight.grad = model.head.weight.detach() * 0 + 2
    model.scale.grad = distribute_tensor(torch.full((3,), 3.0).double(), mesh, [Shard(0)])
    norm = model.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, torch.tensor((120 * 4 + 27) ** 0.5).double())
    torch.testing.assert_close(model.scale.grad.full_tensor(), (3 / (norm + 1e-6)).expand(3))


# spec: M5 a DTensor that is ignored counts once in the norm
def test_ignored_dtensors():
    on_ranks(3, ignored_dtensors)


def replaced(rank, size):
    job, model, _ = job_of(rank, size)
    kept = model.head.weight
    model.head.weight = nn.Parameter(torch.zeros(10, 12).double())
    for again in (lambda: job.loss(model, 0), model.state_dict, model.unshard):
        with pytest.raises(dist.DistArgumentError, match="head.weight was replaced by assignment"):
            again()
    model.head.weight = kept
    with pytest.raises(RuntimeError, match="DTensor"):
        nn.functional.linear(torch.ones(2, 12).double(), model.head.weight)
    model.float()
    with pytest.raises(dist.DistArgumentError, match="convert a module before it is sharded"):
        job.loss(model, 0)
    with pytest.raises(dist.DistArgumentError, match="shared with a unit"):
        other = nn.Linear(12, 10)
        other.weight = job.net().blocks[0].norm.weight
        fully_shard(other)
    for wrong, what in (
        (nn.ParameterList([torch.ones(())]), "no dimension"),
        (nn.Linear(2, 2), "has 1 dimensions, and Shard\\(1\\)"),
    ):
        with pytest.raises(dist.DistArgumentError, match=what):
            fully_shard(wrong, shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(dist.DistArgumentError, match="gave Replicate"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: Replicate())


# spec: M5.refusal replacing, converting or sharing a parameter, and using it outside of its unit
def test_replaced_parameters():
    on_ranks(2, replaced)


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    number: int = 3


def dataclass_inputs(rank, size):
    class Reads(nn.Linear):
        def forward(self, inputs):
            assert inputs.x.dtype == torch.bfloat16 and inputs.number == 3
            return Inputs(super().forward(inputs.x))

    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Reads(4, 4), mp_policy=policy)
    given = Inputs(torch.ones(2, 4, requires_grad=True))
    out = model(given)
    assert out.x.dtype == torch.float32 and given.x.dtype == torch.float32
    out.x.sum().backward()
    assert model.weight.grad.dtype == torch.float32 and given.x.grad is not None


# spec: M5 mixed precision casts inputs inside of dataclasses
def test_inputs_in_dataclasses():
    on_ranks(2, dataclass_inputs)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        x.mul_(2)
        return self.last(x)


def in_place_between(rank, size):
    torch.manual_seed(5)
    alone = InPlace().double()
    torch.manual_seed(5)
    model = InPlace().double()
    fully_shard([model.first, model.last])
    fully_shard(model)
    x = torch.arange(8.0).double().reshape(2, 4)
    model(x).pow(2).sum().backward()
    alone(x).pow(2).sum().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)


# spec: M5 an output changed in place between two modules of one unit
def test_outputs_changed_in_place():
    on_ranks(2, in_place_between)


def forgotten_init(rank, size):
    with torch.device("meta"):
        model = Block()
    fully_shard(model)
    assert all(each.full_tensor().isnan().all() for each in model.parameters())
    assert model(torch.ones(2, 12)).isnan().all()
    model.reset_parameters()
    assert model(torch.ones(2, 12)).isfinite().all()
    model.unshard()  # values that were gathered before a change of the rows are not used again
    model.reshard()
    model.set_reshard_after_backward(False)
    for step in range(2):
        before = model(torch.ones(2, 12)).sum()
        before.backward()
        torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).step()
        model.zero_grad()
        assert model(torch.ones(2, 12)).sum() != before
        with torch.no_grad():
            model.down.bias.add_(step + 1)
        after = model(torch.ones(2, 12)).sum()
        with torch.no_grad():
            model.down.bias.sub_(step + 1)
        assert model(torch.ones(2, 12)).sum() != after


# spec: M5 meta parameters that nobody set show it; whole values follow the rows
def test_meta_and_changes():
    on_ranks(2, forgotten_init)


def wrappers(rank, size):
    _, model, _ = job_of(rank, size)
    with pytest.raises(dist.DistArgumentError, match="are DTensors"):
        dist.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(dist.DistArgumentError, match="are DTensors"):
        dist.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    with pytest.raises(dist.DistArgumentError, match="is a DTensor"):
        dist.all_reduce(model.head.weight)
    before = model.head.weight.full_tensor()
    assert torch.equal(before, model.head.weight.full_tensor())
    assert model(batch(0, 0)[0]).isfinite().all()


# spec: M5.refusal DDP, ZeRO and calls around sharded parameters
def test_wrappers_are_refused():
    on_ranks(2, wrappers)


def forgotten(rank, size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    seen = [weakref.ref(each._fsdp_unit) for each in (model, model[0])]
    del model
    gc.collect()
    assert [each() for each in seen] == [None, None]


# spec: M5 the units of a model end with it
def test_units_end_with_their_model():
    on_ranks(2, forgotten)


def parts_of_tensor_parallel(rank, size):
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(4, 4 * size), mesh["tp"], ColwiseParallel())
    parts = [weakref.ref(each) for each in model.parameters()]
    fully_shard(model, mesh=mesh["dp"])
    gc.collect()
    assert [each() for each in parts] == [None, None]
    assert model(torch.ones(2, 4)).shape == (2, 4)


# spec: M5 what tensor parallelism had leaves memory when it is divided
def test_parts_of_tensor_parallel():
    on_ranks(2, parts_of_tensor_parallel)


def compiled_around(rank, size):
    job, model, optimizer = job_of(rank, size)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        loss_of(compiled, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_as_alone(model, size, 2)


# spec: M5 torch.compile around a sharded model with sharded modules inside
def test_compiled_around():
    on_ranks(2, compiled_around)


def pickled(rank, size):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    def through_a_file(what):
        file = io.BytesIO()
        torch.save(what, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    mine = list(model.parameters())
    for theirs in (
        through_a_file(mine),
        copy.deepcopy(mine),
        list(through_a_file(model.state_dict(keep_vars=True)).values()),
        copy.deepcopy(optimizer).param_groups[0]["params"],
    ):
        for one, other in zip(mine, theirs, strict=True):
            assert one is not other and torch.equal(one.to_local(), other.to_local())
    kept = through_a_file(optimizer.state_dict())["state"][0]["exp_avg"]
    assert torch.equal(kept.to_local(), optimizer.state[mine[0]]["exp_avg"].to_local())
    with torch.no_grad():
        copy.deepcopy(mine)[0].zero_()  # the copy is no parameter of the model
    assert mine[0].to_local().any()


# spec: M5 parameters and optimizers are pickled and copied
def test_parameters_are_pickled():
    on_ranks(2, pickled)


def states_of_torch(rank, size):
    job, model, optimizer = job_of(rank, size)
    job.steps(model, optimizer, 1)
    expected = {name: each.full_tensor() for name, each in model.named_parameters()}
    options = torch_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = torch_states.get_model_state_dict(model, options=options)
    assert list(whole) == (list(expected) if rank == 0 else [])
    for name, each in whole.items():
        assert torch.equal(each, expected[name])
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    options = torch_states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torch_states.set_model_state_dict(model, whole, options=options)
    for name, each in model.named_parameters():
        assert torch.equal(each.full_tensor(), expected[name])


# spec: M5 torch's own functions give rank 0 the whole state, and divide it from there
def test_states_of_torch():
    on_ranks(2, states_of_torch)


def norms(rank, size):
    _, model, _ = job_of(rank, size)
    loss_of(model, rank, 0).backward()
    expected = nn.utils.get_total_norm([each.grad for each in model.parameters()]).full_tensor()
    norm = model.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    half = fully_shard(nn.Linear(4, 4).bfloat16())
    half(torch.ones(2, 4).bfloat16()).sum().backward()
    assert half.clip_grad_norm_(1.0).dtype == torch.bfloat16


# spec: M5 the norm of all gradients has their dtype
def test_norms_have_the_dtype_of_gradients():
    on_ranks(2, norms)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise KeyError("in backward")


def broken_backward(rank, size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1])
    fully_shard(model)
    given = torch.ones(2, 4, requires_grad=True)
    loss = model(Breaks.apply(given)).sum()
    with pytest.raises(KeyError, match="in backward"):
        loss.backward()
    assert all(isinstance(each, DTensor) for each in model.parameters())


# spec: M5 parameters are DTensors again after an exception in backward
def test_exceptions_in_backward():
    on_ranks(2, broken_backward)


def assigned_data(rank, size):
    job, model, optimizer = job_of(rank, size)
    for use in (model.state_dict, lambda: job.loss(model, 0), model.unshard):
        model.head.weight.data = model.head.weight.detach() * 0
        with pytest.raises(dist.DistArgumentError, match="head.weight.data was assigned"):
            use()
    job.steps(model, optimizer, 2)
    assert_as_alone(model, size, 2)


# spec: M5.refusal values that a parameter's data is set to
def test_data_is_not_assigned():
    on_ranks(2, assigned_data)


def adafactor(rank, size):
    job, model, _ = job_of(rank, size)
    loss_of(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match="placement"):
        torch.optim.Adafactor(model.parameters(), lr=0.01).step()


# spec: M5 Adafactor's norms of rows raise in DTensor, as under torch's fully_shard
def test_adafactor_raises():
    on_ranks(2, adafactor)


def copies(rank, size):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)).double()
    fully_shard(model)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    assert all(each is not None for each in gradients.values())
    for values in (model.state_dict(), gradients):
        buffer = io.BytesIO()
        torch.save(values, buffer)
        buffer.seek(0)
        for copied in (torch.load(buffer, weights_only=False), copy.deepcopy(values)):
            for name, value in values.items():
                mine = value.to_local()
                assert mine.storage_offset() == 0
                assert mine.untyped_storage().nbytes() == mine.nbytes
                assert torch.equal(copied[name].to_local(), mine)
                assert copied[name].placements == value.placements
                copied[name].to_local().fill_(-7.0)
                assert not (mine == -7.0).any()
    # A change through what state_dict() gives is one of the parameters.
    before = model(torch.ones(2, 6, dtype=torch.float64))
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(1.0)
    after = model(torch.ones(2, 6, dtype=torch.float64))
    assert (after > before + 1).all()


# spec: M5 torch.save, torch.load and deepcopy of a unit's values and gradients
def test_copies_of_values():
    on_ranks(2, copies)


class Replicated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x):
        return self.outer(self.inner(x))


def seeded(rank, step):
    return torch.Generator().manual_seed(100 * step + rank)


def replicated(rank, size):
    model, alone = Replicated(), Replicated()
    fully_shard(model.inner)
    replicate(model)
    for of, everything in ((model, False), (alone, True)):
        optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
        for step in range(2):
            ranks = range(size) if everything else [rank]
            rows = torch.cat([torch.randn(3, 4, generator=seeded(each, step)) for each in ranks])
            of(rows.double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        found = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(fully_shard(nn.Linear(4, 4)))


# spec: M5 torch's replicate() around sharded modules leaves their parameters out
def test_replicate_around_sharded_modules():
    on_ranks(2, replicated, gloo=True)


def subclasses(rank, size):
    model = nn.Linear(4, 4)
    two = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    model.weight = nn.Parameter(two)
    with pytest.raises(dist.DistArgumentError, match="weight is a TwoTensor.*all_gather"):
        fully_shard(model)


# spec: M5.refusal parameters of a class whose values are elsewhere, as torch's extensions take
def test_other_tensors_are_refused():
    on_ranks(2, subclasses)


def slices(rank, size):
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    part = model[:1]
    assert type(part) is nn.Sequential
    assert isinstance(part[0], fsdp.FSDPModule)
    assert torch.equal(part(torch.ones(1, 4)), model[0](torch.ones(1, 4)))


# spec: M5 a slice of a sharded container is a container that no unit is of
def test_slices_of_containers():
    on_ranks(2, slices)

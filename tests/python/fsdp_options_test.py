# SPDX-License-Identifier: BSD-3-Clause
"""`muster.fsdp`: every option trains what one process trains, and every public method of torch's
FSDPModule does what it says.
"""

import dataclasses
import threading

import pytest
import sharded_models
import torch
import torch.distributed.fsdp as theirs
from sharded_models import Block, adam, assert_same, is_divided, loss_of, sharded, train, whole
from thread_ranks import on_threads

import muster as dist
from muster import fsdp
from muster.fsdp import FSDP, fully_shard

_seeding = threading.Lock()


def Net(seed=1):
    """Ranks that are threads share torch's random numbers."""
    with _seeding:
        return sharded_models.Net(seed)


def assert_near(losses, expected, name):
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=1e-6, msg=name)


def alone_after(size, steps=3):
    alone = Net()
    optimizer = adam(alone)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(loss_of(alone, each, step) for each in range(size)) / size
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses, alone.state_dict()


def units_of(model):
    return fsdp.units.units_in(model)


def in_place(net, **options):
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def wrapped(net, strategy=None, **options):
    kind = None if strategy is None else fsdp.ShardingStrategy[strategy]
    return FSDP(net, auto_wrap_policy={Block}, sharding_strategy=kind, **options)


def grid():
    size = dist.get_world_size()
    return dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rep", "shard"))


OPTIONS = {
    "no shard": lambda net: wrapped(net, "NO_SHARD"),
    "hybrid": lambda net: wrapped(net, "HYBRID_SHARD", device_mesh=grid()),
    "hybrid by groups": lambda net: wrapped(
        net, "_HYBRID_SHARD_ZERO2", process_group=(grid().get_group(1), grid().get_group(0))
    ),
    "offloaded": lambda net: wrapped(net, cpu_offload=fsdp.CPUOffload(True)),
    "prefetched late": lambda net: wrapped(
        net, backward_prefetch=theirs.BackwardPrefetch.BACKWARD_POST, forward_prefetch=True
    ),
    "not prefetched": lambda net: wrapped(net, backward_prefetch=None),
    "grid in place": lambda net: in_place(net, mesh=grid()),
    "part": lambda net: in_place(net, reshard_after_forward=2),
    "kept": lambda net: in_place(net, reshard_after_forward=False),
    "offloaded in place": lambda net: in_place(net, offload_policy=theirs.CPUOffloadPolicy()),
    "dimensions": lambda net: in_place(
        net, mesh=grid(), dp_mesh_dims=fsdp.DataParallelMeshDims(shard=("rep", "shard"))
    ),
    "replicated": lambda net: in_place(
        net, mesh=grid(), dp_mesh_dims=fsdp.DataParallelMeshDims(replicate=("rep", "shard"))
    ),
}


def as_alone(rank, size, expected, state):
    for name, wrap in OPTIONS.items():
        model = wrap(Net(seed=1 + rank))  # rank 0's counts
        losses = torch.tensor(train(model, adam(model), rank, 3))
        dist.all_reduce(losses)
        assert_near(losses / size, expected, name)
        assert_same(whole(model), state)
        assert units_of(model)[0].memory()["gathered"] == 0, name


# spec: T5 hybrid sharding over a two-dimensional mesh, NO_SHARD, CPU offload, prefetch,
# reshard_after_forward as int: one process's losses
@pytest.mark.parametrize("size", [2, 4])
def test_options_train_as_one_process(size):
    on_threads(size, as_alone, *alone_after(size))


def by_methods(rank, size):
    """The result of a step, by each setting that changes how it is made and not what it makes."""
    expected, state = alone_after(size)

    class Gather(theirs._fully_shard._fsdp_api.AllGather):
        calls = 0

        def allocate(self, size, *, dtype, device):
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            Gather.calls += 1
            return dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )

    class Reduce(theirs._fully_shard._fsdp_api.ReduceScatter):
        allocate = Gather.allocate

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op, group=group, async_op=True
            )

    def each(model, method, *arguments):
        for module in model._fsdp_modules():
            getattr(module, method)(*arguments)

    hooked = []
    changes = {
        "custom all_gather": lambda model: each(model, "set_custom_all_gather", Gather()),
        "custom reduce_scatter": lambda model: each(model, "set_custom_reduce_scatter", Reduce()),
        "hook": lambda model: each(model, "set_all_reduce_hook", hooked.append),
        "divisor": lambda model: each(model, "set_gradient_divide_factor", size),
        "old divisor": lambda model: each(model, "set_reduce_scatter_divide_factor", size),
        "kept after forward": lambda model: model.set_reshard_after_forward(False),
        "kept after backward": lambda model: model.set_reshard_after_backward(False),
        "storage": lambda model: model.set_keep_unsharded_storage(True),
        "prefetch": lambda model: (
            model.set_modules_to_forward_prefetch([model.blocks[0]]),
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]]),
            model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0], model.blocks[1]]),
            model.blocks[1].set_modules_to_backward_prefetch([]),
        ),
        "event": lambda model: model.set_post_optim_event(torch.Event("cpu")),
        "nothing": lambda model: (
            model.set_is_last_backward(False),
            model.set_reduce_scatter_unused_params(True),
            model.set_force_sum_reduction_for_comms(True),
            model.set_reduce_scatter_max_input_buffers(2),
            model.set_separate_reduce_scatter_group(),
            model.set_allocate_memory_from_process_group_for_comm(True),
            model.set_symm_mem_for_comm(),
        ),
    }
    for name, change in changes.items():
        model = sharded(Net(seed=1 + rank))
        change(model)
        losses = torch.tensor(train(model, adam(model), rank, 3))
        dist.all_reduce(losses)
        assert_near(losses / size, expected, name)
        if name == "kept after backward":
            assert units_of(model)[0].memory()["gathered"] > 0
            for module in model._fsdp_modules():
                module.reshard()
            assert model.blocks[0]._fsdp_unit.unsharded_bytes == 0
        if name == "storage":
            assert model.blocks[0]._fsdp_unit.unsharded_bytes > 0
        assert_same(whole(model), state)
    assert Gather.calls > 0 and all(each.dim() == 1 for each in hooked) and hooked


# spec: T5 every set_* of FSDPModule
def test_settings_change_how_and_not_what():
    on_threads(2, by_methods)


def by_finalizing(rank, size):
    reference = Net()
    (
        sum(loss_of(reference, each, step) for each in range(size) for step in range(2)) / size
    ).backward()
    expected = {name: each.grad for name, each in reference.named_parameters()}

    def check(model):
        for unit in units_of(model):
            shown = fsdp.units.shown_parameters(unit)
            for name, grad in zip(unit.names, [each.grad.full_tensor() for each in shown]):
                full = [each for each in expected if each.endswith(name)]
                assert any(torch.allclose(grad, expected[each], atol=1e-6) for each in full), name

    model = sharded(Net())
    model.set_manual_backward_finalization(True)
    for step in range(2):
        loss_of(model, rank, step).backward()
    assert all(each.grad is None for each in model.parameters())
    model.finalize_backward(async_op=True).wait()
    check(model)
    assert model.finalize_backward() is None

    model = in_place(Net(), mesh=grid())
    model.set_requires_all_reduce(False)
    loss_of(model, rank, 0).backward()
    assert all(each.grad is None for each in model.parameters())
    model.set_requires_all_reduce(True)
    loss_of(model, rank, 1).backward()
    check(model)

    # An embedding's backward needs no values.
    table = fully_shard(torch.nn.Embedding(11, 4))
    table.set_unshard_in_backward(False)
    table(torch.tensor([1, 2])).sum().backward()
    grad = table.weight.grad.full_tensor()
    assert grad[1:3].eq(1).all() and grad.sum() == 8

    module = fully_shard(Block(4))
    module.down = None
    with pytest.raises(TypeError):
        module(torch.ones(1, 4))
    module.unshard()
    module.reset_iter_state()
    assert is_divided(module.up.weight)

    module = fully_shard(torch.nn.Linear(4, 4))
    handle = module.unshard(async_op=True)
    assert is_divided(module.weight)
    handle.wait()
    assert not is_divided(module.weight)
    for wrong in (
        lambda: module.set_reshard_after_forward(2),
        lambda: module.set_modules_to_forward_prefetch([torch.nn.Linear(1, 1)]),
        lambda: module.set_reduce_scatter_max_input_buffers(0),
        lambda: fully_shard(torch.nn.Linear(2, 2), reshard_after_forward=3),
        lambda: fully_shard(torch.nn.Linear(2, 2), shard_placement_fn=lambda each: 1),
        lambda: wrapped(Net(), "HYBRID_SHARD"),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError):
        fsdp.DataParallelMeshDims()


# spec: T5 set_requires_all_reduce, set_manual_backward_finalization, set_unshard_in_backward,
# unshard(async_op), reset_iter_state
def test_gradients_come_when_they_are_asked_for():
    on_threads(2, by_finalizing)


def from_meta(rank, size):
    with torch.device("meta"):
        nets = [
            torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)) for _ in range(4)
        ]
    seen = []

    def init(module):
        seen.append(type(module).__name__)
        module.reset_parameters()
        for each in module.parameters(recurse=False):
            each.fill_(rank + 1)

    for net, wrap in zip(
        nets,
        (
            lambda net: FSDP(net, auto_wrap_policy={torch.nn.Linear}, param_init_fn=init),
            lambda net: fully_shard(net, param_init_fn=init),
        ),
    ):
        weight = net[0].weight
        model = wrap(net)
        assert seen == ["Linear", "BatchNorm1d"]
        seen.clear()
        state = whole(model)
        assert state["0.weight"].eq(1).all() and state["1.running_var"].eq(1).all()
        if isinstance(model, FSDP):
            assert net[0].module.weight is weight
        model(torch.ones(3, 6)).sum().backward()
    # Values that are set on the divided parameters; none where that was forgotten.
    model = fully_shard(nets[2])
    assert whole(model)["0.weight"].isnan().all() and model[1].running_mean.is_meta
    assert model.to_empty(device="cpu") is model and not model[1].running_mean.is_meta
    for part in model:
        part.reset_parameters()
    weight = whole(model)["0.weight"]
    assert weight.shape == (5, 6) and 0.1 < weight.abs().max() <= 6**-0.5
    model(torch.ones(3, 6)).sum().backward()

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(ValueError, match="param_init_fn"):
        FSDP(Odd())


# spec: T5 meta-device initialisation with param_init_fn
def test_meta_modules_get_values():
    on_threads(2, from_meta)


def states(rank, size):
    kinds = fsdp.StateDictType
    for wrap in (OPTIONS["hybrid"], OPTIONS["no shard"], lambda net: wrapped(net)):
        model = wrap(Net())
        optimizer = adam(model)
        train(model, optimizer, rank, 2)
        full = whole(model)
        of_full = FSDP.optim_state_dict(model, optimizer)
        assert of_full["state"]["table.weight"]["exp_avg"].shape == (11, 12)
        assert list(of_full["state"]) == list(dict(Net().named_parameters()))
        first = FSDP.full_optim_state_dict(model, optimizer)
        assert bool(first) == (rank == 0)
        saved = {}
        for kind in (kinds.SHARDED_STATE_DICT, kinds.LOCAL_STATE_DICT, kinds.FULL_STATE_DICT):
            with FSDP.state_dict_type(model, kind):
                saved[kind] = (
                    {name: each.clone() for name, each in model.state_dict().items()},
                    FSDP.optim_state_dict(model, optimizer),
                )
        mine = saved[kinds.SHARDED_STATE_DICT]
        parameters = dict(model.named_parameters())
        for name, each in mine[1]["state"].items():
            assert each["exp_avg"].shape == parameters[name].shape
        for kind, (of_model, of_optimizer) in saved.items():
            fresh = wrap(Net(seed=7))
            again = adam(fresh)
            with FSDP.state_dict_type(fresh, kind):
                fresh.load_state_dict(of_model)
                FSDP.optim_state_dict_to_load(fresh, again, of_optimizer, load_directly=True)
            assert_same(whole(fresh), full)
            assert train(fresh, again, rank, 1)
            assert_same(
                {name: each["exp_avg"] for name, each in of_full["state"].items()},
                {
                    name: each["exp_avg"]
                    for name, each in saved[kinds.FULL_STATE_DICT][1]["state"].items()
                },
            )
        # The former names.
        again = adam(model)
        again.load_state_dict(FSDP.scatter_full_optim_state_dict(first or None, model, optim=again))
        again.load_state_dict(FSDP.shard_full_optim_state_dict(of_full, model, optim=again))
        of_shards = FSDP.sharded_optim_state_dict(model, optimizer)
        again.load_state_dict(FSDP.flatten_sharded_optim_state_dict(of_shards, model, again))
        assert_same(
            FSDP.optim_state_dict(model, again)["state"]["table.weight"],
            of_full["state"]["table.weight"],
        )
        numbers = FSDP.rekey_optim_state_dict(
            of_full, fsdp.OptimStateKeyType.PARAM_ID, model, optim=optimizer
        )
        assert list(numbers["state"]) == list(range(len(of_full["state"])))
        back = FSDP.rekey_optim_state_dict(
            numbers, fsdp.OptimStateKeyType.PARAM_NAME, model, optim=optimizer
        )
        assert back["param_groups"] == of_full["param_groups"]

    model = in_place(Net(), mesh=grid())
    optimizer = adam(model)
    train(model, optimizer, rank, 2)
    for options in (
        fsdp.StateDictOptions(),
        fsdp.StateDictOptions(full_state_dict=True),
    ):
        of_model, of_optimizer = fsdp.get_state_dict(model, optimizer, options=options)
        fresh = in_place(Net(seed=5), mesh=grid())
        again = adam(fresh)
        fsdp.set_state_dict(
            fresh,
            again,
            model_state_dict=of_model,
            optim_state_dict=of_optimizer,
            options=options,
        )
        assert_same(whole(fresh), whole(model))
        expected = fsdp.get_optimizer_state_dict(model, optimizer)["state"]
        for name, each in fsdp.get_optimizer_state_dict(fresh, again)["state"].items():
            assert_same(each, expected[name])
    on_first = fsdp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert bool(fsdp.get_optimizer_state_dict(model, optimizer, options=on_first)) == (rank == 0)
    assert bool(fsdp.get_model_state_dict(model, options=on_first)) == (rank == 0)

    options = fsdp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    of_model, of_optimizer = fsdp.get_state_dict(
        model, optimizer, options=fsdp.StateDictOptions(full_state_dict=True)
    )
    fresh = in_place(Net(seed=5), mesh=grid())
    again = adam(fresh)
    fsdp.set_state_dict(
        fresh,
        again,
        model_state_dict=of_model if rank == 0 else {},
        optim_state_dict=of_optimizer if rank == 0 else {},
        options=options,
    )
    assert_same(whole(fresh), whole(model))
    for name, each in fsdp.get_optimizer_state_dict(fresh, again)["state"].items():
        assert_same(each, expected[name])
    for given, said in (
        ({}, "missing in rank 0's state"),
        (dict(of_model, more=torch.ones(1)), "'more'"),
        (dict(of_model, scale=torch.ones(3)), "size mismatch for scale"),
    ):
        with pytest.raises(RuntimeError, match=said):
            fsdp.set_model_state_dict(fresh, given if rank == 0 else {}, options=options)
    loose = dataclasses.replace(options, strict=False)
    loaded = fsdp.set_model_state_dict(
        fresh, {"more": 1, "scale": torch.tensor([2.0])} if rank == 0 else {}, options=loose
    )
    assert loaded.unexpected_keys == ["more"] and "scale" not in loaded.missing_keys
    assert whole(fresh)["scale"].item() == 2 and len(loaded.missing_keys) == len(of_model) - 1

    # A flat state of each optimizer's part, and back.
    flat_of = fsdp.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    flat = fsdp.get_optimizer_state_dict(model, optimizer, options=flat_of)
    assert all(type(each) is not dict for each in flat.values())
    assert flat["param_groups.scale.lr"] == optimizer.param_groups[0]["lr"]
    for options_of, given in ((flat_of, flat), (options, flat if rank == 0 else {})):
        again = adam(fresh)
        fsdp.set_optimizer_state_dict(fresh, again, given, options=options_of)
        for name, each in fsdp.get_optimizer_state_dict(fresh, again)["state"].items():
            assert_same(each, expected[name])
    flat["param_groups.scale.lr"] = 9
    with pytest.raises(RuntimeError, match="of its group"):
        fsdp.set_optimizer_state_dict(fresh, again, flat, options=flat_of)

    model.scale.requires_grad_(False)
    for full in (False, True):
        of = fsdp.StateDictOptions(full_state_dict=full, ignore_frozen_params=True)
        assert set(of_model) - set(fsdp.get_model_state_dict(model, options=of)) == {"scale"}


# spec: T5 M2 state-dict types, full, sharded and local, of models and optimizers, whole on rank 0
# of all; U1 torch's StateDictOptions
def test_states_of_all_types():
    on_threads(4, states)


def modules(rank, size):
    model = wrapped(Net())
    assert model.check_is_root()
    loss_of(model, rank, 0)
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    model.apply(lambda each: torch.nn.init.ones_(each.weight) if hasattr(each, "weight") else None)
    assert whole(model)["blocks.0.up.weight"].eq(1).all()

    expected, state = alone_after(size)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = wrapped(Net(), strategy)

        def hook(calls, gradients, output=None, model=model):
            calls.append(output is None)
            gradients.div_(size)
            if output is None:
                dist.all_reduce(gradients)
            else:
                dist.reduce_scatter_tensor(output, gradients)

        calls = []
        model.register_comm_hook(calls, hook)
        train(model, adam(model), rank, 3)
        assert_same(whole(model), state)
        assert set(calls) == {strategy == "NO_SHARD"}
    with pytest.raises(ValueError):
        mesh = dist.init_device_mesh("cpu", (1, size))
        wrapped(Net(), "HYBRID_SHARD", device_mesh=mesh).register_comm_hook(None, hook)

    scaler = fsdp.ShardedGradScaler("cpu", init_scale=2.0, growth_interval=1)
    model = OPTIONS["hybrid"](Net())
    optimizer = adam(model)
    scaler.scale(loss_of(model, rank, 0)).backward()
    if rank == size - 1:
        next(each for each in model.parameters() if each.numel()).grad.fill_(torch.inf)
    before = whole(model)
    scaler.step(optimizer)
    scaler.update()
    assert_same(whole(model), before)
    assert scaler.get_scale() == 1.0


# spec: T5 U3.grad_scaler ShardedGradScaler skips a step on all ranks of both dimensions; T5
# communication hooks
def test_the_rest_of_the_class():
    on_threads(2, modules)

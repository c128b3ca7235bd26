# SPDX-License-Identifier: BSD-3-Clause
"""Classes that look at optimizers and modules (schedulers, loss scalers, running averages, hooks,
loggers) find in muster's what they find in torch's."""

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import assert_equal, on_ranks

import muster as dist
from muster.fsdp import (
    FSDP,
    ShardedGradScaler,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
)
from muster.nn.parallel import DistributedDataParallel
from muster.optim import ZeroRedundancyOptimizer

SCHEDULERS = {
    "LambdaLR": lambda of: lr_scheduler.LambdaLR(of, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda of: lr_scheduler.MultiplicativeLR(of, lambda epoch: 0.9),
    "StepLR": lambda of: lr_scheduler.StepLR(of, 2),
    "MultiStepLR": lambda of: lr_scheduler.MultiStepLR(of, [1, 3]),
    "ConstantLR": lambda of: lr_scheduler.ConstantLR(of, total_iters=2),
    "LinearLR": lambda of: lr_scheduler.LinearLR(of, total_iters=3),
    "ExponentialLR": lambda of: lr_scheduler.ExponentialLR(of, 0.8),
    "SequentialLR": lambda of: lr_scheduler.SequentialLR(
        of,
        [lr_scheduler.ConstantLR(of, total_iters=2), lr_scheduler.ExponentialLR(of, 0.8)],
        milestones=[2],
    ),
    "CosineAnnealingLR": lambda of: lr_scheduler.CosineAnnealingLR(of, 4),
    "ChainedScheduler": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(of, 2), lr_scheduler.ExponentialLR(of, 0.8)]
    ),
    "ReduceLROnPlateau": lambda of: lr_scheduler.ReduceLROnPlateau(of, patience=0),
    "CyclicLR": lambda of: lr_scheduler.CyclicLR(of, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 2),
    "OneCycleLR": lambda of: lr_scheduler.OneCycleLR(of, 0.1, total_steps=5),
    "PolynomialLR": lambda of: lr_scheduler.PolynomialLR(of, 4, 2.0),
    "SWALR": lambda of: swa_utils.SWALR(of, 0.02, anneal_epochs=3),
}

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),  # what cycles the momentum finds its default
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
}


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.nn.functional.mse_loss(
        model(torch.randn(6, 8, generator=generator)), torch.randn(6, 4, generator=generator)
    )


def one_rank_on_all(model, size, step):
    """The loss of one process that has all ranks' inputs."""
    return sum(loss_of(model, rank, step) for rank in range(size)) / size


def settings(optimizer):
    return [
        {
            name: float(value) if torch.is_tensor(value) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def whole(model):
    return list(
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).values()
    )


def values(model):
    return [each.detach() for each in model.parameters()]


def trained_by_schedule(rank, size, schedule, kind, defaults):
    """Weights and settings after each step, of a model as it is, with DDP, ZeRO and FSDP."""

    def optimizer_of(model, make=kind, **options):
        first, *rest = model.parameters()
        return make(
            [{"params": [first], "lr": defaults["lr"] / 2}, {"params": rest}],
            **options,
            **copy.deepcopy(defaults),
        )

    plain = net()
    kinds = [(plain, optimizer_of(plain), values)]
    for wrap, made_of, look in [
        (DistributedDataParallel, lambda model: optimizer_of(model), values),
        (
            DistributedDataParallel,
            lambda model: optimizer_of(model, ZeroRedundancyOptimizer, optimizer_class=kind),
            values,
        ),
        (
            DistributedDataParallel,
            lambda model: optimizer_of(
                model,
                ZeroRedundancyOptimizer,
                optimizer_class=kind,
                parameters_as_bucket_view=True,
            ),
            values,
        ),
        (FSDP, lambda model: optimizer_of(model), whole),
        (fully_shard, lambda model: optimizer_of(model), whole),
    ]:
        model = wrap(net())
        kinds.append((model, made_of(model), look))
    schedules = [schedule(optimizer) for _, optimizer, _ in kinds]
    for step in range(5):
        seen = []
        for (model, optimizer, look), each in zip(kinds, schedules):
            optimizer.zero_grad()
            loss = (
                one_rank_on_all(model, size, step) if model is plain else loss_of(model, rank, step)
            )
            loss.backward()
            optimizer.step()
            each.step(*([float(step)] if isinstance(each, lr_scheduler.ReduceLROnPlateau) else []))
            seen.append((settings(optimizer), look(model), each.get_last_lr()))
        for mine in seen[1:]:
            assert mine[0] == seen[0][0]
            assert mine[2] == seen[0][2]
            torch.testing.assert_close(mine[1], seen[0][1], rtol=1e-4, atol=1e-5)
        for place in (2, 3):  # divided or not
            assert all(map(torch.equal, seen[1][1], seen[place][1]))
    state = pickle.loads(pickle.dumps(schedules[2].state_dict()))
    assert set(state) == set(schedules[0].state_dict())
    schedules[2].load_state_dict(state)


def test_every_scheduler_is_there():
    assert set(SCHEDULERS) == (set(lr_scheduler.__all__) - {"LRScheduler"}) | {"SWALR"}


# spec: K8 M1 in Python: any scheduler works on divided optimizers as on the undivided
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, kind):
    on_ranks(2, trained_by_schedule, SCHEDULERS[name], *OPTIMIZERS[kind])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def scaled(rank, size):
    """The same weights as without scaling, and a step that no rank takes where one gradient is not
    finite."""
    for wrap, sharded in [
        (DistributedDataParallel, False),
        (DistributedDataParallel, True),
        (FSDP, False),
        (fully_shard, False),
    ]:
        plain, model = net(), wrap(net())
        reference = torch.optim.Adam(plain.parameters(), lr=0.01)
        optimizer = (
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            if sharded
            else torch.optim.Adam(model.parameters(), lr=0.01)
        )
        by_shard = wrap is not DistributedDataParallel
        scaler = (ShardedGradScaler if by_shard else torch.amp.GradScaler)(
            "cpu", init_scale=2.0**10
        )
        for step in range(4):
            optimizer.zero_grad()
            reference.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            if step == 2:
                before = [local(each).clone() for each in model.parameters()]
                for each in model.parameters():
                    part = None if each.grad is None else local(each.grad)
                    if part is not None and part.numel() and (rank == 1 or not by_shard):
                        part.view(-1)[0] = float("inf")
                        break
            if step == 3:
                scaler.unscale_(optimizer)
                if not by_shard:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                assert scaler.get_scale() == 2.0**9 and all(
                    map(torch.equal, before, map(local, model.parameters()))
                )
            else:
                one_rank_on_all(plain, size, step).backward()
                reference.step()
        torch.testing.assert_close(
            whole(model) if by_shard else values(model), values(plain), rtol=1e-4, atol=1e-5
        )


# spec: K8 M1 in Python: torch.amp.GradScaler and its sharded kind
def test_loss_scaling():
    on_ranks(2, scaled)


def averaged(rank, size):
    """Averages of weights: of the wrapped model, of the module, by every function of torch's."""
    for options in [
        {},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)},
        {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.5), "use_buffers": True},
        {"avg_fn": swa_utils.get_swa_avg_fn()},
    ]:
        plain = net()
        model = DistributedDataParallel(net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        of = [swa_utils.AveragedModel(each, **options) for each in (plain, model, model.module)]
        for step in range(3):
            for each, loss in (
                (optimizer, loss_of(model, rank, step)),
                (reference, one_rank_on_all(plain, size, step)),
            ):
                each.zero_grad()
                loss.backward()
                each.step()
            for each, source in zip(of, (plain, model, model.module)):
                each.update_parameters(source)
        for each in of[1:]:
            torch.testing.assert_close(values(each), values(of[0]))
            torch.testing.assert_close(each(torch.ones(1, 8)), of[0](torch.ones(1, 8)))
    # A sharded model is not copied.
    model = FSDP(net())
    for copied in (
        copy.deepcopy,
        pickle.dumps,
        swa_utils.AveragedModel,
        lambda each: copy.deepcopy(torch.nn.Sequential(each)),
    ):
        for each in (model, fully_shard(net())):
            with pytest.raises(ValueError, match="not copied or pickled.*save a state_dict"):
                copied(each)
    for each in (model, fully_shard(net())):
        assert copy.copy(each)(torch.ones(1, 8)).shape == (1, 4)  # has the same parameters


# spec: K8 M2 in Python: torch.optim.swa_utils; what is not copied says so
def test_running_averages():
    on_ranks(2, averaged)


class WithCounter(torch.optim.SGD):
    """Changes its settings by itself, as optimizers do that look for a learning rate; a logger
    reads `speed`.
    """

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, lr=lr, **options)
        self.speed = 3

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def shown(rank, size):
    parameters = [torch.nn.Parameter(torch.full((each,), 2.0)) for each in (5, 4, 3)]
    optimizer = ZeroRedundancyOptimizer(parameters, WithCounter, momentum=0.5)
    undivided = WithCounter(
        [torch.nn.Parameter(each.detach().clone()) for each in parameters], momentum=0.5
    )
    assert (
        optimizer.defaults == undivided.defaults
        and settings(optimizer) == settings(undivided)
        and optimizer.speed == 3
    )
    assert not hasattr(optimizer, "nothing")
    assert not hasattr(optimizer, "_step_supports_amp_scaling")

    calls = []
    optimizer.register_step_pre_hook(
        lambda of, args, kwargs: calls.append(("before", of is optimizer))
    )
    optimizer.register_step_post_hook(
        lambda of, args, kwargs: calls.append(("after", of is optimizer))
    )
    everywhere = register_optimizer_step_pre_hook(
        lambda of, *_: calls.append(("any", of is optimizer))
    )
    for each in (optimizer, undivided):
        for parameter in each.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    undivided.step()
    everywhere.remove()
    assert [each for each in calls if each != ("any", False)] == [
        ("any", True),
        ("before", True),
        ("after", True),
    ]
    assert ("any", False) in calls  # this rank's part is an optimizer too
    assert optimizer.param_groups[0]["count"] == 1
    optimizer.step()
    undivided.step()
    assert optimizer.param_groups[0]["count"] == 2 and all(
        map(torch.equal, parameters, undivided.param_groups[0]["params"])
    )
    mine = {each for each in parameters if optimizer.rank_of(each) == rank}
    assert set(optimizer.state) == mine and all(
        "momentum_buffer" in optimizer.state[each] for each in mine
    )
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert optimizer.param_groups[1]["momentum"] == 0.5 and optimizer.param_groups[1]["lr"] == 0.5
    assert "lr: 0.5" in repr(optimizer)
    optimizer.zero_grad()
    assert all(each.grad is None for each in parameters)

    seen = []
    optimizer.register_state_dict_pre_hook(lambda of: seen.append("collected"))
    optimizer.register_state_dict_post_hook(lambda of, state: {**state, "note": "from a hook"})
    optimizer.register_load_state_dict_pre_hook(
        lambda of, state: seen.append(state["note"]) or {**state, "note": "seen"}
    )
    optimizer.register_load_state_dict_post_hook(lambda of: seen.append("loaded"))
    optimizer.consolidate_state_dict(0)
    states = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(states)
    optimizer.load_state_dict(states[0])
    assert (
        seen == ["collected"] * (rank == 0) + ["from a hook", "loaded"]
        and states[0]["note"] == "from a hook"
    )

    # A copy has parameters of its own; one rank may make it alone.
    del optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_step_pre_hooks
    for name in [name for name in vars(optimizer) if name.endswith("_hooks")]:
        vars(optimizer)[name].clear()
    optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_step_pre_hooks = {}, {}
    if rank == 0:
        again, model = copy.deepcopy((optimizer, parameters))
        assert again.param_groups[0]["params"][0] is model[0] and again.rank_of(
            model[0]
        ) == optimizer.rank_of(parameters[0])
        assert pickle.loads(pickle.dumps(again)).param_groups[1]["lr"] == 0.5
    lr_scheduler.StepLR(optimizer, 1)  # whose step is the original's
    again, model = copy.deepcopy((optimizer, parameters))
    for each in (*parameters, *model):
        each.grad = torch.ones_like(each)
    again.step()
    assert not any(map(torch.equal, parameters, model))
    optimizer.step()
    assert all(map(torch.equal, parameters, model))
    alone = ZeroRedundancyOptimizer(
        parameters,
        torch.optim.SGD,
        process_group=dist.new_group([rank], use_local_synchronization=True),
        lr=1,
    )
    with pytest.raises(ValueError, match="other than the default group is not copied"):
        copy.deepcopy(alone)


# spec: K8 in Python: attributes, defaults, state, settings and hooks of the optimizer inside
def test_what_an_optimizer_shows():
    on_ranks(2, shown)


def modules_shown(rank, size):
    """Names, modes and hooks of wrapped modules, as torch's own have them."""
    mine, theirs = DistributedDataParallel(net()), torch.nn.parallel.DistributedDataParallel(net())
    for look in (
        lambda of: [name for name, _ in of.named_parameters()],
        lambda of: list(of.state_dict()),
        lambda of: [name for name, _ in of.named_modules()],
        lambda of: of.eval().training or of.module[0].training,
        lambda of: of.train().training and of.module[0].training,
        lambda of: of.device_ids,
        lambda of: of.output_device,
        lambda of: of.device,
        lambda of: of.device_type,
        lambda of: of.is_multi_device_module,
        lambda of: of.broadcast_buffers,
        lambda of: of.forward_sync_buffers,
        lambda of: of.require_backward_grad_sync,
        lambda of: of.bucket_bytes_cap,
        lambda of: hasattr(of, "in_features"),
        lambda of: of.module[0].in_features,
        lambda of: of.dim,
        lambda of: of.static_graph,
        lambda of: of.find_unused_parameters,
        lambda of: of.gradient_as_bucket_view,
        lambda of: of.parameters_to_ignore,
    ):
        assert look(mine) == look(theirs)
    seen = [], []
    for model, here in zip((mine, theirs), seen):
        note = here.append
        model.register_forward_pre_hook(lambda *_, note=note: note("before"))
        model.register_forward_hook(lambda *_, note=note: note("after"))
        model.register_full_backward_hook(lambda *_, note=note: note("backward"))
        model.register_load_state_dict_post_hook(lambda *_, note=note: note("loaded"))
        loss_of(model, rank, 0).backward()
        model.load_state_dict(model.state_dict())
    assert seen[0] == seen[1] and len(seen[0]) == 4
    assert_equal(mine, theirs)

    sharded = FSDP(net())
    assert [name for name, _ in sharded.named_parameters()] == [
        name for name, _ in net().named_parameters()
    ]
    assert sharded[0].in_features == 8 and list(sharded.state_dict()) == list(net().state_dict())
    assert not sharded.eval().module[0].training and sharded.train().module[0].training


# spec: K1 M4 in Python: what a wrapped module shows
def test_what_a_module_shows():
    on_ranks(2, modules_shown, gloo=True)

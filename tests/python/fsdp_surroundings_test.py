# SPDX-License-Identifier: BSD-3-Clause
"""`muster.fsdp`: what people do around a model, and what goes wrong."""

import pytest
import torch
from sharded_models import Block, Net, adam, assert_same, is_divided, sharded, train, whole
from torch.distributed.checkpoint.state_dict import StateDictOptions
from training import on_ranks

import muster as dist
from muster import fsdp
from muster.fsdp import FSDP, fully_shard


def surroundings(rank, size):
    """Calls that people make around a model."""

    # A model inside of another module; checkpoints of it come and go whole.
    class Around(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.net = FSDP(Net(seed), auto_wrap_policy={Block})

    first, second = Around(1), Around(2)
    state = first.state_dict()
    assert [name.removeprefix("net.") for name in state] == list(Net().state_dict())
    second.load_state_dict(state)
    assert_same(whole(second.net), Net(1).state_dict(), 0)
    with pytest.raises(RuntimeError, match=r"(?s)sizes \[36, 12\], and \[1\]"):
        second.load_state_dict({**state, "net.blocks.0.up.weight": torch.zeros(1)})

    # Dictionaries that forward fills are the caller's own; hooks see whole parameters; other
    # methods gather too where they are told to.
    class Caching(torch.nn.Linear):
        def forward(self, x, cache):
            cache["x"] = x
            return super().forward(x)

        def twice(self, x):
            return self(x, {}) + torch.nn.functional.linear(x, self.weight, self.bias)

    module, seen = fully_shard(Caching(3, 3)), []
    module.register_forward_pre_hook(lambda each, args: seen.append(each.weight.shape))
    fsdp.register_fsdp_forward_method(module, "twice")
    cache = {}
    with torch.no_grad():
        once = module(torch.ones(1, 3), cache)
        torch.testing.assert_close(module.twice(torch.ones(1, 3)), 2 * once)
    assert cache["x"].shape == (1, 3) and set(seen) == {(3, 3)} and is_divided(module.weight)

    # Wrappers that pass on what is asked of them are no units.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = torch.nn.Sequential(checkpoint_wrapper(fully_shard(Block(4))), fully_shard(Block(4)))
    fully_shard(net)
    assert len(fsdp.units.units_in(net)) == 3
    optimizer = adam(net)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states_of_optimizer = FSDP.optim_state_dict(net, optimizer)
    assert sorted(states_of_optimizer["state"]) == sorted(whole(net))
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(net, optimizer, states_of_optimizer))
    model = FSDP(Net(), auto_wrap_policy={Block})
    optimizer = adam(model)
    train(model, optimizer, rank, 1)
    config = fsdp.FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, None, config):
        assert bool(FSDP.optim_state_dict(model, optimizer)) == (rank == 0)

    # Ignored modules keep their buffers, and count in the norm.
    norm = torch.nn.BatchNorm1d(4)
    norm.running_mean.fill_(rank)
    model = FSDP(torch.nn.Sequential(torch.nn.Linear(4, 4), norm), ignored_modules=[norm])
    assert norm.running_mean[0].item() == rank
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    assert model.clip_grad_norm_(1).item() == pytest.approx(
        28**0.5
    )  # 16 + 4 sharded, 8 on each rank alike
    for each in model.parameters():
        each.grad = torch.full_like(each, float("nan") if rank else 1)
    assert model.clip_grad_norm_(1, float("inf")).isnan()
    with pytest.raises(dist.DistError, match="another unit"):
        tied = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        FSDP(tied, auto_wrap_policy={torch.nn.Linear})
    with pytest.raises(dist.DistError, match="other memory"):
        moved = FSDP(torch.nn.Linear(4, 4)).double()
        moved.state_dict()
    # The ranks of a group may stand in another order than their numbers.
    turned = dist.new_group([1, 0], sort_ranks=False)
    assert (
        FSDP(torch.nn.Linear(4, 4), process_group=turned).process_group.rank()
        == turned.rank()
        == 1 - rank
    )
    assert isinstance(FSDP(torch.nn.SyncBatchNorm(4)).module, dist.nn.SyncBatchNorm)


def test_surroundings():
    on_ranks(2, surroundings)


def fails(rank, size):
    for options, what in [
        (dict(sharding_strategy="MOST_SHARD"), "NO_SHARD, HYBRID_SHARD.* are"),
        (dict(sharding_strategy="HYBRID_SHARD"), "LOCAL_WORLD_SIZE"),
        (dict(sharding_strategy="HYBRID_SHARD", process_group=dist.group.WORLD), "mesh, or"),
        (dict(auto_wrap_policy=3), "policy.*int"),
        (
            dict(process_group=dist.group.WORLD, device_mesh=dist.init_device_mesh("cpu", (2,))),
            "not both",
        ),
        (dict(device_mesh=dist.init_device_mesh("cpu", (2, 1))), "2 dimensions"),
    ]:
        with pytest.raises(ValueError, match=what):
            FSDP(Net(), **options)
    with pytest.raises(ValueError, match="lazy module"):
        FSDP(torch.nn.LazyLinear(2))
    model = sharded(Net())
    for again, what in [
        (lambda: fully_shard(model), "sharded already"),
        (lambda: FSDP(model), "sharded already"),
        (lambda: fully_shard(torch.nn.ModuleList([torch.nn.Linear(2, 2)])), "ModuleList"),
        (
            lambda: FSDP(
                torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)])),
                auto_wrap_policy={torch.nn.ModuleList},
            ),
            "ModuleList",
        ),
        (lambda: FSDP(torch.nn.Sequential(fully_shard(torch.nn.Linear(2, 2)))), "one of the two"),
        (lambda: fully_shard(torch.nn.Sequential(FSDP(torch.nn.Linear(2, 2)))), "one of the two"),
        (
            lambda: fsdp.set_model_state_dict(
                model, {}, options=StateDictOptions(broadcast_from_rank0=True)
            ),
            "goes with full_state_dict",
        ),
        (lambda: fully_shard([]), "a list of modules"),
        (lambda: fully_shard(torch.nn.Linear(2, 2), reshard_after_forward=0), "number of ranks"),
        (lambda: fully_shard(torch.nn.Linear(2, 2), reshard_after_forward=3), "does not divide"),
        (lambda: FSDP(Net()).load_state_dict({}, assign=True), "assign"),
        (
            lambda: FSDP.summon_full_params(FSDP(Net()), rank0_only=True).__enter__(),
            "writeback=False",
        ),
    ]:
        with pytest.raises(ValueError, match=what):
            again()
    with pytest.raises(dist.DistError, match=r"FullyShardedDataParallel.*weight \[3, 2\]"):
        FSDP(torch.nn.Linear(2, 2 + rank))
    # An exception in forward leaves the model as it was.
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 99))
    assert is_divided(model.table.weight) and is_divided(model.blocks[0].up.weight)
    train(model, adam(model), rank, 1)

    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            if rank == 1:
                raise KeyError("no gradient today")
            return gradient

    class Middle(torch.nn.Module):
        def forward(self, x):
            return Fragile.apply(x)

    model = FSDP(torch.nn.Sequential(Block(4), Middle(), Block(4)), auto_wrap_policy={Block})
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(
        KeyError if rank == 1 else dist.DistError, match="today" if rank == 1 else "rank 1"
    ):
        loss.backward()
    assert all(each.dim() == 1 for each in model.parameters())
    with pytest.raises(dist.DistError, match="cannot go on"):
        model(torch.ones(2, 4))


def test_failures():
    on_ranks(2, fails)


class Maker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def freeze_in_turn(maker, judge, inputs, steps=4):
    """One model learns from the other while that is frozen, then that one learns. `inputs(step)`: a
    batch and its part of the loss for each backward."""
    optimizers = adam(maker), adam(judge)
    for step in range(steps):
        judge.requires_grad_(False)
        for each in optimizers:
            each.zero_grad()
        for x, part in inputs(step):
            (judge(maker(x)).square().mean() * part).backward()
        optimizers[0].step()
        assert all(each.grad is None for each in judge.parameters())
        judge.requires_grad_(True)
        for x, part in inputs(step):
            ((judge(x) - judge(maker(x).detach())).square().mean() * part).backward()
        optimizers[1].step()


def frozen_in_turn(rank, size):
    def batch_of(each, step):
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + each))

    def judge_of():
        torch.manual_seed(8)
        return torch.nn.Sequential(Block(4), torch.nn.Linear(4, 2))

    alone = Maker(), judge_of()
    freeze_in_turn(*alone, lambda step: [(batch_of(each, step), 1 / size) for each in range(size)])
    for wrap in (
        FSDP,
        lambda net: FSDP(net, auto_wrap_policy={Block}),
        fully_shard,
        lambda net: FSDP(net, sharding_strategy="SHARD_GRAD_OP"),
    ):
        pair = wrap(Maker()), wrap(judge_of())
        freeze_in_turn(*pair, lambda step: [(batch_of(rank, step), 1)])
        for mine, expected in zip(pair, alone):
            assert_same(whole(mine), expected.state_dict())


# spec: M3 in Python: passes in which all of a sharded model is frozen
def test_model_is_frozen_for_a_pass():
    on_ranks(2, frozen_in_turn)

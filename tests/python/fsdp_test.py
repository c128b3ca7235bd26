# SPDX-License-Identifier: BSD-3-Clause
"""`muster.fsdp`: training with it beside one process, DistributedDataParallel, and torch's own on
Gloo.
"""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed.fsdp as theirs
from sharded_models import (
    WAYS,
    Block,
    Net,
    adam,
    assert_same,
    is_divided,
    loss_of,
    sharded,
    train,
    whole,
)
from torch.utils.checkpoint import checkpoint
from training import on_ranks

import muster as dist
from muster import fsdp
from muster.fsdp import FSDP, fully_shard
from muster.nn.parallel import DistributedDataParallel


def as_others(rank, size):
    reference = DistributedDataParallel(Net())
    expected = train(reference, adam(reference), rank)
    alone = Net()
    optimizer = adam(alone)
    for step in range(4):
        optimizer.zero_grad()
        (sum(loss_of(alone, each, step) for each in range(size)) / size).backward()
        optimizer.step()
    for way, wrap in WAYS.items():
        for checkpointed in ("", "reentrant", "not reentrant"):
            model = wrap(Net(seed=1 + rank, checkpointed=checkpointed))  # rank 0's counts
            losses = train(model, adam(model), rank)
            torch.testing.assert_close(
                losses, expected, rtol=1e-5, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}"
            )
            assert_same(whole(model), reference.module.state_dict())
            assert_same(whole(model), alone.state_dict())


# spec: M1 M4 auto_wrap_policy chooses the units, units nest, fully_shard
# spec: M3 the same losses and parameters as DDP and as one process
@pytest.mark.parametrize("size", [1, 2, 3])
def test_trains_as_others_do(size):
    on_ranks(size, as_others)


def as_theirs(rank, size):
    stock, mine = Net(), Net()
    for each in (stock, mine):
        each.scale = torch.nn.Parameter(torch.tensor([0.5]))  # theirs takes no scalars
    for block in stock.blocks:
        theirs.fully_shard(block)
    theirs.fully_shard(stock)
    expected = train(stock, adam(stock), rank)
    model = sharded(mine)
    torch.testing.assert_close(train(model, adam(model), rank), expected, rtol=1e-5, atol=1e-6)
    assert_same(
        {name: each for name, each in whole(model).items() if name != "bias"},
        {name: each.full_tensor() for name, each in stock.named_parameters()},
    )


# spec: M3 the same as torch's own fully_shard
def test_trains_as_theirs_does():
    on_ranks(2, as_theirs, gloo=True)


def shares(rank, size):
    model = FSDP(Net(width=32), auto_wrap_policy={Block})
    optimizer = adam(model)
    train(model, optimizer, rank, 2)
    elements = sum(each.numel() for each in Net(width=32).parameters())
    held = sum(
        {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in model.parameters()
        }.values()
    )
    state = sum(
        each.numel() for of in optimizer.state.values() for each in of.values() if each.dim() > 0
    )
    assert held == pytest.approx(4 * elements / size, rel=0.05)
    assert state <= 2 * (elements / size * 1.1)
    assert all(each.dim() == 1 and each.grad.shape == each.shape for each in model.parameters())
    units = fsdp.units.units_in(model)
    assert len(units) == 4 and sum(unit.unsharded_bytes for unit in units) == 0
    assert sorted(name for name, _ in model.named_parameters()) == sorted(
        name for name, _ in Net().named_parameters()
    )


# spec: M1 parameters, gradients and optimizer state are sharded; M3 memory per rank falls as 1/n
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_keeps_its_share(size):
    on_ranks(size, shares)


def adds_up(rank, size):
    alone = Net()
    (sum(loss_of(alone, each, step) for each in range(size) for step in range(3)) / size).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    for wrap in WAYS.values():
        model = wrap(Net())
        if isinstance(model, FSDP):
            with model.no_sync():
                (loss_of(model, rank, 0) * 1000).backward()
                model.zero_grad()
                loss_of(model, rank, 0).backward()
                assert all(each.grad is None for each in model.parameters())
        else:
            model.set_requires_gradient_sync(False)
            loss_of(model, rank, 0).backward()
            model.set_requires_gradient_sync(True)
        loss_of(model, rank, 1).backward()
        loss_of(model, rank, 2).backward()
        torch.testing.assert_close(model.clip_grad_norm_(0.5), norm, rtol=1e-5, atol=0)
        sgd = torch.optim.SGD(model.parameters(), lr=1)
        sgd.step()
        reference = copy.deepcopy(alone)
        for each, of in zip(reference.parameters(), alone.parameters()):
            each.grad = of.grad
        torch.optim.SGD(reference.parameters(), lr=1).step()
        assert_same(whole(model), reference.state_dict())


# spec: M1 gradients of several passes add up, with and without no_sync
def test_gradients_add_up():
    on_ranks(2, adds_up)


def clips_mixed(rank, size):
    mesh = dist.init_device_mesh("cpu", (2, size // 2))
    alone = Net()
    (sum(loss_of(alone, each, 0) for each in range(size)) / size).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.optim.SGD(alone.parameters(), lr=1).step()
    strategy = fsdp.ShardingStrategy
    ways = {
        strategy.FULL_SHARD: {},
        strategy.NO_SHARD: {},
        strategy.HYBRID_SHARD: {"device_mesh": mesh},
    }
    for outer, around in ways.items():
        for inner, within in ways.items():
            net = Net()
            net.blocks[0] = FSDP(net.blocks[0], sharding_strategy=inner, **within)
            model = FSDP(net, sharding_strategy=outer, **around)
            loss_of(model, rank, 0).backward()
            torch.testing.assert_close(model.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=0)
            torch.optim.SGD(model.parameters(), lr=1).step()
            assert_same(whole(model), alone.state_dict())
    half = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
    net = Net()
    net.blocks[0] = FSDP(net.blocks[0], process_group=half)
    model = FSDP(net)
    loss_of(model, rank, 0).backward()
    with pytest.raises(dist.DistError, match="units lie on different ranks"):
        model.clip_grad_norm_(0.1)


# spec: M6.norms units that are full, hybrid and not sharded in one model: a parameter counts once
# in the norm, or it is refused on all ranks
def test_units_of_different_groups_are_clipped_by_one_norm():
    on_ranks(4, clips_mixed)


class TwoUnits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.swapped = False

    def forward(self, x):
        return self.first(self.second(x)) if self.swapped else self.second(self.first(x))


def runs_units_in_another_order(rank, size):
    for trains in (True, False):
        for shard in (FSDP, None):
            model = TwoUnits()
            for name in ("first", "second"):
                unit = getattr(model, name)
                setattr(model, name, FSDP(unit) if shard else fsdp.fully_shard(unit))
            with torch.set_grad_enabled(trains):
                model(torch.ones(2, 4))
                model.swapped = rank == 1
                with pytest.raises(dist.DistBackendError, match="make different calls.*rank 1"):
                    model(torch.ones(2, 4))


# spec: M6.order in Python: ranks that run units in another order get an error in that forward, in
# training and in evaluation, on every rank
def test_units_in_another_order_are_refused_in_forward():
    on_ranks(3, runs_units_in_another_order)


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, angle):
        self.saw = x.dtype, angle.dtype
        return self.scale * x * angle.to(x.dtype)


class Outer(torch.nn.Module):
    """Gives its inner module a tensor of its own making."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner(x, torch.ones(4)))


def narrow(rank, size):
    reference = Net()
    expected = [
        sum(loss_of(reference, each, step).item() for each in range(size)) / size
        for step in range(1)
    ]
    for precision in (
        fsdp.MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
        theirs.MixedPrecision(torch.bfloat16),
    ):
        model = FSDP(Net(), auto_wrap_policy={Block}, mixed_precision=precision)
        seen = []
        model.blocks[0].module.up.register_forward_hook(
            lambda module, args, out: seen.append((args[0].dtype, module.weight.dtype, out.dtype))
        )
        losses = train(model, adam(model), rank)
        assert set(seen) == {(torch.bfloat16,) * 3}
        assert all(each.dtype == each.grad.dtype == torch.float32 for each in model.parameters())
        loss = torch.tensor(losses[0])
        dist.all_reduce(loss)
        torch.testing.assert_close(loss.item() / size, expected[0], rtol=0.05, atol=0.05)
    for everywhere, angle in (
        (False, torch.float32),
        (True, torch.bfloat16),
    ):  # only the outermost unit casts, unless it is told otherwise
        model = FSDP(
            Outer(),
            auto_wrap_policy={Inner},
            mixed_precision=fsdp.MixedPrecision(torch.bfloat16, cast_forward_inputs=everywhere),
        )
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
        assert model.inner.module.saw == (torch.bfloat16, angle)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Block(8), mp_policy=policy)
    assert model(torch.ones(2, 8)).dtype == torch.float32


def test_may_compute_in_a_narrower_type():
    on_ranks(2, narrow)


class Tied(torch.nn.Module):
    """A block in two places, keyword arguments, a result in a dataclass-free nest, and an input
    that wants its gradient.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        block = Block(6)
        self.first, self.again = block, block
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, *, factor, more=()):
        return [self.again(self.frozen(self.first(x))) * factor, *more]


def odd(rank, size):
    alone, model = Tied(), FSDP(Tied(), auto_wrap_policy={Block, torch.nn.Linear})
    for net, x in (
        (alone, torch.arange(24.0).view(4, 6) / 24),
        (model, (torch.arange(24.0).view(4, 6) / 24)[2 * rank : 2 * rank + 2].clone()),
    ):
        x.requires_grad_()
        factor = torch.tensor(2.0, requires_grad=True)
        out = net(x, factor=factor, more=[x * 1])
        (out[0].square().mean() + out[1].mean()).backward()
        net.seen = x.grad, factor.grad
    torch.testing.assert_close(model.seen[0], 2 * alone.seen[0][2 * rank : 2 * rank + 2])
    sums = model.seen[1].clone()
    dist.all_reduce(sums)
    torch.testing.assert_close(sums / 2, alone.seen[1])
    assert model.first is model.again and model.frozen.weight.grad is None
    with FSDP.summon_full_params(model):
        pass
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_same(whole(model), alone.state_dict())
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            model(torch.ones(1, 6), factor=torch.ones(()))
    assert sum(unit.unsharded_bytes for unit in fsdp.units.units_in(model)) == 0

    # Ignored parameters stay whole.
    net = Net()
    part = FSDP(net, ignored_states=[net.scale], ignored_modules=[net.blocks[0]])
    assert (
        net.scale.shape == (1,)
        and net.blocks[0].up.weight.dim() == 2
        and net.blocks[1].up.weight.dim() == 1
    )
    train(part, adam(part), rank)

    module = sharded(Net())
    module.unshard()
    assert not is_divided(module.table.weight) and is_divided(module.blocks[0].up.weight)
    assert module.table.weight.shape == (11, 12)
    module.reshard()
    assert is_divided(module.table.weight) and module.table.weight.shape == (11, 12)
    module.unshard()
    loss_of(module, rank, 0).backward()
    assert is_divided(module.table.weight) and all(
        each.grad.placements == each.placements for each in module.parameters()
    )
    mesh = dist.init_device_mesh("cpu", (size,))
    assert is_divided(fully_shard(torch.nn.Linear(2, 2), mesh=mesh).weight)
    with fsdp.wrap.enable_wrap(wrapper_cls=FSDP, process_group=dist.group.WORLD):
        assert isinstance(fsdp.wrap.wrap(torch.nn.Linear(2, 2)), FSDP)
    assert isinstance(fsdp.wrap.wrap(torch.nn.Linear(2, 2)), torch.nn.Linear)
    picked = FSDP(
        Net(),
        auto_wrap_policy=fsdp.wrap.CustomPolicy(
            lambda module: (
                {"sharding_strategy": "SHARD_GRAD_OP"} if isinstance(module, Block) else False
            )
        ),
    )
    assert len(FSDP.fsdp_modules(picked)) == 4
    transformers = functools.partial(
        fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}
    )
    assert len(FSDP.fsdp_modules(FSDP(Net(), auto_wrap_policy=transformers))) == 4
    by_name = functools.partial(
        fsdp.wrap.lambda_auto_wrap_policy,
        lambda_fn=lambda module: isinstance(module, torch.nn.LayerNorm),
    )
    assert len(FSDP.fsdp_modules(FSDP(Net(), auto_wrap_policy=by_name))) == 4
    linear = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert len(FSDP.fsdp_modules(FSDP(linear, auto_wrap_policy=fsdp.wrap.always_wrap_policy))) == 2


def test_models_of_other_kinds():
    on_ranks(2, odd)


class Trunk(torch.nn.Module):
    """A plain module that has a sharded block recomputed."""

    def __init__(self, reentrant):
        super().__init__()
        self.block = FSDP(Block(4), mixed_precision=fsdp.MixedPrecision(torch.bfloat16))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def keeps_nothing(rank, size):
    for reentrant in (True, False):
        trunk = Trunk(reentrant)
        for _ in range(2):
            x = torch.ones(3, 4, requires_grad=True)
            trunk(x).sum().backward()
            assert x.grad.dtype == torch.float32
    # An input dies with its graph, also where forward ends with an exception, as it does when a
    # checkpoint has recomputed enough.
    model = sharded(Net(checkpointed="not reentrant"))
    seen = []
    model.blocks[1].register_forward_pre_hook(
        lambda module, args: seen.append(weakref.ref(args[0].untyped_storage()))
    )
    for step in range(3):
        loss_of(model, rank, step).backward()
    block, x = fully_shard(Block(4)), torch.ones(2, 4, requires_grad=True) * 1
    block.register_forward_pre_hook(
        lambda module, args: seen.append(weakref.ref(args[0].untyped_storage()))
    )
    block.down = None
    with pytest.raises(TypeError):
        block(x)
    del x
    gc.collect()
    assert len(seen) == 7 and not any(each() for each in seen)
    # A frozen part that nothing flows back through gives its memory back at once.
    net = Net()
    net.blocks[0].requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    net.table.requires_grad_(False)
    model = FSDP(net, auto_wrap_policy={Block})
    loss = loss_of(model, rank, 0)
    assert sum(unit.unsharded_bytes for unit in fsdp.units.units_in(model)) == 0
    loss.backward()
    assert (
        net.blocks[0].module.up.weight.grad is None
        and net.blocks[2].module.up.weight.grad is not None
    )
    # Parameters that are whole by unshard() may be used anywhere.
    module = fully_shard(torch.nn.Linear(4, 4))
    module.unshard()
    (module.weight * (rank + 1)).sum().backward()
    assert is_divided(module.weight) and (module.weight.grad.full_tensor() == 1.5).all()


# spec: M1 free: nothing is kept that is not needed
def test_keeps_nothing():
    on_ranks(2, keeps_nothing)


class Apart(torch.nn.Module):
    """Whose inner unit ends its part of backward at its gate on some ranks and at the end of the
    pass on others.
    """

    def __init__(self):
        super().__init__()
        self.inner, self.weight = (
            torch.nn.Linear(8, 8, bias=False),
            torch.nn.Parameter(torch.eye(8)),
        )

    def forward(self, x):
        return self.inner(x) @ self.weight


def apart(rank, size):
    model = FSDP(Apart(), auto_wrap_policy={torch.nn.Linear})
    with pytest.raises(dist.DistError, match="(?s)different|differ"):
        model(torch.ones(2, 8, requires_grad=rank == 0)).sum().backward()


def test_ranks_out_of_step_are_told():
    on_ranks(2, apart)

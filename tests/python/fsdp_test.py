"""`muster.fsdp`: FullyShardedDataParallel and fully_shard, beside one process, DistributedDataParallel, and torch's own on Gloo."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.utils.checkpoint import checkpoint

import muster as dist
from muster import fsdp
from muster.fsdp import FSDP, fully_shard
from muster.nn.parallel import DistributedDataParallel
from training import on_ranks


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Words to numbers, through blocks; the table is also the way out."""

    def __init__(self, seed=1, width=12, checkpointed=""):
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(11, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("bias", torch.full((11,), float(seed)))
        self.checkpointed = checkpointed

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant") if self.checkpointed else block(x)
        return {"scores": x @ self.table.weight.T * self.scale + self.bias}


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (4, 5), generator=generator), torch.randint(0, 11, (4, 5), generator=generator)


def loss_of(model, rank, step):
    words, targets = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(words)["scores"].transpose(1, 2), targets)


def train(model, optimizer, rank, steps=4):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def whole(model):
    return fsdp.get_model_state_dict(model, options=fsdp.StateDictOptions(full_state_dict=True))


def assert_same(state, expected, tolerance=1e-5):
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def sharded(net):
    """By fully_shard, inner modules first."""
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


WAYS = {
    "one": FSDP,
    "classes": functools.partial(FSDP, auto_wrap_policy={Block}),
    "size": functools.partial(FSDP, auto_wrap_policy=functools.partial(fsdp.wrap.size_based_auto_wrap_policy, min_num_params=400)),
    "theirs": functools.partial(FSDP, auto_wrap_policy=theirs.wrap.ModuleWrapPolicy({torch.nn.Linear, Block})),
    "kept": functools.partial(FSDP, auto_wrap_policy={Block}, sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP),
    "in place": sharded,
}


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
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}")
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
    assert_same({name: each for name, each in whole(model).items() if name != "bias"},
                {name: each.full_tensor() for name, each in stock.named_parameters()})


# spec: M3 the same as torch's own fully_shard
def test_trains_as_theirs_does():
    on_ranks(2, as_theirs, gloo=True)


def shares(rank, size):
    model = FSDP(Net(width=32), auto_wrap_policy={Block})
    optimizer = adam(model)
    train(model, optimizer, rank, 2)
    elements = sum(each.numel() for each in Net(width=32).parameters())
    held = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}.values())
    state = sum(each.numel() for of in optimizer.state.values() for each in of.values() if each.dim() > 0)
    assert held == pytest.approx(4 * elements / size, rel=0.05)
    assert state <= 2 * (elements / size * 1.1)
    assert all(each.dim() == 1 and each.grad.shape == each.shape for each in model.parameters())
    units = fsdp.units.units_in(model)
    assert len(units) == 4 and sum(unit.unsharded_bytes for unit in units) == 0
    assert sorted(name for name, _ in model.named_parameters()) == sorted(name for name, _ in Net().named_parameters())


# spec: M1 parameters, gradients and optimizer state are sharded; M3 memory per rank falls as 1/n
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_keeps_its_share(size):
    on_ranks(size, shares)


def states(rank, size, folder):
    expected = Net().state_dict()
    model = FSDP(Net(), auto_wrap_policy={Block})
    assert_same(model.state_dict(), expected, 0)
    kind, config = fsdp.StateDictType, fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, kind.FULL_STATE_DICT, config):
        state = model.state_dict()
        assert_same(state, expected if rank == 0 else {}, 0)
        if rank == 0:
            torch.save(state, f"{folder}/whole.pt")
    dist.barrier()
    with FSDP.state_dict_type(model, kind.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(offload_to_cpu=True)):
        part = model.state_dict()
        assert list(part) == list(expected)
        elements = torch.tensor([part[name].numel() for name, _ in model.named_parameters()])
        dist.all_reduce(elements)
        assert elements.tolist() == [each.numel() for _, each in Net().named_parameters()]
    for wrap in WAYS.values():
        other = wrap(Net(seed=5))
        fsdp.set_model_state_dict(other, torch.load(f"{folder}/whole.pt"), options=fsdp.StateDictOptions(full_state_dict=True))
        assert_same(whole(other), expected, 0)
        own = fsdp.get_model_state_dict(other, options=fsdp.StateDictOptions(cpu_offload=True))
        again = wrap(Net(seed=6))
        assert not fsdp.set_model_state_dict(again, own).missing_keys
        assert_same(whole(again), expected, 0)
        on_zero = fsdp.get_model_state_dict(other, options=fsdp.StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert_same(on_zero, expected if rank == 0 else {}, 0)
        with FSDP.summon_full_params(other), torch.no_grad():
            other.scale.fill_(3)
        assert whole(other)["scale"].item() == 3
    other = FSDP(Net(seed=5))
    other.load_state_dict(torch.load(f"{folder}/whole.pt"))
    assert_same(other.state_dict(), expected, 0)
    with FSDP.state_dict_type(model, kind.SHARDED_STATE_DICT):
        again = FSDP(Net(seed=7), auto_wrap_policy={Block})
        FSDP.set_state_dict_type(again, kind.SHARDED_STATE_DICT)
        again.load_state_dict(model.state_dict())
        assert_same(whole(again), expected, 0)
    wrong = dict(expected, scale=torch.zeros(2))
    with pytest.raises(RuntimeError, match="size mismatch for.*scale"):
        other.load_state_dict(wrong)
    del wrong["scale"]
    with pytest.raises(RuntimeError, match="scale"):
        other.load_state_dict(wrong)
    assert_same(other.state_dict(), expected, 0)


# spec: M2 state_dict called on every rank gives the full one on rank 0, and a sharded form; loading reshards
@pytest.mark.parametrize("size", [1, 3])
def test_states(size, tmp_path):
    on_ranks(size, states, str(tmp_path))


def saves(rank, size, folder):
    model = FSDP(Net(), auto_wrap_policy={Block})
    optimizer = adam(model)
    losses = train(model, optimizer, rank=0)  # the same batches whatever the number of ranks
    state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if rank == 0:
        torch.save(state, f"{folder}/both.pt")
    return losses + train(model, optimizer, rank=0)


def goes_on(rank, size, folder):
    state = torch.load(f"{folder}/both.pt")
    model = sharded(Net(seed=4))
    optimizer = adam(model)
    fsdp.set_model_state_dict(model, state["model"], options=fsdp.StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    losses = train(model, optimizer, rank=0)
    with pytest.raises(ValueError, match="'nobody'"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": {}, "param_groups": [{"params": ["nobody"]}]})
    with pytest.raises(ValueError, match="not the model's"):
        FSDP.optim_state_dict(model, adam(Net()))
    return losses


# spec: M2 a job of another size goes on where one has stopped, with its optimizer
def test_goes_on_with_another_number_of_ranks(tmp_path):
    whole_run = on_ranks(2, saves, str(tmp_path))[0]
    # The optimizer's state is what one process has, by name.
    state = torch.load(f"{tmp_path}/both.pt")["optimizer"]
    alone = Net()
    optimizer = adam(alone)
    train(alone, optimizer, rank=0)
    for name, parameter in alone.named_parameters():
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(state["state"][name][key], value, rtol=1e-4, atol=1e-6)
    for size in (1, 3):
        for losses in on_ranks(size, goes_on, str(tmp_path)):
            torch.testing.assert_close(losses, whole_run[4:], rtol=1e-4, atol=1e-5)


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
    expected = [sum(loss_of(reference, each, step).item() for each in range(size)) / size for step in range(1)]
    for precision in (fsdp.MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16), theirs.MixedPrecision(torch.bfloat16)):
        model = FSDP(Net(), auto_wrap_policy={Block}, mixed_precision=precision)
        seen = []
        model.blocks[0].module.up.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, module.weight.dtype, out.dtype)))
        losses = train(model, adam(model), rank)
        assert set(seen) == {(torch.bfloat16,) * 3}
        assert all(each.dtype == each.grad.dtype == torch.float32 for each in model.parameters())
        loss = torch.tensor(losses[0])
        dist.all_reduce(loss)
        torch.testing.assert_close(loss.item() / size, expected[0], rtol=0.05, atol=0.05)
    for everywhere, angle in ((False, torch.float32), (True, torch.bfloat16)):  # only the outermost unit casts, unless it is told otherwise
        model = FSDP(Outer(), auto_wrap_policy={Inner}, mixed_precision=fsdp.MixedPrecision(torch.bfloat16, cast_forward_inputs=everywhere))
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
        assert model.inner.module.saw == (torch.bfloat16, angle)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Block(8), mp_policy=policy)
    assert model(torch.ones(2, 8)).dtype == torch.float32


def test_may_compute_in_a_narrower_type():
    on_ranks(2, narrow)


class Tied(torch.nn.Module):
    """A block in two places, keyword arguments, a result in a dataclass-free nest, and an input that wants its gradient."""

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
    for net, x in ((alone, torch.arange(24.0).view(4, 6) / 24), (model, (torch.arange(24.0).view(4, 6) / 24)[2 * rank:2 * rank + 2].clone())):
        x.requires_grad_()
        factor = torch.tensor(2.0, requires_grad=True)
        out = net(x, factor=factor, more=[x * 1])
        (out[0].square().mean() + out[1].mean()).backward()
        net.seen = x.grad, factor.grad
    torch.testing.assert_close(model.seen[0], 2 * alone.seen[0][2 * rank:2 * rank + 2])
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

    # What stays whole is nobody's business.
    net = Net()
    part = FSDP(net, ignored_states=[net.scale], ignored_modules=[net.blocks[0]])
    assert net.scale.shape == () and net.blocks[0].up.weight.dim() == 2 and net.blocks[1].up.weight.dim() == 1
    train(part, adam(part), rank)

    module = sharded(Net())
    module.unshard()
    assert module.table.weight.shape == (11, 12) and module.blocks[0].up.weight.dim() == 1
    module.reshard()
    assert module.table.weight.dim() == 1
    module.unshard()
    loss_of(module, rank, 0).backward()
    assert module.table.weight.dim() == 1 and all(each.grad.shape == each.shape for each in module.parameters())
    mesh = dist.init_device_mesh("cpu", (size,))
    assert fully_shard(torch.nn.Linear(2, 2), mesh=mesh).weight.dim() == 1
    with fsdp.wrap.enable_wrap(wrapper_cls=FSDP, process_group=dist.group.WORLD):
        assert isinstance(fsdp.wrap.wrap(torch.nn.Linear(2, 2)), FSDP)
    assert isinstance(fsdp.wrap.wrap(torch.nn.Linear(2, 2)), torch.nn.Linear)
    picked = FSDP(Net(), auto_wrap_policy=fsdp.wrap.CustomPolicy(
        lambda module: {"sharding_strategy": "SHARD_GRAD_OP"} if isinstance(module, Block) else False))
    assert len(FSDP.fsdp_modules(picked)) == 4
    transformers = functools.partial(fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert len(FSDP.fsdp_modules(FSDP(Net(), auto_wrap_policy=transformers))) == 4
    by_name = functools.partial(fsdp.wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, torch.nn.LayerNorm))
    assert len(FSDP.fsdp_modules(FSDP(Net(), auto_wrap_policy=by_name))) == 4
    linear = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert len(FSDP.fsdp_modules(FSDP(linear, auto_wrap_policy=fsdp.wrap.always_wrap_policy))) == 2


def surroundings(rank, size):
    """What people do around a model."""
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

    # Dictionaries that forward fills are the caller's own; hooks see whole parameters; other methods gather too where they are told to.
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
    assert cache["x"].shape == (1, 3) and set(seen) == {(3, 3)} and module.weight.dim() == 1

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
    assert model.clip_grad_norm_(1).item() == pytest.approx(28 ** 0.5)  # 16 + 4 sharded, 8 on each rank alike
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
    assert FSDP(torch.nn.Linear(4, 4), process_group=turned).process_group.rank() == turned.rank() == 1 - rank
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        FSDP(torch.nn.SyncBatchNorm(4))


def test_surroundings():
    on_ranks(2, surroundings)


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
    # An input dies with its graph, also where forward ends with an exception, as it does when a checkpoint has recomputed enough.
    model = sharded(Net(checkpointed="not reentrant"))
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0].untyped_storage())))
    for step in range(3):
        loss_of(model, rank, step).backward()
    block, x = fully_shard(Block(4)), torch.ones(2, 4, requires_grad=True) * 1
    block.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0].untyped_storage())))
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
    assert net.blocks[0].module.up.weight.grad is None and net.blocks[2].module.up.weight.grad is not None
    # What is whole by unshard() may be used anywhere.
    module = fully_shard(torch.nn.Linear(4, 4))
    module.unshard()
    (module.weight * (rank + 1)).sum().backward()
    assert module.weight.dim() == 1 and (module.weight.grad == 1.5).all()


# spec: M1 free: nothing is kept that is not needed
def test_keeps_nothing():
    on_ranks(2, keeps_nothing)


class Apart(torch.nn.Module):
    """Whose inner unit ends its part of backward at its gate on some ranks and at the end of the pass on others."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = torch.nn.Linear(8, 8, bias=False), torch.nn.Parameter(torch.eye(8))

    def forward(self, x):
        return self.inner(x) @ self.weight


def apart(rank, size):
    model = FSDP(Apart(), auto_wrap_policy={torch.nn.Linear})
    with pytest.raises(dist.DistError, match="(?s)different|differ"):
        model(torch.ones(2, 8, requires_grad=rank == 0)).sum().backward()


def test_ranks_out_of_step_are_told():
    on_ranks(2, apart)


def test_models_of_other_kinds():
    on_ranks(2, odd)


def fails(rank, size):
    for options, what in [
            (dict(cpu_offload=fsdp.CPUOffload(True)), "cpu_offload"), (dict(param_init_fn=print), "param_init_fn"),
            (dict(sharding_strategy="NO_SHARD"), "NO_SHARD is DistributedDataParallel"), (dict(auto_wrap_policy=3), "policy.*int"),
            (dict(process_group=dist.group.WORLD, device_mesh=dist.init_device_mesh("cpu", (2,))), "not both"),
            (dict(device_mesh=dist.init_device_mesh("cpu", (2, 1))), "2 dimensions")]:
        with pytest.raises(ValueError, match=what):
            FSDP(Net(), **options)
    with pytest.raises(ValueError, match="meta device"):
        FSDP(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="lazy module"):
        FSDP(torch.nn.LazyLinear(2))
    model = sharded(Net())
    for again, what in [(lambda: fully_shard(model), "sharded already"), (lambda: FSDP(model), "sharded already"),
                        (lambda: fully_shard(torch.nn.ModuleList([torch.nn.Linear(2, 2)])), "ModuleList"),
                        (lambda: FSDP(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)])), auto_wrap_policy={torch.nn.ModuleList}),
                         "ModuleList"),
                        (lambda: FSDP(torch.nn.Sequential(fully_shard(torch.nn.Linear(2, 2)))), "one of the two"),
                        (lambda: fully_shard(torch.nn.Sequential(FSDP(torch.nn.Linear(2, 2)))), "one of the two"),
                        (lambda: fsdp.set_model_state_dict(model, {}, options=StateDictOptions(broadcast_from_rank0=True)), "broadcast_from_rank0"),
                        (lambda: fully_shard([torch.nn.Linear(2, 2)]), "one module"),
                        (lambda: fully_shard(torch.nn.Linear(2, 2), reshard_after_forward=2), "True or False"),
                        (lambda: model.unshard(async_op=True), "async_op"),
                        (lambda: FSDP(Net()).load_state_dict({}, assign=True), "assign"),
                        (lambda: FSDP.summon_full_params(FSDP(Net()), rank0_only=True).__enter__(), "writeback=False")]:
        with pytest.raises(ValueError, match=what):
            again()
    with pytest.raises(dist.DistError, match=r"FullyShardedDataParallel.*weight \[3, 2\]"):
        FSDP(torch.nn.Linear(2, 2 + rank))
    # An exception in forward leaves the model as it was.
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 99))
    assert model.table.weight.dim() == 1 and model.blocks[0].up.weight.dim() == 1
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
    with pytest.raises(KeyError if rank == 1 else dist.DistError, match="today" if rank == 1 else "rank 1"):
        loss.backward()
    assert all(each.dim() == 1 for each in model.parameters())
    with pytest.raises(dist.DistError, match="cannot go on"):
        model(torch.ones(2, 4))


def test_failures():
    on_ranks(2, fails)

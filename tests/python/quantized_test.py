# SPDX-License-Identifier: BSD-3-Clause
"""muster.quantized, the option `compression` and the hooks that use it."""

import pytest
import stock_ranks
import torch
import torch.distributed as stock
from ranks import meeting_file, run_ranks

import muster as dist
import muster.quantized
from muster import fsdp
from muster.algorithms.ddp_comm_hooks import default_hooks
from muster.nn.parallel import DistributedDataParallel

SIZE = 3
# How far one hop may be off, relative to the largest value of a block.
STEP = {"bf16": 1 / 256, "int8": 1 / 252, "int4": 1 / 13.9}


@pytest.fixture(autouse=True)
def compress_within_host(monkeypatch):
    """Compression also between ranks of one host, where these are."""
    monkeypatch.setenv("MUSTER_COMPRESS_WITHIN_HOST", "1")


def on_ranks(body, size=SIZE):
    run_ranks(size, _member, size, "file://" + meeting_file(), body)


def _member(rank, size, url, body):
    dist.init_process_group(init_method=url, rank=rank, world_size=size)
    body(rank, size)
    dist.destroy_process_group()


def values(rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def assert_same_everywhere(tensor):
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor)
    assert all(torch.equal(each, tensor) for each in everybody)


def reduces(rank, size):
    every = [values(each, 1000) for each in range(size)]
    largest = sum(each.abs().max() for each in every)
    for compression, step in STEP.items():
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            exact = sum(every) / (size if op == dist.ReduceOp.AVG else 1)
            mine = values(rank, 1000)
            assert muster.quantized.all_reduce(mine, op, compression=compression) is None
            assert 0 < (mine - exact).abs().max() <= 2.2 * step * largest
            assert_same_everywhere(mine)
            again = values(rank, 1000)
            work = dist.all_reduce(again, op, async_op=True, compression=compression)
            work.wait()
            assert torch.equal(again, mine)
    default = values(rank, 1000)
    muster.quantized.all_reduce(default)
    named = values(rank, 1000)
    dist.all_reduce(named, compression="int8")
    assert torch.equal(default, named)


# spec: X1 quantized all_reduce from Python: same bits on every rank, stated error
def test_all_reduce():
    on_ranks(reduces)


def moves(rank, size):
    q = muster.quantized
    every = [values(each, 4, 100) for each in range(size)]
    for compression, step in STEP.items():
        bound = 1.1 * step * max(each.abs().max() for each in every)

        parts = [torch.empty(4, 100) for _ in range(size)]
        q.all_gather(parts, every[rank], compression=compression)
        whole = torch.empty(size * 4, 100)
        q.all_gather_into_tensor(whole, every[rank], compression=compression)
        assert torch.equal(torch.cat(parts), whole)
        assert (whole - torch.cat(every)).abs().max() <= bound
        assert_same_everywhere(whole)

        sent = every[rank].clone()
        q.broadcast(sent, src=1, compression=compression)
        assert (sent - every[1]).abs().max() <= bound
        assert_same_everywhere(sent)

        mine = torch.cat([every[rank]] * size)
        part, listed = torch.empty(4, 100), torch.empty(4, 100)
        q.reduce_scatter_tensor(part, mine, compression=compression)
        q.reduce_scatter(listed, list(mine.chunk(size)), compression=compression)
        assert torch.equal(part, listed)
        assert (part - sum(every)).abs().max() <= size * bound


# spec: X1 reduce_scatter, all_gather and broadcast from Python
def test_moves():
    on_ranks(moves)


def refuses(rank, size):
    for tensor, options, part in [
        (torch.ones(3, dtype=torch.int32), {}, "int32"),
        (torch.ones(3), {"op": dist.ReduceOp.MAX}, "MAX"),
        (torch.ones(3), {"compression": "int3"}, "bf16, int8 or int4"),
    ]:
        with pytest.raises(dist.DistError, match=part):
            muster.quantized.all_reduce(tensor, **options)


# spec: X1.refusal what cannot be compressed, by name
def test_refusals():
    on_ranks(refuses, 2)


RATE = 0.05


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def flat(tensors):
    return torch.cat([each.detach().flatten() for each in tensors])


def net_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def largest_gradient(net, size):
    """Of any rank, in the first step."""
    losses = [loss_of(net, values(rank, 16, 8)) for rank in range(size)]
    return max(flat(torch.autograd.grad(each, net.parameters())).abs().max() for each in losses)


def one_step_apart(compression, largest):
    """How far weights may be apart after a step of SGD: gradients have two hops, each off by a step
    of the largest value of a block at most, and the second hop carries the error of the first.
    """
    step = STEP[compression]
    return RATE * (2 + step) * step * largest + 1e-6


def trained_steps(model, rank, flat_of):
    """The weights after the first step, and after ten, whose losses fall."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, weights = [], []
    for step in range(10):
        x = values(10 * step + rank, 16, 8)
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append(flat_of(model))
    assert losses[-1] < losses[0]
    return weights[0], weights[-1]


def trains(rank, size):
    def trained(hook):
        model = DistributedDataParallel(net_of(), bucket_cap_mb=0.0005)
        if hook is not None:
            model.register_comm_hook(None, hook)
        return trained_steps(model, rank, lambda model: flat(model.parameters()))

    plain, _ = trained(None)
    for compression, hook in [
        ("int8", default_hooks.int8_compress_hook),
        ("int4", default_hooks.int4_compress_hook),
    ]:
        first, last = trained(hook)
        bound = one_step_apart(compression, largest_gradient(net_of(), size))
        assert 0 < (first - plain).abs().max() <= bound
        assert_same_everywhere(last)


# spec: X1 DDP with a communication hook in int8 and int4: replicas keep the same bits
def test_hooks_of_ddp():
    on_ranks(trains, 2)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 33)
        self.last = torch.nn.Linear(33, 1)
        self.used = []

    def forward(self, x):
        self.used.append(self.last.weight.detach().clone())
        return self.last(torch.tanh(self.first(x)))


def flat_state(model):
    whole = fsdp.StateDictOptions(full_state_dict=True)
    return flat(fsdp.get_model_state_dict(model, options=whole).values())


def trained_sharded(rank, shard, gradients, parameters):
    net = Layers()
    model = shard(net)
    fsdp.set_compression(model, gradients=gradients, parameters=parameters)
    first, _ = trained_steps(model, rank, flat_state)
    return net.used, first


def shards(rank, size):
    exact = Layers()
    largest = largest_gradient(exact, size)
    largest_weight = flat(exact.parameters()).abs().max()
    for shard in (fsdp.FSDP, fsdp.fully_shard):
        _, plain = trained_sharded(rank, shard, None, None)
        for gradients, parameters in [("int8", None), (None, "bf16"), ("int4", "int8")]:
            used, first = trained_sharded(rank, shard, gradients, parameters)
            off = (used[0] - exact.last.weight).abs().max()
            if parameters is None:
                assert off == 0
                assert 0 < (first - plain).abs().max() <= one_step_apart(gradients, largest)
            else:
                assert 0 < off <= STEP[parameters] * largest_weight
            for each in used:
                assert_same_everywhere(each)
    with pytest.raises(dist.DistError, match="int3"):
        fsdp.set_compression(fsdp.fully_shard(Layers()), gradients="int3")
    with pytest.raises(dist.DistError, match="has no unit"):
        fsdp.set_compression(Layers(), gradients="int8")


# spec: X1 FSDP and fully_shard: gradients and gathers in bf16, int8, int4
def test_fsdp():
    on_ranks(shards, 2)


def stock_calls(rank, size):
    q = muster.quantized
    every = [values(each, 900) for each in range(size)]
    exact = sum(every) / size
    largest = sum(each.abs().max() for each in every) / size
    for compression, step in STEP.items():
        for group in (None, stock.group.WORLD, stock.new_group()):
            mine = every[rank].clone()
            assert q.all_reduce(mine, stock.ReduceOp.AVG, group, compression=compression) is None
            assert 0 < (mine - exact).abs().max() <= 2.2 * step * largest
            whole = torch.empty(size * 900)
            work = q.all_gather_into_tensor(whole, mine, group, True, compression=compression)
            work.wait()
            assert all(torch.equal(whole[:900], each) for each in whole.chunk(size))
        others = stock.new_group([1, 2])
        if rank > 0:
            sent = every[rank].clone()
            q.broadcast(sent, 2, others, compression=compression)
            assert (sent - every[2]).abs().max() <= 1.1 * step * every[2].abs().max()
        else:
            with pytest.raises(dist.DistError, match="not a member"):
                q.all_reduce(torch.ones(3), group=others)
    with pytest.raises(dist.DistError, match="only SUM and AVG"):
        q.all_reduce(torch.ones(3), stock.ReduceOp.MAX)


# spec: X1 the face of stock torch: groups of torch.distributed with backend muster
def test_stock_groups():
    stock_ranks.on_ranks(SIZE, stock_calls)


def stock_gloo(rank, size):
    with pytest.raises(dist.DistError, match="'gloo', which compresses nothing"):
        muster.quantized.all_reduce(torch.ones(3))


# spec: X1.refusal a group of another backend, by name
def test_groups_of_other_backends():
    stock_ranks.on_ranks(2, stock_gloo, backend="gloo")


def stock_training(rank, size):
    def trained(hook):
        model = torch.nn.parallel.DistributedDataParallel(net_of(), bucket_cap_mb=0.0005)
        if hook is not None:
            model.register_comm_hook(None, hook)
        return trained_steps(model, rank, lambda model: flat(model.parameters()))

    plain, _ = trained(None)
    for compression in ("int8", "int4"):
        first, last = trained(muster.quantized.comm_hook(compression))
        bound = one_step_apart(compression, largest_gradient(net_of(), size))
        assert 0 < (first - plain).abs().max() <= bound
        whole = [torch.empty_like(last) for _ in range(size)]
        stock.all_gather(whole, last)
        assert all(torch.equal(each, last) for each in whole)


# spec: X1 stock torch's DistributedDataParallel with a hook in int8 and int4
def test_hook_of_stock_ddp():
    stock_ranks.on_ranks(2, stock_training)

# SPDX-License-Identifier: BSD-3-Clause
"""muster.quantized, the option `compression` and the hooks that use it."""

import pytest
import torch
from ranks import meeting_file, run_ranks

import muster as dist
import muster.quantized
from muster.algorithms.ddp_comm_hooks import default_hooks
from muster.nn.parallel import DistributedDataParallel

SIZE = 3
# How far one hop may be off, relative to the largest value of a block.
STEP = {"bf16": 1 / 256, "int8": 1 / 252, "int4": 1 / 13.9}


def on_ranks(body, size=SIZE):
    run_ranks(size, _member, size, meeting_file(), body)


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


def trains(rank, size):
    def trained(hook):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        model = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        if hook is not None:
            model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(10):
            x = values(10 * step + rank, 16, 8)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    plain = trained(None)
    for hook, near in [
        (default_hooks.int8_compress_hook, 2e-2),
        (default_hooks.int4_compress_hook, 2e-1),
    ]:
        weights = trained(hook)
        assert 0 < (weights - plain).abs().max() <= near
        assert_same_everywhere(weights)


# spec: X1 DDP with a communication hook in int8 and int4: replicas keep the same bits
def test_hooks_of_ddp():
    on_ranks(trains, 2)

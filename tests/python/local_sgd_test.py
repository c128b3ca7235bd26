# SPDX-License-Identifier: BSD-3-Clause
"""muster.local_sgd beside the same algorithms written with stock torch in one process."""

import copy
import datetime

import pytest
import torch
from ranks import meeting_file, run_ranks

import muster as dist
from muster import fsdp, local_sgd

STEPS = 24


@pytest.fixture(autouse=True)
def compress_within_host(monkeypatch):
    """Compression also between ranks of one host, where these are."""
    monkeypatch.setenv("MUSTER_COMPRESS_WITHIN_HOST", "1")


def on_ranks(body, size, *arguments):
    return run_ranks(size, _member, size, "file://" + meeting_file(), body, arguments)


def _member(rank, size, url, body, arguments):
    dist.init_process_group(init_method=url, rank=rank, world_size=size)
    result = body(rank, size, *arguments)
    dist.destroy_process_group()
    return result


def net_of(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    layers = torch.nn.Linear(4, 9), torch.nn.Linear(9, 9), torch.nn.Linear(9, 1)
    net = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    with torch.no_grad():
        for each in net.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) * 0.4)
    return net.to(dtype)


def batch(replica, step, dtype=torch.float64):
    seed = torch.Generator().manual_seed(1000 * replica + step)
    return torch.randn(8, 4, generator=seed, dtype=dtype)


def train(net, optimizer, x):
    optimizer.zero_grad()
    (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def flat(tensors):
    return torch.cat([each.detach().flatten() for each in tensors])


def stock_diloco(replicas, fragments, sync_every, delay, mix):
    """Streaming DiLoCo by torch.optim alone: each replica's weights."""
    nets = [net_of() for _ in range(replicas)]
    inner = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    parts = [local_sgd.fragments_of(net, fragments) for net in nets]
    outer = [[each.detach().clone() for each in part] for part in parts[0]]
    optimizers = [torch.optim.SGD(each, lr=0.7, momentum=0.9, nesterov=True) for each in outer]
    on_the_way = {}
    for step in range(1, STEPS + 1):
        for replica, net in enumerate(nets):
            train(net, inner[replica], batch(replica, step))
        for f in range(fragments):
            if step % sync_every == (f + 1) * sync_every // fragments % sync_every:
                on_the_way[step + delay, f] = [
                    sum(each - part[f][i].detach() for part in parts) / replicas
                    for i, each in enumerate(outer[f])
                ]
        for f in range(fragments):
            for each, average in zip(outer[f], on_the_way.pop((step, f), []), strict=False):
                each.grad = average
            if outer[f][0].grad is None:
                continue
            optimizers[f].step()
            optimizers[f].zero_grad()
            with torch.no_grad():
                for part in parts:
                    for mine, each in zip(part[f], outer[f], strict=True):
                        mine.copy_(mix * mine + (1 - mix) * each)
    return [flat(net.parameters()) for net in nets]


CASES = [(1, 5, 0, 0.0), (3, 6, 0, 0.0), (2, 7, 3, 0.5)]


def trains(rank, size):
    for case, (fragments, sync_every, delay, mix) in enumerate(CASES):
        net = net_of(seed=rank)  # rank 0's values are taken
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        expected = stock_diloco(size, fragments, sync_every, delay, mix)[rank]
        with local_sgd.DiLoCo(
            net, optimizer, fragments=fragments, sync_every=sync_every, delay=delay, mix=mix
        ) as diloco:
            for step in range(1, STEPS + 1):
                train(net, optimizer, batch(rank, step))
        assert diloco.steps == STEPS
        assert (flat(net.parameters()) - expected).abs().max() < 1e-9, CASES[case]
        train(net, optimizer, batch(rank, 0))
        assert diloco.steps == STEPS  # no longer counted


# spec: X2 DiLoCo in Python: the weights of the algorithm written with stock torch, in float64
def test_diloco():
    on_ranks(trains, 2)


def averages(rank, size):
    net = net_of(seed=rank)
    local = local_sgd.LocalSgd(net, sync_every=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    alone = [net_of() for _ in range(size)]
    for step in range(1, 10):
        train(net, optimizer, batch(rank, step))
        local.step()
        for replica, each in enumerate(alone):
            train(each, torch.optim.SGD(each.parameters(), lr=0.05), batch(replica, step))
        if step % 3 == 0:
            mean = sum(flat(each.parameters()) for each in alone) / size
            for each in alone:
                torch.nn.utils.vector_to_parameters(mean.clone(), each.parameters())
        mine = flat(alone[rank].parameters())
        assert (flat(net.parameters()) - mine).abs().max() < 1e-12
    assert local.meetings == 3


# spec: X2 LocalSgd in Python
def test_local_sgd():
    on_ranks(averages, 3)


def by_clock(rank, size):
    net = net_of()
    with torch.no_grad():
        for each in net.parameters():
            each.zero_()
    period = datetime.timedelta(milliseconds=20)
    local = local_sgd.LocalSgd(net, sync_period=period, by_tokens=True)
    while local.tokens < 300:  # the same on both ranks after each meeting
        with torch.no_grad():
            for each in net.parameters():
                each += 10 if rank == 1 else 0  # ten for each token
        local.step(tokens=rank)
    values = flat(net.parameters())
    assert local.meetings >= 1
    assert torch.allclose(values, values[0].expand_as(values), atol=0, rtol=0)
    everywhere = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(everywhere, values)
    assert torch.equal(everywhere[0], everywhere[1])
    # rank 0 has no tokens, so rank 1's values are taken as they are
    assert abs(values[0].item() - 10 * local.tokens) < 1e-6 * local.tokens


# spec: X3.clock, X3.tokens in Python: replicas that make different numbers of steps end together
def test_by_clock():
    on_ranks(by_clock, 2)


def joins(rank, size):
    pair = dist.new_group([0, 1])
    made = {"sync_every": 2, "delay": 1, "compression": "int8"}
    net = net_of(seed=rank, dtype=torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    if rank < 2:
        diloco = local_sgd.DiLoCo(net, group=pair, **made)
        for step in range(4):
            train(net, optimizer, batch(rank, step, torch.float32))
            diloco.step()
        diloco.set_group(None)
    else:
        diloco = local_sgd.DiLoCo(net, **made)
    assert diloco.steps == 4
    for step in range(4, 9):
        train(net, optimizer, batch(rank, step, torch.float32))
        diloco.step()
    outer = flat(diloco.outer_parameters)
    everywhere = [torch.empty_like(outer) for _ in range(size)]
    dist.all_gather(everywhere, outer)
    assert all(torch.equal(each, outer) for each in everywhere)
    assert diloco.meetings == 3  # taken in steps 3, 7 and 9


# spec: X2 in Python: a new replica takes the outer state, with the optimizer's, and goes on
def test_joins():
    on_ranks(joins, 3)


def takes_where_it_is(rank, size):
    whole = torch.zeros(3)
    whole._local_tensor = torch.zeros(3)  # as a DTensor's
    diloco = local_sgd.DiLoCo([[whole]], sync_every=1)
    whole._local_tensor += rank + 1
    diloco.step()
    state = copy.deepcopy(diloco.state_dict())
    whole._local_tensor += rank + 1
    diloco.step()
    if rank == 1:
        diloco.load_state_dict(state)  # as if it had missed the second
    whole._local_tensor = torch.zeros(3)
    diloco.set_group(None)
    if rank == 1:
        assert torch.equal(whole._local_tensor, diloco.outer_parameters[0])


# spec: X2 in Python: a missed average is taken where the DTensor's own part is now
def test_takes_where_it_is():
    on_ranks(takes_where_it_is, 2)


def saved(rank, size):
    def made():
        net = net_of(dtype=torch.float32)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        diloco = local_sgd.DiLoCo(
            net, optimizer, fragments=2, sync_every=6, delay=2, mix=0.5, compression="int4"
        )
        return net, optimizer, diloco

    def run(net, optimizer, first, last):
        for step in range(first, last + 1):
            train(net, optimizer, batch(rank, step, torch.float32))

    net, optimizer, _ = made()
    run(net, optimizer, 1, 20)
    other, other_optimizer, other_diloco = made()
    run(other, other_optimizer, 1, 7)
    state = copy.deepcopy(
        (other.state_dict(), other_optimizer.state_dict(), other_diloco.state_dict())
    )
    resumed, resumed_optimizer, resumed_diloco = made()
    resumed.load_state_dict(state[0])
    resumed_optimizer.load_state_dict(state[1])
    resumed_diloco.load_state_dict(state[2])
    run(resumed, resumed_optimizer, 8, 20)
    assert torch.equal(flat(resumed.parameters()), flat(net.parameters()))
    with pytest.raises(dist.DistError, match="other parameters"):
        local_sgd.LocalSgd(net_of(dtype=torch.float32)).load_state_dict(state[2])
    momentum = copy.deepcopy(resumed_diloco.outer_optimizer.state_dict()["state"])
    del state[2]["meetings"]["outer.0"]
    with pytest.raises(dist.DistError, match="lacks 'outer.0'"):
        resumed_diloco.load_state_dict(state[2])
    after = resumed_diloco.outer_optimizer.state_dict()["state"]
    for number, each in momentum.items():
        assert torch.equal(after[number]["momentum_buffer"], each["momentum_buffer"])


# spec: X2 its state in checkpoints: a run that goes on from it has the same bits
def test_state():
    on_ranks(saved, 2)


def within_shards(rank, size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replica = rank // 2
    expected = stock_diloco(2, 1, 5, 0, 0.0)[replica]
    net = fsdp.fully_shard(net_of(), mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    local_sgd.DiLoCo(net, optimizer, sync_every=5, group=mesh.get_group("replicas"))
    for step in range(1, STEPS + 1):
        train(net, optimizer, batch(replica, step).chunk(2)[rank % 2])
    whole = fsdp.get_model_state_dict(net, options=fsdp.StateDictOptions(full_state_dict=True))
    assert (flat(whole.values()) - expected).abs().max() < 1e-9


# spec: X2 around fully_shard: one group across replicas for each shard
def test_around_fully_shard():
    on_ranks(within_shards, 4)


def refuses(rank, size):
    for options, part in [
        ({"sync_every": 0}, "sync_every"),
        ({"sync_every": 3, "delay": 3}, "less than sync_every"),
        ({"mix": 1.0}, "mix must be"),
        ({"fragments": 9}, "smaller count"),
        ({"compression": "int8"}, "not of float64"),
        ({"sync_every": 4 + rank}, "sync_every 4"),
    ]:
        with pytest.raises(dist.DistError, match=part):
            local_sgd.DiLoCo(net_of(), **options)
    with pytest.raises(dist.DistError, match="smaller count"):  # of one rank, on all
        local_sgd.DiLoCo(net_of(), fragments=9 if rank == 1 else 1)
    with pytest.raises(dist.DistError, match="call step"):
        net = net_of()
        local_sgd.LocalSgd(net, torch.optim.SGD(net.parameters(), lr=0.1), by_tokens=True)
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def no_outer(_):
        raise ValueError("no outer optimizer")

    with pytest.raises(ValueError, match="no outer"):
        local_sgd.DiLoCo(net, optimizer, no_outer, sync_every=1)
    train(net, optimizer, batch(rank, 0))  # counts for none that could not be made


# spec: X2.refusal what cannot be, by name
def test_refusals():
    on_ranks(refuses, 2)

# SPDX-License-Identifier: BSD-3-Clause
"""Callbacks in backward: communication hooks that wait for other calls, torch's and our own."""

import threading

import pytest
import torch
import torch.distributed
from ranks import meeting_file, sampled
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from faces import FACES, WAIT, model, on_ranks
from muster.algorithms.ddp_comm_hooks import powerSGD_hook as own_powerSGD_hook
from muster.nn.parallel import DistributedDataParallel

# Options of DDP that make one bucket, and many.
ONE_BUCKET, MANY_BUCKETS = {}, {"bucket_cap_mb": 0.002}
BUCKETS = [ONE_BUCKET, MANY_BUCKETS]


def hook_that_waits(face, size, depth, where):
    def average(value):
        return value / size

    def second(future, left):
        value = average(future.value()[0])
        if left == 0:
            return value
        return face.sum_later(value).then(lambda done: second(done, left - 1)).wait()

    def hook(state, bucket):
        future = face.sum_later(bucket.buffer())
        if where == "at once":  # on the thread in backward
            future.wait()
        chained = future.then(lambda done: second(done, depth))
        if where == "at once":
            chained.wait()
        return chained

    return hook


def trains_with_waits(face, rank, size, depth, where, options):
    _, plain = face.train(model(), steps=20, **options)
    _, hooked = face.train(model(), hook_that_waits(face, size, depth, where), steps=20, **options)
    torch.testing.assert_close(torch.tensor(hooked), torch.tensor(plain), rtol=1e-4, atol=1e-5)


# spec: K4 communication hooks: a hook's callbacks may wait for other calls, with one bucket and
# with many
@pytest.mark.parametrize(
    "face, how, options",
    sampled(8, FACES, [(1, "later"), (2, "later"), (3, "later"), (1, "at once")], BUCKETS),
)
def test_hooks_wait_in_callbacks(face, how, options):
    depth, where = how
    on_ranks(2, face, trains_with_waits, depth, where, options)


def asks_the_model(face, rank, size):
    net = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    seen = []

    def hook(state, bucket):
        seen.append(len(net.bucket_bytes()))

        def average(future):
            seen.append(len(net.bucket_bytes()))
            return future.value()[0] / size

        return face.sum_later(bucket.buffer()).then(average)

    net.register_comm_hook(None, hook)
    for _ in range(3):
        net(torch.randn(2, 24)).sum().backward()
    assert len(seen) > 6 and seen[-1] > 1


# spec: K4 communication hooks: a hook and its callbacks may ask the model
def test_hooks_ask_the_model():
    on_ranks(2, "muster", asks_the_model)


class Calls(torch.autograd.Function):
    """Backward starts a call whose callback starts another one; `seen` gets what was begun, in
    order.
    """

    @staticmethod
    def forward(ctx, x, face, name, seen, before):
        ctx.face, ctx.name, ctx.seen, ctx.before = face, name, seen, before
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        face, name, seen = ctx.face, ctx.name, ctx.seen
        ctx.before()
        seen.append(name)

        def callback(done):
            seen.append("after " + name)
            return face.sum_later(done.value()[0]).wait()[0]

        seen.append(face.sum_later(torch.ones(3)).then(callback))
        return gradient, None, None, None, None


def calls_in_a_pass_within_another(face, rank, size):
    seen = []

    def names():
        return [each for each in seen if isinstance(each, str)]

    def calls(x, name, before=lambda: None):
        return Calls.apply(x, face, name, seen, before)

    def inner_calls_are_over():
        face.dist.all_reduce(torch.ones(1))  # later than those calls, and so are they
        assert not threading.Event().wait(0.1) and names() == ["outer", "inner"]

    x = torch.ones(3, requires_grad=True)
    first = calls(x, "last", inner_calls_are_over)
    inside = torch.utils.checkpoint.checkpoint(
        lambda y: calls(y, "inner"), first, use_reentrant=True
    )
    calls(inside, "outer").sum().backward()
    for each in seen:
        if not isinstance(each, str):
            assert torch.equal(each.wait(), torch.full((3,), float(size * size)))
    assert names() == ["outer", "inner", "last", "after outer", "after inner", "after last"]


# spec: E3 K4 callbacks of a backward pass inside another run after the outer one's calls, in the
# order of the calls
@pytest.mark.parametrize("face", FACES)
def test_callbacks_of_a_pass_within_another(face):
    on_ranks(2, face, calls_in_a_pass_within_another)


HOOKS = {
    "powerSGD": (
        lambda dist: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
    "quantization_pertensor": (lambda dist: None, quantization_hooks.quantization_pertensor_hook),
    "quantization_perchannel": (lambda dist: None, quantization_hooks.quantization_perchannel_hook),
    "post_localSGD": (
        lambda dist: post_localSGD_hook.PostLocalSGDState(
            None, dist.new_group(list(range(dist.get_world_size()))), 10
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
}


def trains_by_torchs_hook(face, rank, size, name, options):
    if face.is_own:  # the hook itself communicates by stock torch, beside muster's own groups
        meeting = torch.distributed.FileStore(options.pop("meeting"), size)
        torch.distributed.init_process_group(
            "muster", store=meeting, rank=rank, world_size=size, timeout=WAIT
        )
    state, hook = HOOKS[name]
    losses, weights = face.train(model(), hook, state(torch.distributed), steps=50, **options)
    if face.is_own:
        torch.distributed.destroy_process_group()
    return losses, weights


# spec: A2 torch's own communication hooks, whose callbacks wait for calls, train on backend muster
# and in muster.nn.parallel
@pytest.mark.parametrize(
    "face, name, size, options", sampled(8, FACES, list(HOOKS), [2, 4], BUCKETS)
)
def test_torchs_hooks_train(face, name, size, options):
    options = options | ({"meeting": meeting_file()} if face == "muster" else {})
    ranks = on_ranks(size, face, trains_by_torchs_hook, name, options)
    for losses, weights in ranks:
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert weights == ranks[0][1]


def trains_by_own_hook(face, rank, size, hook, options):
    state = own_powerSGD_hook.PowerSGDState(start_powerSGD_iter=2)
    return face.train(model(), hook, state, steps=50, **options)


# spec: K9 muster's own PowerSGD hooks train
@pytest.mark.parametrize(
    "hook, size, options",
    sampled(
        4,
        [own_powerSGD_hook.powerSGD_hook, own_powerSGD_hook.batched_powerSGD_hook],
        [2, 4],
        BUCKETS,
    ),
)
def test_own_powerSGD_hooks_train(hook, size, options):
    ranks = on_ranks(size, "muster", trains_by_own_hook, hook, options)
    for losses, weights in ranks:
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert weights == ranks[0][1]

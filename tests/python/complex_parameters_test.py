# SPDX-License-Identifier: BSD-3-Clause
"""Models with complex parameters: every way of training gives what one process gives on all ranks'
inputs."""

import pytest
import torch
from training import lazy_hook, on_ranks

import muster as dist
from muster.algorithms import Join
from muster.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, powerSGD_hook
from muster.fsdp import (
    FSDP,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    set_model_state_dict,
)
from muster.fsdp import MixedPrecision as ShardedPrecision
from muster.nn.parallel import DistributedDataParallel, MixedPrecision
from muster.optim import ZeroRedundancyOptimizer


class Waves(torch.nn.Module):
    """Real in and out, complex of both widths between; `wide` may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.way_in = torch.nn.Linear(6, 8)
        self.turn = torch.nn.Parameter(
            torch.randn(8, 130, dtype=torch.complex64) / 4
        )  # more than 64 bytes, and no whole number of shards
        self.phase = torch.nn.Parameter(torch.randn(130, dtype=torch.complex64) / 4)
        self.wide = torch.nn.Linear(130, 3, dtype=torch.complex128)
        self.point = torch.nn.Parameter(torch.tensor(0.5 + 0.25j))
        self.register_buffer("shift", torch.tensor([0.5j]))

    def forward(self, x, wide=True):
        z = (
            torch.tanh(self.way_in(x)).to(torch.complex64) @ self.turn * self.phase
            + self.shift * self.point
        )
        return self.wide(z.to(torch.complex128)).abs() if wide else z.abs().double()


def loss_of(model, rank, step, **options):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(5, 6, generator=generator), **options).square().mean()


def values(model):
    return [each.detach() for each in model.parameters()]


def whole(model):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [value for name, value in state.items() if not name.endswith("shift")]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def train(model, optimizer, rank, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def trained_alone(size, make=adam, steps=4):
    model = Waves()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, rank, step) / size).backward()
        optimizer.step()
    assert all(value.imag.abs().max() > 0 for value in values(model) if value.is_complex())
    return values(model)


def assert_close(mine, expected, tolerance=1e-4):
    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def with_every_option(rank, size):
    expected = trained_alone(size)
    for options in [
        {},
        {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False},
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
    ]:
        model = DistributedDataParallel(Waves(), **options)
        train(model, adam(model.parameters()), rank)
        assert_close(values(model), expected)
    net = Waves()
    late = [
        (name, each) for name, each in net.named_parameters() if name.startswith(("turn", "wide"))
    ]
    model = DistributedDataParallel(
        net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net.phase
    )
    train(model, adam(model.parameters()), rank)
    assert_close(values(model), expected)

    # In a narrower type the reals change, the complex ones stay what they are.
    model = DistributedDataParallel(
        Waves(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    train(model, sgd(model.parameters()), rank)
    assert model.module.turn.dtype == model.module.turn.grad.dtype == torch.complex64
    assert_close(values(model), trained_alone(size, sgd), 5e-2)

    # Sums of several passes, parameters that one rank leaves out, and ranks without inputs.
    model, alone = DistributedDataParallel(Waves(), find_unused_parameters=True), Waves()
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    loss_of(model, rank, 1, wide=rank != 0).backward()
    for each in range(size):
        ((loss_of(alone, each, 0) + loss_of(alone, each, 1, wide=each != 0)) / size).backward()
    assert_close(
        [each.grad for each in model.parameters()], [each.grad for each in alone.parameters()]
    )
    model, alone = DistributedDataParallel(Waves()), Waves()
    optimizer, reference = adam(model.parameters()), adam(alone.parameters())
    with model.join():
        train(model, optimizer, rank, 1 + rank)
    for step in range(size):
        reference.zero_grad()
        for each in range(step, size):
            (loss_of(alone, each, step) / size).backward()
        reference.step()
    assert_close(values(model), values(alone))


# spec: K1 K2 K7 in Python: complex parameters with every option, no_sync and Join
@pytest.mark.parametrize("size", [2, 3])
def test_options(size):
    on_ranks(size, with_every_option)


def exact():
    """As many columns as matrices have."""
    return powerSGD_hook.PowerSGDState(
        matrix_approximation_rank=1000, start_powerSGD_iter=2, min_compression_rate=1e-9
    )


def with_every_hook(rank, size):
    expected = trained_alone(size, sgd)
    for hook, state, tolerance in [
        (default_hooks.allreduce_hook, None, 1e-4),
        (lazy_hook, None, 1e-4),
        (default_hooks.fp16_compress_hook, None, 2e-3),
        (default_hooks.bf16_compress_hook, None, 2e-2),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None, 2e-3),
        (default_hooks.bf16_compress_wrapper(lazy_hook), None, 2e-2),
        (powerSGD_hook.powerSGD_hook, exact(), 1e-3),
        (powerSGD_hook.batched_powerSGD_hook, exact(), 1e-3),
        (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), exact(), 1e-2),
    ]:
        for options in ({}, {"gradient_as_bucket_view": True}):
            model = DistributedDataParallel(Waves(), bucket_cap_mb=1e-5, **options)
            model.register_comm_hook(state, hook)
            train(model, sgd(model.parameters()), rank)
            assert_close(values(model), expected, tolerance)

    seen = []

    def looking(state, bucket):
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            seen.append((parameter.dtype, gradient.dtype))
            assert gradient.shape == (
                parameter.shape + (2,) if parameter.is_complex() else parameter.shape
            )
            assert (
                gradient.untyped_storage().data_ptr()
                == bucket.buffer().untyped_storage().data_ptr()
            )
        assert bucket.buffer().dim() == 1 and not bucket.buffer().is_complex()
        return lazy_hook(state, bucket)

    model = DistributedDataParallel(Waves())
    model.register_comm_hook(None, looking)
    train(model, sgd(model.parameters()), rank)
    assert_close(values(model), expected)
    assert set(seen) == {
        (torch.float32, torch.float32),
        (torch.complex64, torch.float32),
        (torch.complex128, torch.float64),
    }


# spec: K4 in Python: communication hooks keep imaginary parts
def test_hooks():
    on_ranks(2, with_every_hook)


def divided(rank, size):
    for make, kind, defaults in [
        (adam, torch.optim.Adam, {"lr": 0.01}),
        (sgd, torch.optim.SGD, {"lr": 0.5, "momentum": 0.5}),
    ]:
        expected = trained_alone(size, make)
        for options in ({}, {"parameters_as_bucket_view": True}):
            model = DistributedDataParallel(Waves())
            optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options, **defaults)
            train(model, optimizer, rank)
            assert_close(values(model), expected)
            optimizer.consolidate_state_dict(0)
            states = [optimizer.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(states)
            remembered = [
                value
                for entry in states[0]["state"].values()
                for value in entry.values()
                if torch.is_tensor(value)
            ]
            assert any(value.is_complex() and value.imag.abs().max() > 0 for value in remembered)
            optimizer.load_state_dict(states[0])
        for hook in (
            default_hooks.allreduce_hook,
            lazy_hook,
            default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        ):
            model = DistributedDataParallel(Waves(), bucket_cap_mb=1e-5)
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), kind, overlap_with_ddp=True, **defaults
            )
            model.register_comm_hook(
                None, ddp_zero_hook.hook_with_zero_step(hook, model, optimizer)
            )
            train(model, optimizer, rank)
            if kind is torch.optim.SGD:
                assert_close(values(model), expected, 1e-2)
            elif hook is not lazy_hook:
                assert all(
                    value.imag.abs().max() > 0 for value in values(model) if value.is_complex()
                )
    model, plain = DistributedDataParallel(Waves()), DistributedDataParallel(Waves())
    optimizer, reference = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01),
        adam(plain.parameters()),
    )
    with Join([model, optimizer]):
        train(model, optimizer, rank, 1 + rank)
    with plain.join():
        train(plain, reference, rank, 1 + rank)
    if rank == size - 1:
        assert_close(values(model), values(plain))


# spec: K8 in Python: complex parameters
def test_divided_optimizer():
    on_ranks(2, divided)


def sharded(rank, size):
    expected = trained_alone(size)
    for wrap in (
        FSDP,
        lambda net: FSDP(net, auto_wrap_policy={torch.nn.Linear}),
        lambda net: FSDP(net, sharding_strategy="SHARD_GRAD_OP"),
        lambda net: FSDP(net, mixed_precision=ShardedPrecision(reduce_dtype=torch.float64)),
    ):
        model = wrap(Waves())
        optimizer = adam(model.parameters())
        train(model, optimizer, rank)
        assert_close(whole(model), expected)
        states = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        again = wrap(Waves())
        set_model_state_dict(again, states, options=StateDictOptions(full_state_dict=True))
        assert_close(whole(again), expected)
        loss_of(model, rank, 7).backward()
        alone = Waves()
        alone.load_state_dict(states)
        for each in range(size):
            (loss_of(alone, each, 7) / size).backward()
        model.zero_grad()
        loss_of(model, rank, 7).backward()
        for kind in (2.0, float("inf"), 1.0):
            norm = model.clip_grad_norm_(1e6, kind)
            assert norm.item() == pytest.approx(
                torch.nn.utils.get_total_norm(
                    [each.grad for each in alone.parameters()], kind
                ).item(),
                rel=1e-4,
            )
    state = FSDP.optim_state_dict(model, optimizer)
    assert (
        state["state"]["turn"]["exp_avg"].shape == (8, 130)
        and state["state"]["turn"]["exp_avg"].imag.abs().max() > 0
    )

    model = FSDP(Waves(), mixed_precision=ShardedPrecision(param_dtype=torch.bfloat16))
    train(model, sgd(model.parameters()), rank)
    assert_close(whole(model), trained_alone(size, sgd), 5e-2)
    model, alone = FSDP(Waves()), Waves()
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    loss_of(model, rank, 1).backward()
    with FSDP.summon_full_params(model):
        assert_close(values(model), values(alone))
    optimizer, reference = sgd(model.parameters()), sgd(alone.parameters())
    for each in range(size):
        ((loss_of(alone, each, 0) + loss_of(alone, each, 1)) / size).backward()
    optimizer.step()
    reference.step()
    assert_close(whole(model), values(alone))


def by_rows(rank, size):
    def made():
        torch.manual_seed(4)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 6, dtype=torch.cfloat), torch.nn.Linear(6, 6, dtype=torch.cfloat)
        )

    def loss_of_part(net, each):
        generator = torch.Generator().manual_seed(each)
        return net(torch.randn(3, 5, dtype=torch.cfloat, generator=generator)).abs().sum()

    model, alone = fully_shard(made()), made()
    optimizer, reference = adam(model.parameters()), adam(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of_part(model, size * step + rank).backward()
        for each in range(size):
            (loss_of_part(alone, size * step + each) / size).backward()
        optimizer.step()
        reference.step()
    assert_close(whole(model), list(alone.state_dict().values()))
    # torch gathers a DTensor of such sizes where an optimizer views it as reals, and its step is
    # lost.
    with pytest.raises(dist.DistArgumentError, match="bias is complex.*7"):
        fully_shard(torch.nn.Linear(2, 7, dtype=torch.cfloat))


# spec: M5 in Python: complex parameters under fully_shard
@pytest.mark.parametrize("size", [2, 3])
def test_divided_by_rows(size):
    on_ranks(size, by_rows)


# spec: M1 M2 M3 in Python: complex parameters
@pytest.mark.parametrize("size", [2, 3])
def test_sharded(size):
    on_ranks(size, sharded)

# SPDX-License-Identifier: BSD-3-Clause
"""Uses of a model of `muster.nn.parallel` besides training it: programs freeze it for a pass, and
copy it."""

import copy
import io
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, update_bn
from training import Net, assert_equal, batch, loss_of, on_ranks, sgd, train

import muster as dist
from muster.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from muster.nn.parallel import DistributedDataParallel, MixedPrecision

OPTIONS = [
    {},
    {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"broadcast_buffers": False},
]


class Maker(torch.nn.Module):
    """Its output goes through the other model, frozen or trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def freeze_in_turn(maker, judge, rank, steps):
    """The loop of pix2pix and its kind: the judge is frozen while the maker learns, then learns
    itself from two forwards at once."""
    optimizers = sgd(maker), sgd(judge)
    for step in range(steps):
        x, y = batch(rank, step)
        judge.requires_grad_(False)
        optimizers[0].zero_grad()
        with maker.no_sync():  # the parts add up
            made = maker(x)
            judge(made).float().square().mean().backward()
        (judge(maker(x)).float() - y).abs().mean().backward()
        optimizers[0].step()
        judge.requires_grad_(True)
        optimizers[1].zero_grad()
        with judge.no_sync():
            judge(x).float().mean().backward()
        (judge(x).float().square().mean() + judge(made.detach()).float().mean()).backward()
        optimizers[1].step()


def frozen_in_turn(rank, size):
    theirs = torch.nn.parallel.DistributedDataParallel
    reference = theirs(Maker()), theirs(Net(seed=rank))
    freeze_in_turn(*reference, rank, 4)
    for options in OPTIONS:
        pair = DistributedDataParallel(Maker()), DistributedDataParallel(Net(seed=rank), **options)
        freeze_in_turn(*pair, rank, 4)
        for mine, expected in zip(pair, reference):
            for a, b in zip(mine.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(a, b)
            everybody = [None] * size
            dist.all_gather_object(everybody, [each.tolist() for each in mine.parameters()])
            assert everybody[0] == everybody[1]
            if options.get("broadcast_buffers", True):
                for a, b in zip(mine.buffers(), expected.buffers(), strict=True):
                    torch.testing.assert_close(a, b)


# spec: K2 K4 in Python: passes in which all of a model is frozen train as torch's on Gloo do
def test_model_is_frozen_for_a_pass():
    on_ranks(2, frozen_in_turn, gloo=True)


def frozen_by_one_rank_alone(rank, size):
    """A pass that trains nothing makes no call where there are no buffers to send."""
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    for step in range(3):
        if step % size == rank:
            model.requires_grad_(False)
            x = torch.ones(1, 3, requires_grad=True)
            model(x).sum().backward()
            assert x.grad is not None and model.module.weight.grad is None
            model.requires_grad_(True)
        model.zero_grad()
        model(torch.ones(1, 3) * rank).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((2, 3), (size - 1) / 2))
        model.zero_grad()

    # A forward whose backward comes after the frozen pass still averages.
    later = model(torch.ones(1, 3) * rank).sum()
    model.requires_grad_(False)
    model(torch.ones(1, 3, requires_grad=True)).sum().backward()
    model.requires_grad_(True)
    later.backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 3), (size - 1) / 2))

    # Some frozen and some not is still a change of the module.
    model.module.bias.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match="'bias' was trained then, and is not now, while others are.*so does freezing all",
    ):
        model(torch.ones(1, 3))


def test_frozen_pass_makes_no_call():
    on_ranks(2, frozen_by_one_rank_alone)


def frozen_with_uneven_inputs(rank, size):
    def net():
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))

    def moved(judge, each, step):
        """A batch that has learned from the frozen judge."""
        x, y = batch(each, step)
        judge.requires_grad_(False)
        judge(x.requires_grad_(True)).square().sum().backward()
        judge.requires_grad_(True)
        return x.detach() - x.grad, y

    model, alone = DistributedDataParallel(net(), bucket_cap_mb=1e-4), net()
    optimizer, reference = sgd(model), sgd(alone)
    with model.join():
        for step in range(2 + 2 * rank):
            x, y = moved(model, rank, step)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    for step in range(2 * size):
        inputs = [moved(alone, each, step) for each in range(step // 2, size)]
        reference.zero_grad()
        for x, y in inputs:
            ((alone(x) - y).square().mean() / size).backward()
        reference.step()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


# spec: K7 in Python: frozen passes inside a Join
def test_frozen_passes_with_uneven_inputs():
    on_ranks(3, frozen_with_uneven_inputs)


def frozen_with_mixed_precision(rank, size):
    precise = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = DistributedDataParallel(torch.nn.Linear(3, 2), mixed_precision=precise)

    def is_full():
        return all(each.dtype == torch.float32 for each in model.parameters())

    x = torch.ones(1, 3, requires_grad=True)
    model.requires_grad_(False)
    assert model(torch.ones(1, 3)).dtype == torch.bfloat16 and is_full()  # no graph needs them
    out = model(x)
    assert out.dtype == torch.bfloat16 and not is_full()
    (out.float().sum() + model(x).float().sum()).backward()
    expected = 2 * model.module.weight.detach().sum(0, keepdim=True)
    assert is_full()
    torch.testing.assert_close(x.grad, expected, rtol=2e-2, atol=2e-2)
    model.requires_grad_(True)
    model(x).float().sum().backward()
    assert is_full() and model.module.weight.grad.dtype == torch.float32
    precise.buffer_dtype = torch.bfloat16
    judge = DistributedDataParallel(Net(), mixed_precision=precise)
    freeze_in_turn(DistributedDataParallel(Maker()), judge, rank, 2)
    assert all(each.dtype == torch.float32 for each in judge.parameters())


# spec: K1 in Python: mixed_precision and passes in which all is frozen
def test_frozen_pass_with_mixed_precision():
    on_ranks(2, frozen_with_mixed_precision)


def copied_by_one_rank(rank, size):
    """One rank's use of copies waits for no other; then all train as if nothing had been."""
    model = DistributedDataParallel(Net(seed=rank))
    optimizer = sgd(model)
    reference = copy.deepcopy(model.module)
    averages = copy.deepcopy(model.module)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if rank == 0:
            if step == 0:
                averaged = AveragedModel(model, avg_fn=lambda old, new, _: 0.5 * old + 0.5 * new)
            averaged.update_parameters(model)
            with torch.no_grad():
                for old, new in zip(averages.parameters(), model.parameters()):
                    old.copy_(new if step == 0 else 0.5 * old + 0.5 * new)
    if rank == 0:
        x, _ = batch(0, 9)
        for (name, mine), expected in zip(
            averaged.module.module.named_parameters(), averages.parameters()
        ):
            assert torch.equal(mine, expected), name
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        for each in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(written, weights_only=False),
            averaged.module,
        ):
            assert (
                list(each.state_dict()) == list(model.state_dict())
                and each.require_backward_grad_sync
            )
            assert (
                each.process_group == dist.group.WORLD
                and each.device == torch.device("cpu")
                and each.output_device is None
            )
            with torch.no_grad():
                assert torch.equal(each.eval()(x), each.module(x))
            each.requires_grad_(False)
            each(x)
        update_bn([x], averaged)
    dist.barrier()
    other = DistributedDataParallel(reference)
    train(other, sgd(other), rank, steps=3)
    assert_equal(model, other)


def mixed_copied_by_one_rank(rank, size):
    """In mixed precision, where a copy that trains nothing runs in full."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = DistributedDataParallel(torch.nn.Linear(3, 2), mixed_precision=precision)
    x = torch.full((4, 3), 0.3)
    for step in range(2):
        model(x).sum().backward()
        if step == 0 and rank == 0:
            for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                with torch.no_grad():
                    assert torch.equal(each(x), each.module(x))
                    assert each(x).dtype == torch.float32


# spec: K1 in Python: copies of one rank in mixed precision
def test_copies_in_mixed_precision_wait_for_nobody():
    on_ranks(2, mixed_copied_by_one_rank)


# spec: K1 in Python: copies of one rank (AveragedModel, deepcopy, pickle, torch.save)
def test_copies_wait_for_nobody():
    on_ranks(2, copied_by_one_rank)


def copied_by_all(rank, size):
    """Copies that all make train like the original, with its options."""
    for options in (*OPTIONS, {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)}):
        model = DistributedDataParallel(Net(seed=rank), **options)
        train(model, sgd(model), rank, steps=2)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        train(model, sgd(model), rank, steps=3)
        for each in copies:
            with torch.no_grad():
                each(batch(rank, 1)[0])
            with each.no_sync():
                assert not each.require_backward_grad_sync
            train(each, sgd(each), rank, steps=3)
            for mine, expected in zip(each.parameters(), model.parameters()):
                torch.testing.assert_close(mine, expected)
    net = Net()
    late = [(name, each) for name, each in net.named_parameters() if name.startswith("twice")]
    model = DistributedDataParallel(
        net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net.first.weight
    )
    again = copy.deepcopy(model)
    for each in (model, again):
        train(each, sgd(each), rank, steps=2)
    assert_equal(model, again)
    again = copy.deepcopy(again)
    with again.join():
        train(again, sgd(again), rank, steps=1 + rank)
    again = copy.deepcopy(again)
    again.register_comm_hook(None, allreduce_hook)
    train(again, sgd(again), rank, steps=1)
    with again.no_sync():
        alone = copy.deepcopy(again)
    assert not alone.require_backward_grad_sync


# spec: K2 in Python: a copy's first forward that trains is a construction
def test_copies_train():
    on_ranks(2, copied_by_all)

# SPDX-License-Identifier: BSD-3-Clause
"""`muster.optim.ZeroRedundancyOptimizer` and `muster.algorithms.Join`, beside torch's on Gloo."""

import copy

import pytest
import torch
from training import Net, assert_equal, lazy_hook, loss_of, on_ranks, sgd, train

import muster as dist
from muster.algorithms import Join, Joinable, JoinHook
from muster.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from muster.nn.parallel import DistributedDataParallel, MixedPrecision
from muster.optim import ZeroRedundancyOptimizer


def uneven(rank, size):
    for by_all in (True, False):
        mine = DistributedDataParallel(Net())
        other = torch.nn.parallel.DistributedDataParallel(Net())
        for model in (mine, other):
            optimizer = sgd(model)
            with model.join(divide_by_initial_world_size=by_all):
                train(model, optimizer, rank, steps=3 + 2 * rank)
        assert_equal(mine, other)
        # Sharded: all ranks step as often as the last.
        model, plain = DistributedDataParallel(Net()), DistributedDataParallel(Net())
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        whole = sgd(plain)
        with Join([model, sharded], divide_by_initial_world_size=by_all):
            train(model, sharded, rank, steps=3 + 2 * rank)
        with plain.join(divide_by_initial_world_size=by_all):
            train(plain, whole, rank, steps=3 + 2 * rank)
        assert_equal(model, plain)


# spec: K7 in Python: DDP and ZeroRedundancyOptimizer are joinable, both ways of dividing
def test_uneven_inputs():
    on_ranks(2, uneven, gloo=True)


class Counter(Joinable):
    """The documents' program."""

    def __init__(self):
        self.count = torch.zeros(1)

    def __call__(self):
        notice = Join.notify_join_context(self)
        t = torch.ones(1)
        dist.all_reduce(t)
        if notice:
            notice.wait()
        self.count += t

    def join_hook(self, **kwargs):
        counter, sync_max_count = self, kwargs.get("sync_max_count", False)

        class Hook(JoinHook):
            def main_hook(self):
                dist.all_reduce(torch.zeros(1))

            def post_hook(self, is_last_joiner):
                if sync_max_count:
                    common = torch.tensor([dist.get_rank() if is_last_joiner else -1])
                    dist.all_reduce(common, dist.ReduceOp.MAX)
                    dist.broadcast(counter.count, src=common.item())

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def counted(rank, size):
    counter = Counter()
    with Join([counter], sync_max_count=True):
        for _ in range(5 + rank):
            counter()
    assert counter.count.item() == 5 * size + 1
    ended = pytest.raises(dist.DistError, match="rank 0 has run out of inputs while 1 of 2")
    with ended as caught, Join([counter], throw_on_early_termination=True):
        for _ in range(2 + rank):
            counter()
    assert caught.value.ranks == [0]
    with Join([counter], enable=False):
        counter()
    with pytest.raises(ZeroDivisionError), Join([counter]):
        1 / 0
    with pytest.raises(ValueError, match="at least one"):
        Join([])
    with pytest.raises(ValueError, match="twice"):
        Join([counter, counter])
    with pytest.raises(TypeError, match="no Joinable"):
        Join([3])
    with Join([counter]), pytest.raises(ValueError, match="another Join"):
        Join([counter])
    with pytest.raises(ValueError, match="different ranks"):

        class Other(Counter):
            join_process_group = dist.new_group([rank], use_local_synchronization=True)

        Join([counter, Other()])


# spec: K7 K10 in Python: a Joinable of one's own, enable, throw_on_early_termination
def test_join():
    on_ranks(2, counted)


def groups_of(net):
    return [
        {"params": [net.first.weight, net.first.bias]},
        {"params": [*net.last.parameters(), *net.twice.parameters()], "lr": 0.01},
        {"params": [*net.norm.parameters(), *net.extra.parameters()]},
    ]


def sharded(rank, size):
    for kind, defaults, options in [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {}),
        (torch.optim.Adam, {"lr": 1e-2}, {}),
        (torch.optim.AdamW, {"lr": 1e-2}, {"parameters_as_bucket_view": True}),
    ]:
        plain, model = Net(), DistributedDataParallel(Net())
        whole = kind(groups_of(plain), **defaults)
        part = ZeroRedundancyOptimizer(groups_of(model.module), kind, **options, **defaults)
        schedule = [torch.optim.lr_scheduler.StepLR(each, step_size=2) for each in (whole, part)]
        reference = DistributedDataParallel(plain)
        for step in range(5):
            for each, optimizer in ((reference, whole), (model, part)):
                optimizer.zero_grad()
                assert optimizer.step(lambda: loss_of(each, rank, step).backward() or 1.5) == 1.5
            for each in schedule:
                each.step()
        assert_equal(model, reference)
        remembered = sum(
            each.numel()
            for entry in part.optim.state.values()
            for each in entry.values()
            if torch.is_tensor(each)
        )
        assert (
            0
            < remembered
            < sum(
                each.numel()
                for entry in whole.state.values()
                for each in entry.values()
                if torch.is_tensor(each)
            )
        )
        part.consolidate_state_dict(to=1)
        if rank == 0:
            with pytest.raises(dist.DistError, match="consolidate_state_dict"):
                part.state_dict()
        else:
            mine, others = part.state_dict(), whole.state_dict()
            assert mine["state"].keys() == others["state"].keys() and [
                len(g["params"]) for g in mine["param_groups"]
            ] == [2, 4, 4]
            for number, entry in others["state"].items():
                for name, value in entry.items():
                    assert torch.equal(
                        torch.as_tensor(mine["state"][number][name]), torch.as_tensor(value)
                    ), name
            kind(groups_of(Net()), **defaults).load_state_dict(copy.deepcopy(mine))
        # Either reads the other's; then they go on alike.
        again = Net()
        again.load_state_dict(plain.state_dict())
        loaded = ZeroRedundancyOptimizer(groups_of(again), kind, **options, **defaults)
        loaded.load_state_dict(copy.deepcopy(whole.state_dict()))
        for net, optimizer in ((plain, whole), (again, loaded)):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
            optimizer.step()
        assert_equal(again, plain)
    part.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(part.optim.param_groups) == 4 and part.rank_of(
        part.param_groups[3]["params"][0]
    ) in range(size)


# spec: K8 in Python: the same bits as the undivided optimizer, state dicts of either
def test_zero_redundancy_optimizer():
    on_ranks(2, sharded)


def stepped_by_a_wrapped_hook(rank, size):
    """The step is by the average, not by what this rank gave to it."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1
    )
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    model.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(wrapped, model, optimizer))
    model(torch.tensor([[2.0 + 8 * rank]])).sum().backward()
    assert net.weight.item() == -6


def overlapped(rank, size):
    plain = DistributedDataParallel(Net())
    train(plain, torch.optim.Adam(plain.parameters(), lr=1e-2), rank)
    for hook in (default_hooks.allreduce_hook, lazy_hook):
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-2
        )
        model.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(hook, model, optimizer))
        train(model, optimizer, rank)
        for mine, expected in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        ddp_zero_hook.hook_with_zero_step(
            lazy_hook, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1)
        )


def stepped_by_sparse_gradients(rank, size):
    """The hook's averages are other memory than the bucket."""
    words = torch.nn.Embedding(4, 1, sparse=True)
    torch.nn.init.zeros_(words.weight)
    model = DistributedDataParallel(words)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1
    )
    hook = ddp_zero_hook.hook_with_zero_step(lazy_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    model(torch.tensor([2 * rank])).sum().backward()
    assert words.weight.flatten().tolist() == [-0.5, 0, -0.5, 0]
    assert words.weight.grad.is_sparse


def in_low_precision(rank, size):
    """The parameters are not themselves within backward."""
    model = DistributedDataParallel(
        torch.nn.Linear(2, 1), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1
    )
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="leave overlap_with_ddp out"):
        model(torch.ones(1, 2)).sum().backward()


# spec: K8 in Python: backward takes the step
def test_step_within_backward():
    on_ranks(2, overlapped)
    on_ranks(2, stepped_by_a_wrapped_hook)
    on_ranks(2, stepped_by_sparse_gradients)
    on_ranks(1, in_low_precision)  # with several, each also learns of the others' failure


def failing_optimizers(rank, size):
    with pytest.raises(dist.DistError, match="the ranks' parameters differ"):
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(2 + rank))], torch.optim.SGD, lr=1)
    mine = [torch.nn.Parameter(torch.ones(2))] * (rank == 0)
    with pytest.raises(dist.DistError, match="on rank 0, 'nothing more' on rank 1"):
        ZeroRedundancyOptimizer([{"params": mine}], torch.optim.SGD, lr=1)
    with pytest.raises(ValueError, match="there are no parameters"):
        ZeroRedundancyOptimizer([{"params": []}], torch.optim.SGD, lr=1)
    with pytest.raises(ValueError, match="LBFGS"):
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.LBFGS)

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            if any(each.numel() == 5 for group in self.param_groups for each in group["params"]):
                raise KeyError("no such thing")
            return super().step(closure)

    parameters = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(4))]
    optimizer = ZeroRedundancyOptimizer(parameters, Failing, process_group=dist.new_group(), lr=1)
    owner = optimizer.rank_of(parameters[0])
    for each in parameters:
        each.grad = torch.ones_like(each)
    dist.barrier()
    with pytest.raises(KeyError if rank == owner else dist.DistBackendError, match="no such thing"):
        optimizer.step()
    with pytest.raises(ZeroDivisionError):
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=1).step(lambda: 1 / 0)
    dist.barrier()


# spec: K8 in Python: a step that raises on one rank raises on all
def test_failing_optimizers():
    on_ranks(2, failing_optimizers)

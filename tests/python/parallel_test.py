# SPDX-License-Identifier: BSD-3-Clause
"""`muster.nn.parallel`: training on several ranks, beside torch's own on Gloo. Join and ZeRO:
parallel_sharded_test.py.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import threading

import pytest
import torch
from ranks import LIMIT_S, fork, meeting_file, run_ranks
from training import Net, assert_equal, batch, lazy_hook, loss_of, on_ranks, sgd, train

import muster as dist
from muster.algorithms import Join
from muster.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from muster.nn.parallel import DataParallel, DistributedDataParallel, MixedPrecision
from muster.optim import ZeroRedundancyOptimizer
from muster.utils.data import DistributedSampler

OPTIONS = [
    {},
    {"bucket_cap_mb": 0.0005},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
    {"static_graph": True},
    {"find_unused_parameters": True, "narrow": True},
    {"broadcast_buffers": False},
    {"broadcast_buffers": None},
]


def trained_beside_torch(rank, size):
    for options in OPTIONS:
        options = dict(options)
        narrow = options.pop("narrow", False)
        mine = DistributedDataParallel(Net(seed=rank), **options)
        other = torch.nn.parallel.DistributedDataParallel(Net(seed=rank), **options)
        assert_equal(mine, other)  # rank 0's
        for model in (mine, other):
            optimizer = sgd(model)
            train(model, optimizer, rank, narrow=narrow)
            with model.no_sync():
                loss_of(model, rank, 10, narrow=narrow).backward()
            loss_of(model, rank, 11, narrow=narrow).backward()
            optimizer.step()
        assert_equal(mine, other)


# spec: K1 in Python: device_ids None, broadcast_buffers, bucket_cap_mb, find_unused_parameters,
# gradient_as_bucket_view, static_graph; K2 K3 in Python: the same bits as torch's on Gloo, K4
# no_sync in Python
def test_trains_as_torchs_own_on_gloo():
    on_ranks(2, trained_beside_torch, gloo=True)


def test_signatures():
    import inspect

    def arguments(function):
        return [
            (name, each.default) for name, each in inspect.signature(function).parameters.items()
        ]

    for mine, other in [
        (DistributedDataParallel.__init__, torch.nn.parallel.DistributedDataParallel.__init__),
        (DistributedDataParallel.join, torch.nn.parallel.DistributedDataParallel.join),
        (
            DistributedDataParallel.register_comm_hook,
            torch.nn.parallel.DistributedDataParallel.register_comm_hook,
        ),
    ]:
        names = inspect.signature(other).parameters
        assert [each for each in arguments(mine) if each[0] in names] == arguments(other)
    assert [name for name, _ in arguments(ZeroRedundancyOptimizer.__init__)] == [
        "self",
        "params",
        "optimizer_class",
        "process_group",
        "parameters_as_bucket_view",
        "overlap_with_ddp",
        "defaults",
    ]
    assert arguments(Join.__init__)[1:] == [
        ("joinables", inspect.Parameter.empty),
        ("enable", True),
        ("throw_on_early_termination", False),
        ("kwargs", inspect.Parameter.empty),
    ]


def python_hook(state, bucket):
    state.append(
        (
            bucket.index(),
            bucket.is_last(),
            [each.shape for each in bucket.gradients()],
            len(bucket.parameters()),
        )
    )
    work = dist.all_reduce(
        bucket.buffer().div_(dist.get_world_size()), group=bucket.group, async_op=True
    )
    return work.get_future().then(lambda future: future.value()[0])


def trained_with_hooks(rank, size):
    plain = DistributedDataParallel(Net())
    train(plain, sgd(plain), rank)
    weights = [each.clone() for each in plain.parameters()]
    seen = []
    for hook, state, near in [
        (default_hooks.allreduce_hook, None, 0),
        (python_hook, seen, 0),
        (lazy_hook, None, 1e-6),
        (default_hooks.fp16_compress_hook, None, 1e-2),
        (default_hooks.bf16_compress_hook, None, 5e-2),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None, 1e-2),
        (default_hooks.bf16_compress_wrapper(lazy_hook), None, 5e-2),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(start_powerSGD_iter=2), None),
        (
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
            powerSGD_hook.PowerSGDState(start_powerSGD_iter=2),
            None,
        ),
        (powerSGD_hook.batched_powerSGD_hook, powerSGD_hook.PowerSGDState(None, 2, 2), None),
    ]:
        model = DistributedDataParallel(Net())
        model.register_comm_hook(state, hook)
        train(model, sgd(model), rank)
        for weight, expected in zip(model.parameters(), weights):
            if near is None:
                everybody = [torch.empty_like(weight) for _ in range(size)]
                dist.all_gather(everybody, weight.detach())
                assert torch.equal(everybody[0], everybody[1])
            else:
                assert (weight - expected).abs().max() <= near, (
                    hook,
                    (weight - expected).abs().max(),
                )
    assert len(seen) == 5 and seen[0][:2] == (0, True) and seen[0][3] == len(weights)
    assert state.iter == 5 and state.compression_stats()[1] > 0
    again = pickle.loads(pickle.dumps(state))
    assert again.iter == 5 and again.matrix_approximation_rank == 2
    with pytest.raises(ValueError, match="one"):
        model.register_comm_hook(None, lazy_hook)
    with pytest.raises(TypeError, match="callable"):
        DistributedDataParallel(Net()).register_comm_hook(None, 3)


# spec: K4 in Python: hooks all-reduce, fp16, bf16, PowerSGD, and those written in Python
def test_communication_hooks():
    on_ranks(2, trained_with_hooks)


def precise_and_delayed(rank, size):
    plain = DistributedDataParallel(Net().double())
    x, _ = batch(rank, 0)
    plain(x.double()).square().sum().backward()
    net = Net().double()
    late = [(name, each) for name, each in net.named_parameters() if name.startswith("twice")]
    model = DistributedDataParallel(
        net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net.first.weight
    )
    assert len(model.bucket_bytes()) == 1
    model(x.double()).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)

    net = torch.nn.Linear(8, 4)
    model = DistributedDataParallel(
        net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    assert model(x).dtype == torch.bfloat16
    model(x).float().square().sum().backward()
    assert net.weight.dtype == torch.float32 == net.weight.grad.dtype
    grads = [torch.empty_like(net.weight) for _ in range(size)]
    dist.all_gather(grads, net.weight.grad)
    assert torch.equal(grads[0], grads[1])

    mesh = dist.init_device_mesh("cpu", (size,))
    different = DistributedDataParallel(Net(seed=rank), init_sync=False, device_mesh=mesh)
    firsts = [None] * size
    dist.all_gather_object(firsts, different.module.first.weight[0, 0].item())
    assert firsts[0] != firsts[1]


# spec: K1 in Python: delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision,
# process_group
def test_delayed_parameters_and_mixed_precision():
    on_ranks(2, precise_and_delayed)


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    rest: dict


def other_shapes_of_modules(rank, size):
    class Structured(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(5, 3, sparse=True)
            self.out = torch.nn.Linear(3, 2)
            self.left_alone = torch.nn.Parameter(torch.full((1,), float(rank)))

        def forward(self, numbers):
            words = self.words(numbers)
            return Result(self.out(words), {"words": [words]})

    net = Structured()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["left_alone"])
    model = DistributedDataParallel(net)
    result = model(torch.tensor([rank, 4]))
    (result.first.sum() + result.rest["words"][0].sum()).backward()
    assert net.words.weight.grad.is_sparse and net.left_alone.item() == rank
    dense = net.words.weight.grad.to_dense()
    assert (dense[4] != 0).all() and (dense[0] != 0).all() and (dense[2] == 0).all()

    assert list(model.state_dict()) == ["module." + name for name in net.state_dict()]
    copied = pickle.loads(pickle.dumps(DistributedDataParallel(torch.nn.Linear(2, 2))))
    copied(torch.ones(1, 2)).sum().backward()
    assert copied.module.weight.grad is not None
    model.eval()
    with torch.no_grad():
        model(torch.tensor([0, 1]))
    assert (
        model.require_backward_grad_sync
        and model.process_group == dist.group.WORLD
        and model.device_ids is None
    )


# spec: K9 in Python: device_ids None, output_device None
def test_modules_of_other_shapes():
    on_ranks(2, other_shapes_of_modules)


def errors_of_ranks(rank, size):
    with pytest.raises(dist.DistError, match="the first difference is 'weight"):
        DistributedDataParallel(torch.nn.Linear(2 + rank, 2))
    with pytest.raises(ValueError, match="2 entries"):
        DistributedDataParallel(Net(), device_ids=[0, 1])
    with pytest.raises(ValueError, match="at the same time"):
        DistributedDataParallel(Net(), param_to_hook_all_reduce=torch.ones(1))
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        DistributedDataParallel(torch.nn.ReLU())
    with pytest.raises(ValueError, match="lazy"):
        DistributedDataParallel(torch.nn.LazyLinear(2))

    def model_of_all():
        model = DistributedDataParallel(Net())
        dist.barrier()  # what ends a model's calls may end those of its making on another rank
        return model

    model = model_of_all()
    loss_of(model, rank, 0, narrow=True).backward()
    with pytest.raises(
        ValueError, match="did not receive grad for rank . *: extra.weight, extra.bias"
    ):
        loss_of(model, rank, 1)
    model = model_of_all()
    model.module.added = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="'added' is new"):
        loss_of(model, rank, 0)

    def failing(state, bucket):
        raise KeyError("what the hook said")

    model = model_of_all()
    model.register_comm_hook(None, failing)
    loss = loss_of(model, rank, 0)
    dist.barrier()
    with pytest.raises(KeyError, match="what the hook said"):
        loss.backward()
    model = model_of_all()
    if rank == 0:
        model.module.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError if rank == 0 else dist.DistBackendError):
        loss_of(model, rank, 0).backward()


# spec: H5 H11 in Python: unused parameters are named
def test_errors():
    on_ranks(2, errors_of_ranks)


def killed_in_backward(rank, size):
    model = DistributedDataParallel(Net())
    loss_of(model, rank, 0).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1") as caught:
        for step in range(1, 5):
            loss_of(model, rank, step).backward()
    assert caught.value.ranks == [1]
    with contextlib.suppress(dist.DistError):
        dist.destroy_process_group()


def samples(rank, size):
    data = list(range(11))
    sampler = DistributedSampler(data, seed=3)
    sampler.set_epoch(2)
    stock = torch.utils.data.DistributedSampler(data, size, rank, seed=3)
    stock.set_epoch(2)
    assert list(sampler) == list(stock)
    return list(DistributedSampler(data, shuffle=False, drop_last=True))


# every rank sees its own part of the data, and knows which without torch.distributed
def test_distributed_sampler():
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedSampler(list(range(11)))
    assert on_ranks(3, samples) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_killed_rank_ends_backward_of_the_others():
    name = meeting_file()

    def body(rank):
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        killed_in_backward(rank, 2)

    run_ranks(2, body, killed=(1,))


def test_interrupt_ends_backward():
    """Ctrl-C on rank 0, whose backward waits for rank 1."""
    name = meeting_file()
    after = fork.Event()

    def body(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
        model = DistributedDataParallel(Net())
        loss_of(model, rank, 0).backward()
        loss = loss_of(model, rank, 1)
        if rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            after.set()
        else:
            assert after.wait(LIMIT_S)
            with pytest.raises(dist.DistBackendError, match="rank 0"):
                loss.backward()  # has rank 0's part already, and may do
                loss_of(model, rank, 2).backward()

    run_ranks(2, body)


def buffers_put_in_place(rank, size):
    class Counting(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = self.seen + 1 + rank  # another tensor
            return super().forward(x)

    for kind in (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel):
        model = kind(Counting())
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        assert model.module.seen.item() == (3 if rank == 0 else 4), kind


# spec: K1 in Python: broadcast_buffers, of what stands in a buffer's place
def test_buffers_that_are_replaced():
    on_ranks(2, buffers_put_in_place, gloo=True)


# spec: K6 in Python: torch's own, which needs no group
def test_data_parallel_is_torchs():
    model = DataParallel(Net())
    loss_of(model, 0, 0).backward()
    assert model.module.first.weight.grad is not None

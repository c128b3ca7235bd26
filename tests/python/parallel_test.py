"""`muster.nn`, `muster.optim` and `muster.algorithms`: training on several ranks, beside torch's own on Gloo."""

import contextlib
import copy
import dataclasses
import os
import pickle
import signal
import threading

import pytest
import torch
import torch.distributed as theirs

import muster as dist
from muster.algorithms import Join, Joinable, JoinHook
from muster.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, lazily, powerSGD_hook
from muster.nn.parallel import DataParallel, DistributedDataParallel, MixedPrecision
from muster.optim import ZeroRedundancyOptimizer
from muster.utils.data import DistributedSampler
from ranks import fork, meeting_file, run_ranks


def on_ranks(size, body, *arguments, gloo=False):
    """body(rank, size, ...) in processes, between init and destroy of muster and, with `gloo`, of torch.distributed."""
    mine, name_of_theirs = meeting_file(), meeting_file()

    def rank_body(rank):
        dist.init_process_group(init_method="file://" + mine, rank=rank, world_size=size)
        if gloo:
            theirs.init_process_group("gloo", store=theirs.FileStore(name_of_theirs, size), rank=rank, world_size=size)
        value = body(rank, size, *arguments)
        if gloo:
            theirs.destroy_process_group()
        dist.destroy_process_group()
        return value

    return run_ranks(size, rank_body)


class Net(torch.nn.Module):
    """Batch norm for buffers, a parameter used twice, and one that `narrow` leaves out."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.twice = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 4)
        self.extra = torch.nn.Linear(16, 4)

    def forward(self, x, narrow=False):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        return self.last(x) if narrow else self.last(x) + self.extra(x)


def batch(rank, step, rows=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def loss_of(model, rank, step, **options):
    x, y = batch(rank, step)
    return torch.nn.functional.mse_loss(model(x, **options), y)


def train(model, optimizer, rank, steps=5, **options):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step, **options).backward()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_equal(mine, others):
    for (name, a), b in zip(mine.state_dict().items(), others.state_dict().values(), strict=True):
        assert torch.equal(a, b), f"{name}: {a} is not {b}"


OPTIONS = [{}, {"bucket_cap_mb": 0.0005}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}, {"static_graph": True},
           {"find_unused_parameters": True, "narrow": True}, {"broadcast_buffers": False}, {"broadcast_buffers": None}]


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


# spec: K1 in Python: device_ids None, broadcast_buffers, bucket_cap_mb, find_unused_parameters, gradient_as_bucket_view, static_graph
# spec: K2 K3 in Python: the same bits as torch's on Gloo, K4 no_sync in Python
def test_trains_as_torchs_own_on_gloo():
    on_ranks(2, trained_beside_torch, gloo=True)


def test_signatures():
    import inspect

    def arguments(function):
        return [(name, each.default) for name, each in inspect.signature(function).parameters.items()]

    for mine, other in [(DistributedDataParallel.__init__, torch.nn.parallel.DistributedDataParallel.__init__),
                        (DistributedDataParallel.join, torch.nn.parallel.DistributedDataParallel.join),
                        (DistributedDataParallel.register_comm_hook, torch.nn.parallel.DistributedDataParallel.register_comm_hook)]:
        names = inspect.signature(other).parameters
        assert [each for each in arguments(mine) if each[0] in names] == arguments(other)
    assert [name for name, _ in arguments(ZeroRedundancyOptimizer.__init__)] == [
        "self", "params", "optimizer_class", "process_group", "parameters_as_bucket_view", "overlap_with_ddp", "defaults"]
    assert arguments(Join.__init__)[1:] == [("joinables", inspect.Parameter.empty), ("enable", True), ("throw_on_early_termination", False),
                                            ("kwargs", inspect.Parameter.empty)]


def python_hook(state, bucket):
    state.append((bucket.index(), bucket.is_last(), [each.shape for each in bucket.gradients()], len(bucket.parameters())))
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), group=bucket.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def lazy_hook(state, bucket):
    def averaged():
        dist.all_reduce(bucket.buffer(), group=bucket.group)
        return bucket.buffer() / dist.get_world_size()

    return lazily(averaged)


def trained_with_hooks(rank, size):
    plain = DistributedDataParallel(Net())
    train(plain, sgd(plain), rank)
    weights = [each.clone() for each in plain.parameters()]
    seen = []
    for hook, state, near in [(default_hooks.allreduce_hook, None, 0), (python_hook, seen, 0), (lazy_hook, None, 1e-6),
                              (default_hooks.fp16_compress_hook, None, 1e-2), (default_hooks.bf16_compress_hook, None, 5e-2),
                              (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None, 1e-2),
                              (default_hooks.bf16_compress_wrapper(lazy_hook), None, 5e-2),
                              (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(start_powerSGD_iter=2), None),
                              (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
                               powerSGD_hook.PowerSGDState(start_powerSGD_iter=2), None),
                              (powerSGD_hook.batched_powerSGD_hook, powerSGD_hook.PowerSGDState(None, 2, 2), None)]:
        model = DistributedDataParallel(Net())
        model.register_comm_hook(state, hook)
        train(model, sgd(model), rank)
        for weight, expected in zip(model.parameters(), weights):
            if near is None:
                everybody = [torch.empty_like(weight) for _ in range(size)]
                dist.all_gather(everybody, weight.detach())
                assert torch.equal(everybody[0], everybody[1])
            else:
                assert (weight - expected).abs().max() <= near, (hook, (weight - expected).abs().max())
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
    model = DistributedDataParallel(net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net.first.weight)
    assert len(model.bucket_bytes()) == 1
    model(x.double()).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)

    net = torch.nn.Linear(8, 4)
    model = DistributedDataParallel(net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
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


# spec: K1 in Python: delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, process_group
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
    assert model.require_backward_grad_sync and model.process_group == dist.group.WORLD and model.device_ids is None


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
    with pytest.raises(ValueError, match="did not receive grad for rank . *: extra.weight, extra.bias"):
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


def sync_batch_norm_is_refused(rank, size):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SyncBatchNorm(4))
    with pytest.raises(dist.DistArgumentError, match="1: SyncBatchNorm sums up over a group of torch.distributed's"):
        DistributedDataParallel(model)


def test_sync_batch_norm_is_refused_where_it_would_not_sync():
    on_ranks(2, sync_batch_norm_is_refused)


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
            assert after.wait(60)
            with pytest.raises(dist.DistBackendError, match="rank 0"):
                loss.backward()  # has rank 0's part already, and may do
                loss_of(model, rank, 2).backward()

    run_ranks(2, body)


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
    with pytest.raises(dist.DistError, match="rank 0 has run out of inputs while 1 of 2") as caught, Join([counter], throw_on_early_termination=True):
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
    return [{"params": [net.first.weight, net.first.bias]}, {"params": list(net.last.parameters()) + list(net.twice.parameters()), "lr": 0.01},
            {"params": [*net.norm.parameters(), *net.extra.parameters()]}]


def sharded(rank, size):
    for kind, defaults, options in [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {}), (torch.optim.Adam, {"lr": 1e-2}, {}),
                                    (torch.optim.AdamW, {"lr": 1e-2}, {"parameters_as_bucket_view": True})]:
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
        remembered = sum(each.numel() for entry in part.optim.state.values() for each in entry.values() if torch.is_tensor(each))
        assert 0 < remembered < sum(each.numel() for entry in whole.state.values() for each in entry.values() if torch.is_tensor(each))
        part.consolidate_state_dict(to=1)
        if rank == 0:
            with pytest.raises(dist.DistError, match="consolidate_state_dict"):
                part.state_dict()
        else:
            mine, others = part.state_dict(), whole.state_dict()
            assert mine["state"].keys() == others["state"].keys() and [len(g["params"]) for g in mine["param_groups"]] == [2, 4, 4]
            for number, entry in others["state"].items():
                for name, value in entry.items():
                    assert torch.equal(torch.as_tensor(mine["state"][number][name]), torch.as_tensor(value)), name
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
    assert len(part.optim.param_groups) == 4 and part.rank_of(part.param_groups[3]["params"][0]) in range(size)


# spec: K8 in Python: the same bits as the undivided optimizer, state dicts of either
def test_zero_redundancy_optimizer():
    on_ranks(2, sharded)


def stepped_by_a_wrapped_hook(rank, size):
    """The step is by the average, not by what this rank gave to it."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1)
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    model.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(wrapped, model, optimizer))
    model(torch.tensor([[2.0 + 8 * rank]])).sum().backward()
    assert net.weight.item() == -6


def overlapped(rank, size):
    plain = DistributedDataParallel(Net())
    train(plain, torch.optim.Adam(plain.parameters(), lr=1e-2), rank)
    for hook in (default_hooks.allreduce_hook, lazy_hook):
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-2)
        model.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(hook, model, optimizer))
        train(model, optimizer, rank)
        for mine, expected in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        ddp_zero_hook.hook_with_zero_step(lazy_hook, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1))


# spec: K8 in Python: backward takes the step
def test_step_within_backward():
    on_ranks(2, overlapped)
    on_ranks(2, stepped_by_a_wrapped_hook)


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


def failing_optimizers(rank, size):
    with pytest.raises(dist.DistError, match="the ranks' parameters differ"):
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(2 + rank))], torch.optim.SGD, lr=1)
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


# spec: K6 in Python: torch's own, which needs no group
def test_data_parallel_is_torchs():
    model = DataParallel(Net())
    loss_of(model, 0, 0).backward()
    assert model.module.first.weight.grad is not None

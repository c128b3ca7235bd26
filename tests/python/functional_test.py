# SPDX-License-Identifier: BSD-3-Clause
"""muster.nn.functional beside torch.distributed.nn.functional over Gloo: outputs and gradients, of
first and second order.
"""

import importlib
import inspect
import os
import signal
import threading

import pytest
import torch
from ranks import meeting_file, run_ranks
from thread_ranks import on_threads


def numbers(seed, *shape, dtype=torch.float64):
    """Small whole numbers, whose sums are exact in any order; others on every rank."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=made).to(dtype).requires_grad_()


def all_reduced(F, dist, rank, size, op):
    x = numbers(rank, 3, 2)
    return F.all_reduce(x, op), [x], True


def all_reduced_strided(F, dist, rank, size):
    x = numbers(rank, 4, 3)
    return F.all_reduce(x.t()), [x], True


def broadcasted(F, dist, rank, size, src):
    x = numbers(rank, 5)
    return F.broadcast(x, src), [x], True


def reduced(F, dist, rank, size, dst):
    x = numbers(rank, 2, 2)
    return F.reduce(x, dst), [x], rank == dst


def gathered(F, dist, rank, size, dst):
    x = numbers(rank, 3)
    return F.gather(x, dst), [x], True


def scattered(F, dist, rank, size, src):
    xs = [numbers(10 * rank + i, 2, 3) for i in range(size)]
    return F.scatter(xs, src), xs, True


def all_gathered(F, dist, rank, size):
    x = numbers(rank, 2, 2)
    return F.all_gather(x), [x], True


def all_gathered_strided(F, dist, rank, size):
    x = numbers(rank, 3, 2)
    return F.all_gather(x.t()), [x], True


def reduce_scattered(F, dist, rank, size, op):
    xs = [numbers(10 * rank + i, 4) for i in range(size)]
    return F.reduce_scatter(torch.empty(4, dtype=torch.float64), xs, op), xs, True


def exchanged(F, dist, rank, size):
    xs = [numbers(10 * rank + i, 2, 2) for i in range(size)]
    return F.all_to_all([torch.empty(2, 2, dtype=torch.float64) for _ in xs], xs), xs, True


def exchanged_in_one(F, dist, rank, size):
    x = numbers(rank, 2 * size, 3)
    return F.all_to_all_single(torch.empty(2 * size, 3, dtype=torch.float64), x), [x], True


def exchanged_unevenly(F, dist, rank, size):
    """Member r sends (r + to) % 3 rows, which is none at times."""
    sent = [(rank + to) % 3 for to in range(size)]
    x = numbers(rank, sum(sent), 2)
    return (
        F.all_to_all_single(torch.empty(sum(sent), 2, dtype=torch.float64), x, sent, sent),
        [x],
        True,
    )


def in_single_precision(F, dist, rank, size):
    x = numbers(rank, 7, dtype=torch.float32)
    return F.all_reduce(x * 0.5), [x], True


def of_complex_numbers(F, dist, rank, size):
    x = torch.complex(numbers(rank, 3).detach(), numbers(rank + 50, 3).detach()).requires_grad_()
    return F.all_gather(x), [x], True


def cases(dist, size):
    ops = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
    roots = range(size)
    yield from [(all_reduced, op) for op in ops] + [(reduce_scattered, op) for op in ops[:1]]
    yield from [
        (body, root) for body in (broadcasted, reduced, gathered, scattered) for root in roots
    ]
    yield from [
        (body,)
        for body in (
            all_reduced_strided,
            all_gathered,
            all_gathered_strided,
            exchanged,
            exchanged_in_one,
            exchanged_unevenly,
            in_single_precision,
            of_complex_numbers,
        )
    ]


def differentiated(F, dist, rank, size, body, *arguments):
    """Outputs (where they are defined), gradients, and gradients of the gradients."""
    results, inputs, defined = body(F, dist, rank, size, *arguments)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    weights = [
        numbers(1000 + 10 * rank + i, *each.shape).detach().to(each.dtype)
        for i, each in enumerate(results)
    ]
    if any(each.is_complex() for each in results):
        loss = sum((weight * each.abs() ** 2).real.sum() for weight, each in zip(weights, results))
    else:
        loss = sum((weight * each**2).sum() for weight, each in zip(weights, results))
    if (
        not defined
    ):  # what torch leaves in the tensor is none of anybody's business, and its gradient is zero
        loss = sum((0 * each**2).sum() for each in results)
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = []
    if (
        body is not broadcasted and not first[0].is_complex()
    ):  # torch cuts the graph of a broadcast's gradient off src
        second = torch.autograd.grad(sum((each**2).sum() for each in first), inputs)
    return (
        [each.detach() for each in results] if defined else [],
        [each.detach() for each in first],
        list(second),
    )


def beside_torch(rank, size, file):
    import torch.distributed as theirs

    import muster as ours

    heard = {}
    for name, dist, path in (
        ("torch", theirs, "torch.distributed.nn.functional"),
        ("muster", ours, "muster.nn.functional"),
    ):
        dist.init_process_group(
            "gloo", init_method=f"file://{file}-{name}", rank=rank, world_size=size
        )
        F = importlib.import_module(path)
        heard[name] = [
            (body.__name__, str(rest), differentiated(F, dist, rank, size, body, *rest))
            for body, *rest in cases(dist, size)
        ]
        dist.destroy_process_group()
    assert len(heard["torch"]) == len(heard["muster"])
    for (case, how, wanted), (_, _, given) in zip(heard["torch"], heard["muster"]):
        for what, theirs_all, ours_all in zip(
            ("outputs", "gradients", "second gradients"), wanted, given
        ):
            assert len(theirs_all) == len(ours_all), (case, how, what)
            for a, b in zip(theirs_all, ours_all):
                assert a.dtype == b.dtype and torch.equal(a, b), (
                    f"{case}{how}, {what}: {b} is not torch's {a}"
                )


# spec: T4 muster.nn.functional: all_reduce, broadcast, reduce, gather, scatter, all_gather,
# reduce_scatter, all_to_all, all_to_all_single (even and uneven) have torch's outputs, gradients
# and second gradients
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 4])
def test_functional_beside_torch(size):
    run_ranks(size, beside_torch, size, meeting_file())


def what_torch_lacks(rank, size, file):
    import muster as dist
    from muster.nn import functional as F

    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=size)
    # all_gather into one tensor: every member's gradient of this one's part, summed up.
    x = numbers(rank, 2, 3)
    for shape in ((2 * size, 3), (size, 2, 3)):
        whole = F._all_gather_base(torch.empty(shape, dtype=torch.float64), x)
        assert torch.equal(whole.view(size, 2, 3)[rank], x) and whole.requires_grad
        weights = torch.stack([numbers(100 + r, 2, 3).detach() for r in range(size)])
        (got,) = torch.autograd.grad(
            (whole.view(size, 2, 3) * weights * (rank + 1)).sum(), x, create_graph=True
        )
        assert torch.equal(got, weights[rank] * sum(range(1, size + 1)))
    # Lists of several sizes: entry r of a reduce_scatter has r + 1 elements.
    xs = [numbers(10 * rank + r, r + 1) for r in range(size)]
    out = F.reduce_scatter(torch.empty(rank + 1, dtype=torch.float64), xs)
    assert torch.equal(out, sum(numbers(10 * r + rank, rank + 1) for r in range(size)))
    got = torch.autograd.grad(((rank + 1) * out).sum(), xs)
    assert all(torch.equal(each, torch.full_like(each, r + 1)) for r, each in enumerate(got))
    # ... and of an all_to_all; the results are the tensors that were given.
    xs = [numbers(10 * rank + r, r + 1) for r in range(size)]
    outs = [torch.empty(rank + 1, dtype=torch.float64) for _ in range(size)]
    results = F.all_to_all(outs, xs)
    assert [
        torch.equal(each, numbers(10 * r + rank, rank + 1)) for r, each in enumerate(results)
    ] == [True] * size
    assert results[0].data_ptr() == outs[0].data_ptr()
    got = torch.autograd.grad(sum((rank + 1) * each.sum() for each in results), xs)
    assert all(torch.equal(each, torch.full_like(each, r + 1)) for r, each in enumerate(got))
    # An average, and another group than the default one, whose ranks are those of the default
    # group.
    pair = (
        dist.new_group([2 * (rank // 2), 2 * (rank // 2) + 1])
        if size == 2
        else [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    )
    first = 2 * (rank // 2)
    x = numbers(rank, 4)
    mean = F.all_reduce(F.broadcast(x, first, pair), dist.ReduceOp.AVG, pair)
    assert torch.equal(mean, numbers(first, 4))
    (got,) = torch.autograd.grad(mean.sum(), x)
    assert torch.equal(got, torch.full((4,), 2.0 if rank == first else 0.0, dtype=torch.float64))
    # The second gradients of a broadcast, which torch does not have: first = 2 x sum(r + 1) on src,
    # zeros elsewhere.
    x = numbers(rank, 3)
    (slope,) = torch.autograd.grad(
        ((rank + 1) * F.broadcast(x, 1) ** 2).sum(), x, create_graph=True
    )
    (curve,) = torch.autograd.grad((slope**2).sum(), x)
    weight = size * (size + 1) * (rank == 1)
    assert torch.equal(slope, weight * x) and torch.equal(curve, 2 * weight**2 * x)
    # Memory that was given may be given again: it stays out of the graph.
    memory = torch.empty(4, dtype=torch.float64)
    total = sum(
        F.all_to_all_single(memory, numbers(rank + i, 4).requires_grad_()).sum() for i in range(3)
    )
    total.backward()
    assert not memory.requires_grad
    # Without gradients they are plain calls.
    with torch.no_grad():
        assert (
            not F.all_reduce(x).requires_grad
            and F.all_reduce(torch.ones(2, dtype=torch.int64)).tolist() == [size] * 2
        )
    for wrong, message in (
        (lambda: F.scatter([x]), "1 tensors for the"),
        (lambda: F.reduce_scatter(x, []), "input_list is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    dist.destroy_process_group()


def of_two_types(rank, size):
    import muster as dist
    from muster import _functional_collectives as funcol

    x = torch.full((2,), rank + 1.0, requires_grad=True)
    others = [x.double() * 2, torch.tensor([rank])]
    sums = funcol.all_reduce_coalesced([x, *others], "sum", dist.group.WORLD)
    total = sum(range(1, size + 1))
    assert [each.dtype for each in sums] == [torch.float32, torch.float64, torch.int64]
    assert [each[0].item() for each in sums] == [total, 2 * total, total - size]
    (sums[0].sum() + sums[1].sum()).backward()
    assert x.grad.tolist() == [3 * size] * 2


# spec: T4 all_reduce_coalesced of several dtypes, with gradients
def test_all_reduce_of_several_types():
    on_threads(2, of_two_types)


# spec: T4 _all_gather_base with gradients; uneven reduce_scatter and all_to_all, AVG, groups, given
# memory
@pytest.mark.parametrize("size", [2, 4])
def test_functional_beyond_torch(size):
    run_ranks(size, what_torch_lacks, size, meeting_file())


def contrastive(rank, size, file):
    """CLIP's loss over the batch of all ranks: gradients are those of one process with the whole
    batch.
    """
    import muster as dist
    from muster.distributed.nn import functional as F

    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=size)
    torch.manual_seed(0)
    images, texts = torch.nn.Linear(6, 4).double(), torch.nn.Linear(5, 4).double()
    pictures, words = torch.randn(2 * size, 6).double(), torch.randn(2 * size, 5).double()

    def loss_of(a, b):
        logits = torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(b).t() / 0.1
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))

    loss_of(images(pictures), texts(words)).backward()
    wanted = [each.grad.clone() for each in (*images.parameters(), *texts.parameters())]
    for each in (*images.parameters(), *texts.parameters()):
        each.grad = None
    mine = slice(2 * rank, 2 * rank + 2)
    loss_of(
        torch.cat(F.all_gather(images(pictures[mine]))), torch.cat(F.all_gather(texts(words[mine])))
    ).backward()
    for each, whole in zip((*images.parameters(), *texts.parameters()), wanted):
        dist.all_reduce(each.grad)
        torch.testing.assert_close(each.grad / size, whole)
    dist.destroy_process_group()


# spec: T4 a loss over the batch of all ranks trains as on one process
def test_contrastive_loss():
    run_ranks(2, contrastive, 2, meeting_file())


def interrupted(rank, file):
    import muster as dist
    from muster.nn import functional as F

    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=2)
    y = F.all_reduce(numbers(rank, 2))
    if rank == 0:  # does not come to backward
        with pytest.raises(dist.DistBackendError, match="interrupted"):
            dist.recv(torch.empty(1), 1)
        return
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()


def dying(rank, file):
    import muster as dist
    from muster.nn import functional as F

    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=2)
    y = F.all_gather(numbers(rank, 2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        sum(each.sum() for each in y).backward()
    assert caught.value.ranks == [1]


# spec: T4 what fails in backward is raised as muster's error, with the rank at fault
def test_backward_names_the_rank_at_fault():
    run_ranks(2, dying, meeting_file(), killed=[1])


# spec: T4 Ctrl-C ends a backward pass that waits for another rank
def test_interrupted_backward():
    run_ranks(2, interrupted, meeting_file())


# spec: T4 torch.distributed.nn's names, under both paths
def test_names():
    import torch.distributed.nn.functional as theirs

    import muster
    import muster.distributed.nn
    import muster.distributed.nn.functional
    import muster.nn.functional as ours

    names = {
        name
        for name in vars(theirs)
        if callable(getattr(theirs, name)) and getattr(theirs, name).__module__ == theirs.__name__
    }
    names = {
        name
        for name in names
        if name == name.lower() and name not in ("_not_supported_under_compile", "_deprecated")
    }
    assert names >= {"all_gather", "_all_gather_base", "all_to_all_single"}
    for name in names:
        for place in (ours, muster.distributed.nn.functional):
            here = inspect.signature(getattr(place, name)).parameters.values()
            there = inspect.signature(getattr(theirs, name)).parameters.values()
            assert [each.name for each in here] == [each.name for each in there]
            assert [each.default is each.empty for each in here] == [
                each.default is each.empty for each in there
            ]
        if not name.startswith("_"):
            assert (
                getattr(muster.nn, name)
                is getattr(muster.distributed.nn, name)
                is getattr(ours, name)
            )
    assert (
        muster.distributed.all_reduce is muster.all_reduce
        and muster.distributed.nn.RemoteModule is muster.nn.RemoteModule
    )

# SPDX-License-Identifier: BSD-3-Clause
"""Functional collectives under torch.compile: one graph, the same results and gradients."""

import os

import pytest
import torch
from ranks import meeting_file, run_ranks
from torch._dynamo.testing import CompileCounterWithBackend

import muster as dist
import muster._functional_collectives as funcol
from muster import _functional_operators as operators
from muster.nn import functional

SIZE = 2
ENGINES = ["aot_eager", "inductor"] if os.environ.get("MUSTER_TEST_LONG") else ["aot_eager"]


def on_ranks(body, *arguments):
    meeting = meeting_file()

    def rank_body(rank):
        dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=SIZE)
        torch.manual_seed(rank)
        body(rank, *arguments)
        dist.destroy_process_group()

    run_ranks(SIZE, rank_body)


def model(x, weight, group):
    total = funcol.wait_tensor(funcol.all_reduce(x @ weight, "sum", group))
    part = funcol.reduce_scatter_tensor(total.sin(), "avg", 1, group)
    whole = funcol.all_gather_tensor(part * part, 1, group)
    moved = funcol.all_to_all_single(whole + x.sum(), None, None, group)
    first, second = funcol.all_reduce_coalesced([moved, moved.cos()], "avg", group)
    rooted = funcol.broadcast(first * second, 1, group)
    swapped = funcol.permute_tensor(rooted, [1, 0], group)
    return (swapped * weight.sum()).square().sum()


def results(function, x, weight, group):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(x, weight, group)
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def one_graph(rank, engine):
    group = dist.new_group([0, 1])
    mesh = dist.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("ranks",))
    weight = torch.randn(6, 4, dtype=torch.float64)
    for members in (group, group.group_name, mesh, (mesh, 0), [0, 1], dist.group.WORLD):
        counter = CompileCounterWithBackend(engine)
        traced = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
        for rows in (2, 4):
            x = torch.randn(rows, 6, dtype=torch.float64)
            torch.testing.assert_close(
                results(traced, x, weight, members), results(model, x, weight, members)
            )
        assert counter.frame_count == 1, "one graph serves both sizes"
        called = {str(node.target) for graph in counter.graphs for node in graph.graph.nodes}
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
            assert any(f"muster.{name}" in each for each in called), called
        if members is group:
            other = dist.group.WORLD
            torch.testing.assert_close(
                results(traced, x, weight, other), results(model, x, weight, other)
            )
            assert counter.frame_count == 2, "another group is another graph"
        torch._dynamo.reset()


# spec: T4 functional collectives that torch.compile traces: one graph without a break, of every
# kind of group, with eager's gradients
@pytest.mark.parametrize("engine", ENGINES)
def test_one_graph(engine):
    on_ranks(one_graph, engine)


def into_given_memory(x, group):
    whole, parts = x.new_zeros(2 * x.size(0), *x.shape[1:]), [torch.zeros_like(x) for _ in range(2)]
    funcol.all_gather_tensor_inplace(whole, x, group)
    funcol.all_gather_inplace(parts, x, group)
    half = funcol.reduce_scatter_tensor_inplace(torch.zeros_like(x), whole, "sum", group)
    pieces = funcol.reduce_scatter_inplace(torch.zeros_like(x), parts, "sum", group)
    total = funcol.all_reduce_inplace(x.clone(), "max", group)
    moved = funcol.all_to_all_inplace(torch.zeros_like(x), x, None, None, group)
    return whole, *parts, half, pieces, total, moved


def exchanged(x, peer, group):
    received = torch.zeros_like(x)
    funcol.batch_p2p_ops_inplace(["isend", "irecv"], [peer, peer], [0, 0], [x, received], group)
    return received + 1


def in_place(rank):
    group, x = dist.group.WORLD, torch.randn(2, 3)
    traced = torch.compile(into_given_memory, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(traced(x, group), into_given_memory(x, group), strict=True):
        assert torch.equal(mine, theirs)
    traced = torch.compile(exchanged, fullgraph=True, backend="aot_eager")
    sent = torch.full((3,), float(rank))
    assert traced(sent, 1 - rank, group).tolist() == [2.0 - rank] * 3


# spec: T4 the forms that write into given tensors, and messages, are traced too
def test_in_place():
    on_ranks(in_place)


def gradients(rank):
    group = dist.group.WORLD
    x = torch.randn(4, 2, dtype=torch.float64)
    scale = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2) * (rank + 1)

    def compare(mine, theirs):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        for given, function in ((a, mine), (b, theirs)):
            (function(given) * scale).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)

    for op in ("sum", "avg"):
        reduce_op = getattr(dist.ReduceOp, op.upper())
        compare(
            lambda y, op=op: funcol.all_reduce(y, op, group),
            lambda y, op=reduce_op: functional.all_reduce(y, op, group),
        )
    factor = dist._make_nccl_premul_sum(3.0)
    compare(
        lambda y: funcol.all_reduce(y, factor, group),
        lambda y: functional.all_reduce(y, group=group) * 3,
    )
    compare(
        lambda y: funcol.all_gather_tensor(y[:2], 0, group),
        lambda y: torch.cat(functional.all_gather(y[:2].contiguous(), group)),
    )
    compare(
        lambda y: funcol.all_to_all_single(y, [2, 2], [2, 2], group),
        lambda y: functional.all_to_all_single(torch.empty_like(y), y, [2, 2], [2, 2], group),
    )
    # Both ranks hold the first element's maximum and share its gradient; rank 1 alone holds the
    # other's.
    y = torch.tensor([5.0, float(rank)], requires_grad=True)
    (funcol.all_reduce(y, "max", group) * torch.tensor([1.0, 2.0])).sum().backward()
    assert y.grad.tolist() == ([1, 0] if rank == 0 else [1, 4])
    with pytest.raises(RuntimeError, match="'product' has no gradient"):
        funcol.all_reduce(y, "product", group).sum().backward()


# spec: T4 gradients of functional collectives are those of muster.nn.functional
def test_gradients():
    on_ranks(gradients)


def checked_operators(rank):
    name, x = dist.group.WORLD.group_name, torch.randn(4, 2, requires_grad=True)
    for operator, arguments in (
        (operators.all_reduce, (x, "sum", name)),
        (operators.all_reduce, (x, "max", name)),
        (operators.all_reduce_coalesced, ([x, x.exp()], "avg", name)),
        (operators.broadcast, (x, 1, name)),
        (operators.all_gather, (x, 0, name)),
        (operators.all_gather, (x.t(), -1, name)),
        (operators.reduce_scatter, (x, "sum", 0, name)),
        (operators.reduce_scatter, (x, "avg", -1, name)),
        (operators.all_to_all, (x, None, None, name)),
        (operators.all_to_all, (x, [2, 2], [2, 2], name)),
    ):
        torch.library.opcheck(operator, arguments)


# spec: T4 what the operators say of themselves (schema, shapes, gradients) is what they do
def test_operators_keep_their_contracts():
    on_ranks(checked_operators)

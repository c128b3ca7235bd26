# SPDX-License-Identifier: BSD-3-Clause
"""The parts of stock torch that build on process groups, on backend muster: sharding, tensor and
pipeline parallelism, checkpoints, graphs.

Each way gives one process's results.
"""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ranks import meeting_file, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental._attention import (
    _context_parallel_shard,
    context_parallel_unshard,
)
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import (
    flex_cp_allgather,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import muster.torch  # noqa: F401

BACKEND = os.environ.get("MUSTER_UPSTREAM_BACKEND", "muster")  # gloo, to see what torch's own does


def on_ranks(size, body, *arguments):
    meeting = meeting_file()

    def rank_body(rank):
        dist.init_process_group(
            BACKEND, init_method="file://" + meeting, rank=rank, world_size=size
        )
        torch.manual_seed(5)
        result = body(rank, size, *arguments)
        dist.destroy_process_group()
        return result

    return run_ranks(size, rank_body)


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net(blocks=2):
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def trained(model, batches, clip=True):
    """Its losses and its optimizer: Adam, which has states to shard."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def whole(model):
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }


def close(mine, theirs, **tolerance):
    torch.testing.assert_close(mine, theirs, **tolerance)


def batches(steps=3, rows=4):
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(rows, 8, generator=generator) for _ in range(steps)]


def sharded(rank, size):
    given = batches()
    alone = net()
    trained(alone, given)
    for options in (
        {},
        {"reshard_after_forward": False},
        {"mesh": init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "shards"))},
    ):
        model = net()
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)
        trained(model, [x.chunk(size)[rank] for x in given])
        close(whole(model), alone.state_dict(), rtol=1e-4, atol=1e-5)
    low = fully_shard(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    losses, _ = trained(low, [x.chunk(size)[rank] for x in given])
    assert all(map(torch.isfinite, map(torch.tensor, losses)))


# spec: A2 stock FSDP2 on one and two dimensions of a mesh, with clipped gradients, trains as one
# process
def test_fully_shard():
    on_ranks(4, sharded)


def tensors(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(7, 5, generator=generator), torch.randn(5, 6, generator=generator))
    for before in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(a, mesh, [before])
        for after in (Replicate(), Shard(0), Shard(1)):
            close(x.redistribute(mesh, [after]).full_tensor(), a)
        for other in (Replicate(), Shard(0), Shard(1)):
            y = distribute_tensor(b, mesh, [other])
            close((x @ y).full_tensor(), a @ b)
    part = DTensor.from_local(a * (rank + 1), mesh, [Partial()])
    close(part.full_tensor(), a * sum(range(1, size + 1)))
    x = distribute_tensor(a, mesh, [Shard(0)]).requires_grad_()
    F.softmax(x, 0).square().sum().backward()
    y = a.clone().requires_grad_()
    F.softmax(y, 0).square().sum().backward()
    close(x.grad.full_tensor(), y.grad)
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("x", "y"))
    z = distribute_tensor(a, square, [Shard(0), Shard(1)])
    close(z.redistribute(square, [Shard(1), Replicate()]).full_tensor(), a)


# spec: A2 stock DTensor: every redistribution of even and uneven shards, products, partial sums,
# gradients, two dimensions
def test_dtensor():
    on_ranks(4, tensors)


def divided(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    given = batches(rows=size)
    alone = net(1)
    trained(alone, given, clip=False)
    model = net(1)
    parallelize_module(model, mesh, {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
    trained(model, given, clip=False)
    close(whole(model), alone.state_dict(), rtol=1e-4, atol=1e-5)
    model = net(1)
    rows = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
    plan = {"0.norm": SequenceParallel(sequence_dim=0)}
    plan |= {"0.up": ColwiseParallel(**rows[0]), "0.down": RowwiseParallel(**rows[1])}
    parallelize_module(model, mesh, plan)
    trained(model, [x.chunk(size)[rank] for x in given], clip=False)
    close(whole(model), alone.state_dict(), rtol=1e-4, atol=1e-5)
    weight, labels = torch.randn(16, 8), torch.tensor([3, 9, 0, 15])
    logits = distribute_tensor(given[0] @ weight.t(), mesh, [Shard(1)]).requires_grad_()
    plain = (given[0] @ weight.t()).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(logits, labels[:size])
        loss.backward()
    reference = F.cross_entropy(plain, labels[:size])
    reference.backward()
    close(loss.full_tensor(), reference)
    close(logits.grad.full_tensor(), plain.grad)

    both = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    model = net(1)
    parallelize_module(
        model, both["tensor"], {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
    )
    fully_shard(model, mesh=both["data"])
    trained(model, [x.chunk(2)[rank // (size // 2)] for x in given], clip=False)
    close(whole(model), alone.state_dict(), rtol=1e-4, atol=1e-5)


# spec: A2 stock tensor parallelism: columns, rows, sequences, a divided loss, and beside FSDP2 on
# one mesh
def test_tensor_parallel():
    on_ranks(4, divided)


SCHEDULES = [
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]


def pipelined(rank, size, name):
    kind = getattr(schedules, name)
    multiple = issubclass(kind, schedules.PipelineScheduleMulti)
    bends = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    count = size * (2 if multiple else 1)
    model = net(count)
    alone = copy.deepcopy(model)
    numbers = [rank, count - 1 - rank] if bends else list(range(rank, count, size))
    stages = [PipelineStage(model[i], i, count, torch.device("cpu")) for i in numbers]
    pieces, rows = 4, 8
    schedule = kind(stages if multiple else stages[0], pieces, loss_fn=F.mse_loss)
    x, wanted = batches(2, rows)
    losses = []
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        given = (x,) if 0 in numbers else ()
        more = {"target": wanted, "losses": losses} if count - 1 in numbers else {}
        schedule.step(*given, **more)
    loss = F.mse_loss(alone(x), wanted)
    loss.backward()
    for number in numbers:
        for (name, mine), theirs in zip(
            model[number].named_parameters(), alone[number].parameters(), strict=True
        ):
            close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=f"{number}.{name}")
    if count - 1 in numbers:
        close(torch.stack(losses).mean(), loss)


# spec: A2 stock pipelines: all seven schedules have one process's losses and gradients
@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline(name):
    on_ranks(2, pipelined, name)


def of_contexts(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("context",))
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, 8 * size, 4, generator=generator) for _ in range(3))
    wholes = [each.clone().requires_grad_() for each in (q, k, v)]
    reference = F.scaled_dot_product_attention(*wholes)
    reference.square().sum().backward()
    parts = [
        each.detach().clone().requires_grad_()
        for each in _context_parallel_shard(mesh, [q, k, v], [2, 2, 2])
    ]
    keys, values = flex_cp_allgather(parts[1], parts[2], 2, mesh.get_group().group_name)
    out = F.scaled_dot_product_attention(parts[0], keys, values)
    out.square().sum().backward()
    (joined,) = context_parallel_unshard(mesh, [out.detach()], [2])
    close(joined, reference.detach())
    for mine, theirs in zip(parts, wholes, strict=True):
        close(mine.grad, theirs.grad.chunk(size, 2)[rank])


# spec: A2 stock context parallelism where it runs on CPUs: attention over gathered keys and values,
# and its gradients
def test_context_parallel():
    on_ranks(2, of_contexts)


def saved(rank, size, folder):
    model = net()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    _, optimizer = trained(model, [x.chunk(size)[rank] for x in batches()])
    states, moments = get_state_dict(model, optimizer)
    state = {"model": states, "optimizer": moments}
    dcp.async_save(state, checkpoint_id=folder + "/later").result()
    dcp.save(state, checkpoint_id=folder + "/now")
    return {name: each.tolist() for name, each in whole(model).items()}


def loaded(rank, size, folder):
    model = fully_shard(net())
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    _, optimizer = trained(model, batches(1, size)[:1])
    states, moments = get_state_dict(model, optimizer)
    state = {"model": states, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    steps = {int(each["step"]) for each in optimizer.state.values()}
    assert steps == {3}, steps
    return {name: each.tolist() for name, each in whole(model).items()}


# spec: A2 stock checkpoints, saved by 4 ranks of one wrapping at once and in the background, loaded
# by 2 of another
def test_checkpoint_is_resharded(tmp_path):
    first = on_ranks(4, saved, str(tmp_path))
    for name in ("now", "later"):
        for states in on_ranks(2, loaded, str(tmp_path / name)):
            assert states == first[0]


def compiled(rank, size):
    group = dist.group.WORLD

    def step(x):
        total = funcol.all_reduce(x, "sum", group)
        part = funcol.reduce_scatter_tensor(total.sin(), "sum", 0, group)
        return funcol.all_gather_tensor(part * 2, 0, group).square().sum()

    x = torch.randn(4 * size, 3) + rank
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(mine)
    reference = step(theirs)
    close(loss, reference)

    given = batches()
    alone = net()
    trained(alone, given)
    for wrap in (
        nn.parallel.DistributedDataParallel,
        fully_shard,
    ):
        model = wrap(net())
        traced = torch.compile(model, backend="aot_eager")
        trained(traced, [each.chunk(size)[rank] for each in given])
        of_net = model.module if hasattr(model, "module") else model
        states = {name.removeprefix("_orig_mod."): each for name, each in whole(of_net).items()}
        close(states, alone.state_dict(), rtol=1e-4, atol=1e-5)


# spec: A2 torch.compile: stock functional collectives in one graph, DDP and FSDP2 in graphs train
# as one process
def test_compile():
    on_ranks(2, compiled)

# SPDX-License-Identifier: BSD-3-Clause
"""Programs as torchtitan, accelerate and transformers are used: each trains a model by `job`, which
is one process, muster's fully_shard, or torch's on Gloo.
"""

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 10, 12


class Block(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def inner(self, x):
        return self.down(gelu(self.up(x)))

    def forward(self, x):
        x = self.norm(x)
        return x + (
            checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        )

    def reset_parameters(self):
        for number, each in enumerate(self.parameters()):
            nn.init.constant_(each, 0.1 + 0.01 * number)


class Net(nn.Module):
    def __init__(self, tied=False, checkpointed=False):
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.table.weight
        self.double()

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (2, 3, 5), generator=generator)


def loss_of(model, rank, step):
    words, targets = batch(rank, step)
    return cross_entropy(model(words).flatten(0, 1), targets.flatten())


class Job:
    """One process, with the losses of all ranks."""

    kind = "alone"

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def shard(self, module, **options):
        return module

    def net(self, model=None, **options):
        model = Net() if model is None else model
        for block in model.blocks:
            self.shard(block, **options)
        return self.shard(model, **options)

    def loss(self, model, step):
        return sum(loss_of(model, rank, step) for rank in range(self.size)) / self.size

    def whole(self, model):
        return {name: each.detach().clone() for name, each in model.state_dict().items()}

    def mesh(self, sizes, names):
        return None

    def steps(self, model, optimizer, count=3, before_step=None):
        for step in range(count):
            self.loss(model, step).backward()
            if before_step is not None:
                before_step()
            optimizer.step()
            optimizer.zero_grad()


class Sharded(Job):
    def __init__(self, kind, rank, size):
        super().__init__(rank, size)
        self.kind = kind
        if kind == "ours":
            import muster as dist
            from muster import fsdp, tensor
            from muster.tensor import parallel
        else:
            import torch.distributed as dist
            from torch.distributed import fsdp, tensor
            from torch.distributed.tensor import parallel
        self.dist, self.fsdp, self.tensor, self.parallel = dist, fsdp, tensor, parallel

    def shard(self, module, **options):
        return self.fsdp.fully_shard(module, **options)

    def loss(self, model, step):
        return loss_of(model, self.rank, step)

    def whole(self, model):
        return {
            name: each.full_tensor().clone() if isinstance(each, DTensor) else each.detach().clone()
            for name, each in model.state_dict().items()
        }

    def mesh(self, sizes, names):
        return self.dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def plain(job):
    model = job.net()
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return model


def clip(job):
    model = job.net()

    def clipped():
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        job.note(norm)

    job.steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), before_step=clipped)
    return model


def total_norm(job):
    model = job.net()

    def scaled():
        gradients = [each.grad for each in model.parameters()]
        for kind in (2.0, 1.0):
            norm = nn.utils.get_total_norm(gradients, kind)
            job.note(norm)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)

    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=scaled)
    return model


def decay_groups(job):
    model = job.net()
    decayed = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    assert len(decayed) == 6 and len(others) == 9
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    job.steps(model, torch.optim.AdamW(groups, lr=0.01))
    return model


def foreach(job):
    model = job.net()
    job.steps(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True))
    return model


def fused(job):
    model = job.net()
    job.steps(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    return model


def meta_init(job):
    """Values that are set after the parameters were divided."""
    with torch.device("meta"):
        model = Net()
    job.net(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for each in model.parameters():
        value = torch.randn(each.shape, dtype=each.dtype) / 5
        with torch.no_grad():
            if isinstance(each, DTensor):
                value = job.tensor.distribute_tensor(value, each.device_mesh, each.placements)
            each.copy_(value)
    for block in model.blocks:
        block.reset_parameters()
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def tied(job):
    model = Net(tied=True)
    for block in model.blocks:
        job.shard(block)
    job.shard([model.table, model.head])
    job.shard(model)
    assert len(list(model.parameters())) == 14
    job.steps(model, torch.optim.Adam(model.parameters(), lr=0.01))
    return model


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.full((rank, base.in_features), 0.02).double())
        self.b = nn.Parameter(torch.full((base.out_features, rank), 0.01).double())

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def lora(job):
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LoRA(block.up), LoRA(block.down)
    job.net(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == 8
    job.steps(model, torch.optim.SGD(trained, lr=0.5, momentum=0.9))
    return model


def frozen_units(job):
    model = Net()
    model.blocks[0].requires_grad_(False)
    job.net(model)
    model.table.weight.requires_grad_(False)  # after sharding
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    job.steps(model, optimizer)
    return model


def two_optimizers(job):
    model = job.net()
    blocks = list(model.blocks.parameters())
    rest = [each for name, each in model.named_parameters() if "blocks" not in name]
    first, second = torch.optim.SGD(blocks, lr=0.1), torch.optim.Adam(rest, lr=0.01)
    for step in range(3):
        job.loss(model, step).backward()
        for each in (first, second):
            each.step()
            each.zero_grad()
    return model


def ema(job):
    model = job.net()
    average = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        job.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, each in model.named_parameters():
                average[name].lerp_(each, 0.1)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(average[name])
    return model


def accumulation(job):
    model = job.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for part in range(3):
            (job.loss(model, 3 * step + part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def accumulation_without_sync(job):
    model = job.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for part in range(3):
            if job.kind != "alone":
                model.set_requires_gradient_sync(part == 2)
                model.set_reshard_after_backward(part == 2)
            (job.loss(model, 3 * step + part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def checkpointed_inside(job):
    model = job.net(Net(checkpointed=True))
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def checkpointed_outside(job):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = job.shard(checkpoint_wrapper(block))
    job.shard(model)
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def compiled(job):
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    job.net(model)
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def hybrid(job):
    rows = 2 if job.size % 2 == 0 else 1
    mesh = job.mesh((rows, job.size // rows), ("replicate", "shard"))
    model = job.net(**({} if mesh is None else {"mesh": mesh}))
    if mesh is not None:
        assert str(model.table.weight.placements) == "(Replicate(), Shard(dim=0))"

    def clipped():
        job.note(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    job.steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), before_step=clipped)
    return model


def other_dimensions(job):
    def last(parameter):
        return job.tensor.Shard(parameter.dim() - 1)

    model = job.net(**({} if job.kind == "alone" else {"shard_placement_fn": last}))
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def l2_penalty(job):
    """Each rank's loss has the whole penalty, whose gradient is averaged with the rest."""
    model = job.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        job.loss(model, step).backward()
        with torch.no_grad():
            for each in model.parameters():
                each.grad.add_(each, alpha=0.02)
        penalty = sum((each.detach() ** 2).sum() for each in model.parameters())
        job.note(penalty)
        optimizer.step()
        optimizer.zero_grad()
    return model


def optimizer_in_backward(job):
    model = job.net()
    of = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter):
        of[parameter].step()
        of[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    for number in range(3):
        job.loss(model, number).backward()
        assert all(each.grad is None for each in model.parameters())
    return model


def saved_and_loaded(job):
    model = job.net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job.steps(model, optimizer, 2)
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    again = job.net()
    other = torch.optim.Adam(again.parameters(), lr=0.01)
    again.load_state_dict(state)
    other.load_state_dict(optimizer.state_dict())
    job.steps(again, other, 2)
    return again


def assigned(job):
    model = job.net()
    job.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    again = job.net()
    again.load_state_dict(state, assign=True)
    job.steps(again, torch.optim.SGD(again.parameters(), lr=0.1), 2)
    return again


def evaluated_between(job):
    model = job.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        job.steps(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            model(batch(0, step)[0])
        model.train()
    return model


def muon(job):
    """With float64 in place of its bfloat16, in which sums of another order differ visibly."""
    model = job.net()
    matrices = list(model.blocks.parameters())
    matrices = [each for each in matrices if each.dim() == 2]
    rest = [each for each in model.parameters() if all(each is not one for one in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.1)]
    for step in range(3):
        job.loss(model, step).backward()
        for each in optimizers:
            with mock.patch.object(torch, "bfloat16", torch.float64):
                each.step()
            each.zero_grad()
    return model


PROGRAMS = {
    each.__name__: each
    for each in (
        plain,
        clip,
        total_norm,
        decay_groups,
        muon,
        foreach,
        fused,
        meta_init,
        tied,
        lora,
        frozen_units,
        two_optimizers,
        ema,
        accumulation,
        accumulation_without_sync,
        checkpointed_inside,
        checkpointed_outside,
        compiled,
        hybrid,
        other_dimensions,
        l2_penalty,
        optimizer_in_backward,
        saved_and_loaded,
        assigned,
        evaluated_between,
    )
}


def notes_of(job, program):
    """(The whole weights, the numbers that the program noted), after it has run by `job`."""
    noted = []

    def note(value):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        noted.append(float(value))

    job.note = note
    with contextlib.ExitStack():
        model = program(job)
    return job.whole(model), noted

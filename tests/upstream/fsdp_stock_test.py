# SPDX-License-Identifier: BSD-3-Clause
"""`muster.fsdp.fully_shard` beside torch's FSDP2 on Gloo: one model and one program, trained with
every option by both, in the same processes.
"""

import pytest
import torch
import torch.distributed as stock
import torch.distributed.fsdp as stock_fsdp
from ranks import meeting_file, run_ranks
from torch import nn

import muster
from muster import fsdp

STEPS, WIDTH = 4, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that neither 2 nor 4 divides, a parameter of one element, one that is not trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.full((WIDTH,), 0.1), requires_grad=False)

    def forward(self, x):
        x = self.first(x) + self.fixed
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def grid(backend):
    size = backend.get_world_size()
    return backend.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rep", "shard"))


def mixed(library, reduce_dtype=None, **more):
    return library.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, **more)


# By name: the fewest ranks, the largest difference of losses, and what fully_shard is given.
EXACT, NARROW = 2e-5, 3e-2
OPTIONS = {
    "default": (2, EXACT, lambda library, backend: {}),
    "kept": (2, EXACT, lambda library, backend: {"reshard_after_forward": False}),
    "freed": (2, EXACT, lambda library, backend: {"reshard_after_forward": True}),
    "part": (4, EXACT, lambda library, backend: {"reshard_after_forward": 2}),
    "hybrid": (4, EXACT, lambda library, backend: {"mesh": grid(backend)}),
    "hybrid kept": (
        4,
        EXACT,
        lambda library, backend: {"mesh": grid(backend), "reshard_after_forward": False},
    ),
    "bfloat16": (2, NARROW, lambda library, backend: {"mp_policy": mixed(library)}),
    "bfloat16 reduced in float": (
        2,
        NARROW,
        lambda library, backend: {"mp_policy": mixed(library, torch.float32)},
    ),
    "bfloat16 shown as float": (
        2,
        NARROW,
        lambda library, backend: {
            "mp_policy": mixed(library, torch.float32, output_dtype=torch.float32)
        },
    ),
    "offloaded": (
        2,
        EXACT,
        lambda library, backend: {"offload_policy": library.CPUOffloadPolicy(pin_memory=False)},
    ),
    "offloaded hybrid": (
        4,
        EXACT,
        lambda library, backend: {
            "mesh": grid(backend),
            "offload_policy": library.CPUOffloadPolicy(pin_memory=False),
        },
    ),
}


def plain(model):
    pass


def prefetching(model):
    blocks = list(model.blocks)
    for before, after in zip(blocks, blocks[1:]):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def far_ahead(model):
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[2].set_modules_to_backward_prefetch(blocks[:2])


def not_prefetching(model):
    for each in (model, *model.blocks):
        each.set_modules_to_forward_prefetch([])
        each.set_modules_to_backward_prefetch([])


def divided(model):
    for each in (model, *model.blocks):
        each.set_force_sum_reduction_for_comms(True)  # torch's Gloo cannot multiply in a reduction
        each.set_gradient_divide_factor(3.0)


# The settings of the sharded model, and whether gradients are clipped or gathered over two passes.
SETTINGS = {
    "plain": (plain, {}),
    "clipped": (plain, {"clip": 0.05}),
    "clipped by the sum": (plain, {"clip": 0.5, "norm_type": 1.0}),
    "accumulated": (plain, {"passes": 2}),
    "prefetched": (prefetching, {}),
    "prefetched far ahead": (far_ahead, {"clip": 0.05}),
    "not prefetched": (not_prefetching, {}),
    "divided by another number": (divided, {}),
}


def train(library, backend, option, setting, rank):
    """Losses, and the norms by which gradients were clipped."""
    given = OPTIONS[option][2](library, backend)
    prepare, how = SETTINGS[setting]
    model = Net()
    inner = dict(given)
    if "mp_policy" in given:  # output_dtype is what the whole model returns
        inner["mp_policy"] = mixed(library, given["mp_policy"].reduce_dtype)
    for block in model.blocks:
        library.fully_shard(block, **inner)
    library.fully_shard(model, **given)
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses, norms = [], []
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(STEPS):
        passes = how.get("passes", 1)
        for at in range(passes):
            model.set_requires_gradient_sync(at == passes - 1)
            x = torch.randn(6, 5, generator=generator)
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if "clip" in how:
            norm = clipped(library, model, how)
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def clipped(library, model, how):
    norm_type = how.get("norm_type", 2.0)
    if library is fsdp:
        return model.clip_grad_norm_(how["clip"], norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), how["clip"], norm_type)
    return norm.full_tensor()


def beside_each_other(rank, size, folder, pairs):
    muster.init_process_group(
        init_method="file://" + folder + "-muster", rank=rank, world_size=size
    )
    store = stock.FileStore(folder + "-stock", size)
    stock.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for option, setting in pairs:
        tolerance = OPTIONS[option][1]
        mine = train(fsdp, muster, option, setting, rank)
        theirs = train(stock_fsdp, stock, option, setting, rank)
        for found, expected, what in zip(mine, theirs, ("losses", "norms")):
            torch.testing.assert_close(
                torch.tensor(found),
                torch.tensor(expected),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, what=what: f"{option}, {setting}, {what}: {text}",
            )
        assert mine[0][-1] != mine[0][0]
    stock.destroy_process_group()
    muster.destroy_process_group()


# spec: M3 T5 every option of fully_shard trains what stock FSDP2 trains on Gloo, with 2 and 4 ranks
@pytest.mark.parametrize("size", [2, 4])
def test_options(size):
    pairs = [(name, "plain") for name, (least, *_) in OPTIONS.items() if least <= size]
    run_ranks(size, beside_each_other, size, meeting_file(), pairs)


# spec: M3 T5 clipping, accumulation, prefetching and divisors are those of stock FSDP2, with 2 and
# 4 ranks
@pytest.mark.parametrize("size", [2, 4])
def test_settings(size):
    pairs = [(option, setting) for setting in SETTINGS for option in ("default", "hybrid")]
    pairs = [each for each in pairs if OPTIONS[each[0]][0] <= size]
    run_ranks(size, beside_each_other, size, meeting_file(), pairs)

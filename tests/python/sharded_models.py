# SPDX-License-Identifier: BSD-3-Clause
"""Models, data and steps for the tests of `muster.fsdp`."""

import functools

import torch
import torch.distributed.fsdp as theirs
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from muster import fsdp
from muster.fsdp import FSDP, fully_shard


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Words to numbers, through blocks; the table is also the way out."""

    def __init__(self, seed=1, width=12, checkpointed=""):
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(11, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("bias", torch.full((11,), float(seed)))
        self.checkpointed = checkpointed

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
                if self.checkpointed
                else block(x)
            )
        return {"scores": x @ self.table.weight.T * self.scale + self.bias}


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (4, 5), generator=generator), torch.randint(
        0, 11, (4, 5), generator=generator
    )


def loss_of(model, rank, step):
    words, targets = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(words)["scores"].transpose(1, 2), targets)


def train(model, optimizer, rank, steps=4):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def whole(model):
    return fsdp.get_model_state_dict(model, options=fsdp.StateDictOptions(full_state_dict=True))


def assert_same(state, expected, tolerance=1e-5):
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def is_divided(parameter):
    """Whether a parameter that has two dimensions in one process shows this rank's part of it."""
    return isinstance(parameter, DTensor) or parameter.dim() == 1


def sharded(net):
    """By fully_shard, inner modules first."""
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


WAYS = {
    "one": FSDP,
    "classes": functools.partial(FSDP, auto_wrap_policy={Block}),
    "size": functools.partial(
        FSDP,
        auto_wrap_policy=functools.partial(
            fsdp.wrap.size_based_auto_wrap_policy, min_num_params=400
        ),
    ),
    "theirs": functools.partial(
        FSDP, auto_wrap_policy=theirs.wrap.ModuleWrapPolicy({torch.nn.Linear, Block})
    ),
    "kept": functools.partial(
        FSDP, auto_wrap_policy={Block}, sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP
    ),
    "in place": sharded,
}

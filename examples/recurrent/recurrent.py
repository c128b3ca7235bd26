# SPDX-License-Identifier: BSD-3-Clause
"""A recurrent net whose two large parts, the table of its input words and the decoder to its output
words, live on another worker.

    muster run --standalone --nproc-per-node 2 examples/recurrent/recurrent.py [--steps N]

It learns a sentence by heart: given the words so far, the next one. Every step is one forward and
one backward pass through both workers, and one optimizer step on both. It checks its own gradients
against those of one process, and ends with 1 where they differ.
"""

import argparse
import os
import sys

import torch
from torch import nn

from muster import autograd, rpc
from muster.nn import RemoteModule
from muster.optim import DistributedOptimizer

SENTENCE = (
    "the quick brown fox jumps over the lazy dog and the lazy dog sleeps on under the old tree"
).split()
WORDS = sorted(set(SENTENCE))
SIZE = 24


def seeded(kind, *sizes):
    """A module in float64 with weights that do not depend on who makes it."""
    torch.manual_seed(len(kind.__name__))
    return kind(*sizes).double()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = seeded(nn.Embedding, len(WORDS), SIZE)

    def forward(self, words):
        return self.table(words)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = seeded(nn.Linear, SIZE, len(WORDS))

    def forward(self, x):
        return self.out(x)


class Recurrent(nn.Module):
    """`table` and `decoder` may be here or elsewhere: they are called in the same way."""

    def __init__(self, table, decoder):
        super().__init__()
        self.table, self.lstm, self.decoder = table, seeded(nn.LSTM, SIZE, SIZE), decoder

    def forward(self, words):
        return self.decoder(self.lstm(self.table(words))[0])


def loss_of(net, words):
    return nn.functional.cross_entropy(net(words[:-1]), words[1:])


def gradient_of(parameter, context_id):
    return autograd.get_gradients(context_id)[parameter.local_value()]


def parameters_of(net):
    """References to all parameters, wherever they are."""
    return [
        *net.table.remote_parameters(),
        *map(rpc.RRef, net.lstm.parameters()),
        *net.decoder.remote_parameters(),
    ]


def check(words, mode):
    """The largest difference between the gradients of the two workers and those of one process,
    relative to the largest gradient.
    """
    alone = Recurrent(Table(), Decoder())
    loss_of(alone, words).backward()
    expected = [
        each.grad for part in (alone.table, alone.lstm, alone.decoder) for each in part.parameters()
    ]
    net = Recurrent(RemoteModule("keeper", Table), RemoteModule("keeper", Decoder))
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(net, words)], mode=mode)
        found = [
            rpc.rpc_sync(each.owner(), gradient_of, (each, context_id))
            for each in parameters_of(net)
        ]
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    )


def train(words, steps):
    net = Recurrent(RemoteModule("keeper", Table), RemoteModule("keeper", Decoder))
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters_of(net), lr=0.02)
    for step in range(steps):
        with autograd.context() as context_id:
            loss = loss_of(net, words)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        if step % 20 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)
    return (net(words[:-1]).argmax(1) == words[1:]).double().mean().item()


def report(what, holds):
    print("ok    " if holds else "FAILED", what, flush=True)
    return holds


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=60)
    steps = arguments.parse_args().steps
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc("trainer" if rank == 0 else "keeper")
    good = True
    if rank == 0:
        words = torch.tensor([WORDS.index(each) for each in SENTENCE])
        for mode in ("fast", "smart"):
            off = check(words, mode)
            good = (
                report(
                    f"gradients of one process in {mode.upper()} mode: off by {off:.1e}", off < 1e-6
                )
                and good
            )
        right = train(words, steps)
        good = report(f"words known by heart: {100 * right:.0f} %", right > 0.9) and good
    rpc.shutdown()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

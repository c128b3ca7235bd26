# SPDX-License-Identifier: BSD-3-Clause
"""Trains the models of models.cc with torch's own DistributedDataParallel on gloo.

    torch_worker.py FOLDER RANKS:DTYPE...

Reads weights and data of each case from FOLDER/RANKS and leaves each rank's parameters and buffers
there, all as doubles.
"""

import array
import math
import os
import sys
import traceback
import warnings
from contextlib import nullcontext
from functools import partial

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS = 20


class Mlp(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x, flag):
        return self.c(torch.relu(self.b(torch.tanh(self.a(x)))))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.norm_b = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c = nn.Linear(8, 3)

    def forward(self, x, flag):
        x = torch.max_pool2d(torch.relu(self.norm_a(self.a(x))), 2)
        return self.c(torch.relu(self.norm_b(self.b(x))).mean((2, 3)))


class Transformer(nn.Module):
    WIDTH, HEADS = 8, 2

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(6, self.WIDTH))
        self.table = nn.Embedding(11, self.WIDTH)
        self.qkv, self.out = (
            nn.Linear(self.WIDTH, 3 * self.WIDTH),
            nn.Linear(self.WIDTH, self.WIDTH),
        )
        self.norm_a = nn.LayerNorm(self.WIDTH)
        self.up, self.down = nn.Linear(self.WIDTH, 16), nn.Linear(16, self.WIDTH)
        self.norm_b = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, 11)

    def forward(self, tokens, flag):
        x = self.table(tokens) + self.place[: tokens.size(1)]
        rows, length = tokens.shape
        depth = self.WIDTH // self.HEADS
        q, k, v = self.qkv(x).view(rows, length, 3, self.HEADS, depth).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(depth), -1)
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(rows, length, self.WIDTH)
        x = self.norm_a(x + self.out(mixed))
        x = self.norm_b(x + self.down(functional.gelu(self.up(x))))
        return self.head(x)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.b.weight = self.a.weight

    def forward(self, x, flag):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.side, self.never, self.c = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x, flag):
        x = torch.tanh(self.a(x))
        if flag:
            x = torch.tanh(self.side(x))
        return self.c(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.c = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x, flag):
        return self.c(torch.relu(self.norm(self.a(x))))


class SparseTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.c = nn.Embedding(13, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, words, flag):
        return self.c(torch.tanh(self.table(words).mean(1)))


# name: model, batch's x and y, x are tokens, y are tokens, options of the wrapper, momentum, of
# join() (None: evenly)
SMALL = {"bucket_cap_mb": 0.001}
CASES = {
    "mlp": (Mlp, (4, 8), (4, 3), False, False, SMALL, 0.9, None),
    "large": (lambda: Mlp(130), (4, 8), (4, 3), False, False, {}, 0.9, None),
    "conv": (Conv, (4, 3, 8, 8), (4, 3), False, False, SMALL, 0.9, None),
    "transformer": (Transformer, (4, 6), (4, 6), True, True, {}, 0.9, None),
    "shared": (Shared, (4, 8), (4, 3), False, False, {}, 0.9, None),
    "unused": (Unused, (4, 8), (4, 3), False, False, {"find_unused_parameters": True}, 0.9, None),
    "sparse": (SparseTable, (4, 5), (4, 3), True, False, {}, 0, None),
    "uneven": (
        Normed,
        (4, 8),
        (4, 3),
        False,
        False,
        {},
        0.9,
        {"divide_by_initial_world_size": True},
    ),
    "uneven_effective": (
        Normed,
        (4, 8),
        (4, 3),
        False,
        False,
        SMALL,
        0.9,
        {"divide_by_initial_world_size": False},
    ),
}


def read(path, shape, dtype):
    numbers = array.array("d")
    with open(path, "rb") as file:
        numbers.frombytes(file.read())
    return torch.tensor(numbers.tolist(), dtype=torch.float64).to(dtype).view(shape)


def train(folder, name, rank, ranks, dtype):
    make, x_shape, y_shape, x_tokens, y_tokens, options, momentum, join = CASES[name]
    path = os.path.join(folder, name)
    x = read(path + ".x", (STEPS, ranks, *x_shape), torch.int64 if x_tokens else dtype)
    y = read(path + ".y", (STEPS, ranks, *y_shape), torch.int64 if y_tokens else dtype)
    net = make().to(dtype)
    weights, at = read(path + ".weights", (-1,), torch.float64), 0
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(weights[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()
    assert at == weights.numel(), f"{name}: {at} weights here and {weights.numel()} there"
    model = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    steps = STEPS if join is None else STEPS - 4 * (ranks - 1 - rank)
    with nullcontext() if join is None else model.join(**join):
        for step in range(steps):
            optimizer.zero_grad()
            output = model(x[step][rank], (step + rank) % 3 == 1)
            if y_tokens:
                loss = functional.cross_entropy(
                    output.view(-1, output.size(-1)), y[step][rank].view(-1)
                )
            else:
                loss = functional.mse_loss(output, y[step][rank])
            loss.backward()
            optimizer.step()
    state = [part.detach().double().reshape(-1) for part in [*net.parameters(), *net.buffers()]]
    with open(f"{path}.{rank}.out", "wb") as file:
        array.array("d", torch.cat(state).tolist()).tofile(file)


def worker(folder, meeting, rank, ranks, dtype):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{meeting}", rank=rank, world_size=ranks
    )
    for name in CASES:
        train(folder, name, rank, ranks, dtype)
    dist.destroy_process_group()


def run(folder, meeting, ranks, dtype):
    """How every rank ended: its exit status, or the number of a signal below 0."""
    # torch is imported once: that takes longer than all of the training.
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                worker(folder, meeting, rank, ranks, dtype)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main():
    for job in sys.argv[2:]:
        ranks, dtype = job.split(":")
        train_all = partial(
            run, os.path.join(sys.argv[1], ranks), ranks=int(ranks), dtype=getattr(torch, dtype)
        )
        ends = train_all("gloo")
        if (
            min(ends) < 0
        ):  # a crash inside of stock torch, which is what is compared with, not what is tested
            print(f"stock torch crashed on a rank (ends: {ends}); once more", file=sys.stderr)
            ends = train_all("gloo-again")
        if any(ends):
            sys.exit(f"training on {ranks} ranks failed (ends: {ends})")


if __name__ == "__main__":
    main()

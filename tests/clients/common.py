# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the clients' programs: a small model, data of each rank's own, and rank 0's words at
the end.
"""

import json
import os

import torch
import torch.distributed as dist

ENGINE = os.environ["CLIENT_ENGINE"]  # whose engine is to run: muster's or Gloo's
NAMED = os.environ.get("CLIENT_BACKEND", "gloo")  # the name by which the program asks for it


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def data(rows=32):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :2].sin())


def part(rank, size, rows=32):
    """A rank's batches, the same in every program that makes its own."""
    x, y = data(rows).tensors
    return list(zip(x[rank::size].split(4), y[rank::size].split(4), strict=True))


def is_muster(group=None):
    import muster.torch

    group = group or dist.group.WORLD
    return isinstance(group._get_backend(torch.device("cpu")), muster.torch.ProcessGroupMuster)


def check_engine(group=None):
    assert is_muster(group) == (ENGINE == "muster"), f"this does not run on {ENGINE}"


def say(values, rank=None):
    """values: numbers, or a model with its weights."""
    if isinstance(values, torch.nn.Module):
        values = torch.nn.utils.parameters_to_vector(values.parameters()).tolist()
    if (dist.get_rank() if rank is None else rank) == 0:
        print("RESULT", json.dumps(values), flush=True)

# SPDX-License-Identifier: BSD-3-Clause
"""muster.local_sgd beside the same algorithm by stock torch on Gloo, between the same processes."""

import pathlib
import sys

import pytest
import torch
import torch.distributed as stock
from ranks import meeting_file, run_ranks

import muster as dist
from muster import local_sgd

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "examples" / "replicas")]
from language_model import LanguageModel, Text  # noqa: E402
from stock_diloco import StockDiLoCo  # noqa: E402

CONTEXT, STEPS = 12, 32
CASES = {  # fragments, sync_every, delay, mix
    "plain": (1, 8, 0, 0.0),
    "fragments": (3, 6, 0, 0.0),
    "streaming": (2, 7, 3, 0.5),
}


def train(rank, text, case, made):
    """The weights after some steps of this rank's share of the text; `made` gives what is called
    after each step.
    """
    fragments, sync_every, delay, mix = case
    torch.manual_seed(rank)  # rank 0's values are taken
    net = LanguageModel(width=16, layers=2, context=CONTEXT, heads=2).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    step = made(local_sgd.fragments_of(net, fragments), sync_every, delay, mix)
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = net(text.windows(2, draw))
        loss.backward()
        optimizer.step()
        step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def with_muster(fragments, sync_every, delay, mix):
    return local_sgd.DiLoCo(fragments, sync_every=sync_every, delay=delay, mix=mix).step


def with_stock(fragments, sync_every, delay, mix):
    return StockDiLoCo(fragments, sync_every, delay, mix).step


def compares(rank, size, case, file):
    dist.init_process_group(init_method=f"file://{file}.muster", rank=rank, world_size=size)
    stock.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    text = Text((ROOT / "examples" / "data" / "alice.txt").read_bytes(), CONTEXT)
    mine = train(rank, text, case, with_muster)
    theirs = train(rank, text, case, with_stock)
    stock.destroy_process_group()
    dist.destroy_process_group()
    return (mine - theirs).abs().max().item(), theirs.abs().max().item()


# spec: X2 in Python: a language model's weights are those of the same algorithm by stock torch on
# Gloo, to 1e-6 in float64
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_stock_torch_on_gloo(case, replicas):
    for difference, largest in run_ranks(replicas, compares, replicas, CASES[case], meeting_file()):
        assert difference < 1e-6 < largest

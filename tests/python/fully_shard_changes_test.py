# SPDX-License-Identifier: BSD-3-Clause
"""What programs change between passes of fully_shard: it is seen, or refused by name."""

import pytest
import torch
from torch import nn
from training import on_ranks

import muster as dist
from muster.fsdp import fully_shard, rows
from muster.tensor import Replicate, distribute_tensor


def refused_between(rank, size):
    model = fully_shard(nn.Linear(4, 4).double())
    model.set_reshard_after_backward(False)
    x = torch.ones(1, 4).double()
    model(x).sum().backward()
    kept = model.bias
    with torch.no_grad():
        model.weight.fill_(100.0)
    model.bias = nn.Parameter(torch.zeros(4).double())
    with pytest.raises(dist.DistArgumentError, match="bias was replaced by assignment"):
        model(x)
    model.bias = kept
    assert (model(x) > 390).all()


# spec: M5 a change before one that is refused is not lost where whole values are kept
def test_a_refused_forward_loses_no_change():
    on_ranks(2, refused_between)


def replaced_by_assign(rank, size):
    for passes in (0, 1):
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        model.load_state_dict({k: each * 2 for k, each in model.state_dict().items()}, assign=True)
        expected = model.weight.full_tensor()
        for _ in range(passes):
            model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(dist.DistArgumentError, match="has weight as it was before load_state"):
            optimizer.step()
        assert torch.equal(model.weight.full_tensor(), expected)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert torch.equal(model.weight.full_tensor(), expected) == (passes == 0)


# spec: M5.refusal an optimizer made before load_state_dict(assign=True) would train nothing
def test_optimizers_made_before_assign():
    on_ranks(2, replaced_by_assign)


def odd_gradients(rank, size):
    for wrong in (torch.ones(4, 4), None):
        model = fully_shard(nn.Linear(4, 4))
        if wrong is None:
            mesh = model.weight.device_mesh
            wrong = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        model.weight.grad = wrong
        with pytest.raises(dist.DistArgumentError, match="weight.grad was set to"):
            model(torch.ones(1, 4)).sum().backward()


# spec: M5.refusal a gradient that was set and is not divided as its parameter
def test_other_gradients_are_refused():
    on_ranks(2, odd_gradients)


def clipped_while_whole(rank, size):
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    model.unshard()
    with pytest.raises(dist.DistArgumentError, match="clip_grad_norm_ while weight"):
        model.clip_grad_norm_(1.0)
    model.reshard()
    assert model.clip_grad_norm_(1.0) > 0


# spec: M5.refusal clipping while unshard() holds the parameters whole
def test_clipping_while_whole():
    on_ranks(2, clipped_while_whole)


def slices_of_derived(rank, size):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.__class__ = type("Derived", (type(model),), {})
    assert type(model[:1]) is nn.Sequential


# spec: M5 a slice of a container whose class derives from that of its unit
def test_slices_of_derived_containers():
    on_ranks(2, slices_of_derived)


def interrupted_show(rank, size):
    model = fully_shard(nn.Linear(4, 4))
    of = rows.rows_of(model._fsdp_unit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, "_show", lambda: {}["interrupted"])
        with pytest.raises(KeyError, match="interrupted"):
            model(torch.ones(1, 4))
    assert set(model.state_dict()) == {"weight", "bias"}
    assert model(torch.ones(1, 4)).isfinite().all()


# spec: M5 an exception before a forward begins leaves nothing behind
def test_exceptions_before_a_forward():
    on_ranks(2, interrupted_show)

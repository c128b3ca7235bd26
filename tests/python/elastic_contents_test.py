# SPDX-License-Identifier: BSD-3-Clause
"""A commit of an elastic.State looks only for what was replaced since the one before: it has what
state_dict() gives, whatever was done to the model and the optimizer meanwhile.
"""

import copy
import warnings
import weakref

import pytest
import torch

from muster import elastic


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4, bias=False)
        self.tied = self.last
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.count = 0  # of calls; not in state_dict()

    def forward(self, x):
        self.count += 1
        return self.last(self.norm(self.first(x)))


def made(optimizer=torch.optim.Adam):
    torch.manual_seed(1)
    model = Model()
    state = elastic.State(model=model, optimizer=optimizer(model.parameters(), lr=0.1), step=0)
    return state


def step(state):
    state.optimizer.zero_grad()
    state.model(torch.randn(5, 3)).square().sum().backward()
    state.optimizer.step()
    state.step += 1


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check(state):
    """The contents now, put into a copy of everything, are what the state dicts are now."""
    rest, tensors = state._contents()
    expected = {
        name: copy.deepcopy(getattr(state, name).state_dict()) for name in ("model", "optimizer")
    }
    kept, count = [each.detach().clone() for each in tensors], state.step
    step(state)  # everything else
    step(state)
    with torch.no_grad():
        state._put_back(rest, kept)
    for name, each in expected.items():
        assert same(getattr(state, name).state_dict(), each), name
    assert state.step == count


def other_memory(state):
    weight = state.model.first.weight
    weight.data = weight.data * 2


def another_parameter(state):
    state.model.first.weight = torch.nn.Parameter(torch.ones(4, 3))


def assigned(state):
    values = {name: each + 1 for name, each in state.model.state_dict().items()}
    state.model.load_state_dict(values, assign=True)


def another_buffer(state):
    state.model.register_buffer("more", torch.arange(3))


def a_persistent_buffer(state):
    state.model._non_persistent_buffers_set.discard("mask")


def another_layer(state):
    state.model.last = torch.nn.Linear(4, 4)


def a_parameter_less(state):
    state.model.first.bias = None


def loaded_optimizer(state):
    state.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))


def another_group(state):
    state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})


def another_rate(state):
    state.optimizer.param_groups[0]["lr"] = 0.025


def a_tensor_as_rate(state):
    state.optimizer.param_groups[0]["lr"] = torch.tensor(0.025)


def cleared(state):
    state.optimizer.state.clear()


def a_number_in_the_state(state):
    state.optimizer.state[state.model.first.weight]["count"] = state.step


def loads_count(model):
    def load_state_dict(values):
        model.count = int(values.pop("count"))
        torch.nn.Module.load_state_dict(model, values)

    model.load_state_dict = load_state_dict


def a_hook(state):
    def adds(module, values, prefix, metadata):
        values["count"] = torch.tensor(module.count)

    state.model._register_state_dict_hook(adds)
    loads_count(state.model)


def a_state_dict_of_its_own(state):
    def state_dict():
        values = torch.nn.Module.state_dict(state.model)
        return {**values, "count": torch.tensor(state.model.count)}

    state.model.state_dict = state_dict
    loads_count(state.model)


class Counting(Model):
    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def another_class(state):
    state.model.__class__ = Counting


def a_state_dict_of_the_optimizer(state):
    optimizer, loads = state.optimizer, state.optimizer.load_state_dict

    def state_dict():
        return {**torch.optim.Adam.state_dict(optimizer), "count": state.model.count}

    def load_state_dict(values):
        state.model.count = values.pop("count")
        loads(values)

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict


def another_model(state):
    state.model = Model()
    state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9)


CHANGES = [
    other_memory,
    another_parameter,
    assigned,
    another_buffer,
    a_persistent_buffer,
    another_layer,
    a_parameter_less,
    loaded_optimizer,
    another_group,
    another_rate,
    a_tensor_as_rate,
    cleared,
    a_number_in_the_state,
    a_hook,
    a_state_dict_of_its_own,
    another_class,
    a_state_dict_of_the_optimizer,
    another_model,
]


# spec: L6 a commit has what state_dict() gives, after each change of model and optimizer
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_commit_finds_what_was_replaced(change):
    state = made()
    step(state)
    check(state)  # keeps what it has seen
    change(state)
    check(state)
    check(state)


# spec: L6 the same with optimizers without state, and with other state than tensors
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Rprop, torch.optim.LBFGS])
def test_a_commit_has_the_state_of_any_optimizer(optimizer):
    state = made(optimizer)
    if optimizer is torch.optim.LBFGS:
        state.optimizer.step(lambda: state.model(torch.randn(5, 3)).square().sum())
    else:
        step(state)
    rest, tensors = state._contents()
    expected = copy.deepcopy(state.optimizer.state_dict())
    state._put_back(rest, [each.detach().clone() for each in tensors])
    assert same(state.optimizer.state_dict(), expected)


# spec: L6 a module of TorchScript, whose parameters are no objects of Python, is committed too
def test_a_commit_has_a_scripted_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have torch.compile
        model = torch.jit.script(torch.nn.Linear(2, 2))
    state = elastic.State(model=model)
    rest, tensors = state._contents()
    kept = [each.detach().clone() for each in tensors]
    expected = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.weight.zero_()
        state._put_back(rest, kept)
    assert same(model.state_dict(), expected)


# The memory of what a State was filled over is free before the next commit.
def test_a_filled_optimizer_keeps_no_earlier_state():
    state = made()
    step(state)
    rest, tensors = state._contents()
    kept = [each.detach().clone() for each in tensors]
    del tensors
    earlier = weakref.ref(state.optimizer.state[state.model.first.weight]["exp_avg"])
    state._put_back(rest, kept)
    assert earlier() is None

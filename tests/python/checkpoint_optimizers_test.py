# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers in checkpoints: state of another class, of other parameters or groups is refused,
names do not depend on what else is in the state, and every type comes back.
"""

import os

import pytest
import torch

import muster as dist
from muster import checkpoint


def net(seed=1, width=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 2))


def stepped(model, kind=torch.optim.Adam, **options):
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
    return optimizer


def state_tensors(optimizer):
    return [
        (key, value)
        for state in optimizer.state.values()
        for key, value in state.items()
        if value is not None
    ]


def assert_refused(state, path, match):
    """And nothing of the state has changed."""
    tensors = [each.detach().clone() for each in state["model"].parameters()]
    before = [each.clone() for _, each in state_tensors(state["optimizer"])]
    groups = [dict(each) for each in state["optimizer"].param_groups]
    with pytest.raises(dist.DistError, match=match):
        checkpoint.load(state, checkpoint_id=path)
    for mine, then in zip(state["model"].parameters(), tensors, strict=True):
        assert torch.equal(mine, then)
    now = [each for _, each in state_tensors(state["optimizer"])]
    assert all(torch.equal(*each) for each in zip(now, before, strict=True))
    for mine, then in zip(state["optimizer"].param_groups, groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in then.items() if k != "params"
        }


CLASSES = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


# spec: S10 an optimizer of another class is refused by name, and nothing is changed
def test_other_classes_are_refused(tmp_path):
    for kind, options in CLASSES:
        model = net()
        state = {"model": model, "optimizer": stepped(model, kind, **options)}
        path = tmp_path / kind.__name__
        checkpoint.save(state, checkpoint_id=path)
        for other, more in CLASSES:
            model = net(2)
            state = {"model": model, "optimizer": stepped(model, other, **more)}
            if other is kind:
                checkpoint.load(state, checkpoint_id=path)
            else:
                match = f"'optimizer' is of the class {other.__name__}, and {kind.__name__} was"
                assert_refused(state, path, match)


# spec: S10 other groups and parameters are refused by name
def test_other_groups_and_parameters_are_refused(tmp_path):
    model = net()
    checkpoint.save({"model": model, "optimizer": stepped(model)}, checkpoint_id=tmp_path / "c")
    model = net(2)
    first, second = model[0].parameters(), model[1].parameters()
    two = torch.optim.Adam([{"params": first}, {"params": second}], lr=0.1)
    assert_refused({"model": model, "optimizer": two}, tmp_path / "c", "has 2 parameter groups")
    fewer = torch.optim.Adam(model[0].parameters(), lr=0.1)
    assert_refused({"model": model, "optimizer": fewer}, tmp_path / "c", r"'1\.bias'")
    wide = net(2, width=5)
    state = {"model": wide, "optimizer": stepped(wide)}
    assert_refused(state, tmp_path / "c", r"'0\.\w+'.*sizes.*\[3, 2\].*\[5, 2\]|F32 \[3, 2\]")
    alone = {"optimizer": torch.optim.Adam(wide.parameters(), lr=0.1)}
    checkpoint.save({"optimizer": stepped(net())}, checkpoint_id=tmp_path / "numbers")
    with pytest.raises(dist.DistError, match=r"'0'.*sizes \[3, 2\].*\[5, 2\]"):
        checkpoint.load(alone, checkpoint_id=tmp_path / "numbers")


# spec: S10 names of an optimizer's state do not depend on what else is in the state: another
# module before or behind, at either time
def test_names_do_not_depend_on_other_modules(tmp_path):
    def states():
        model, other = net(3), net(4, width=7)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        yield {"model": model, "optimizer": optimizer}
        yield {"model": model, "other": other, "optimizer": optimizer}
        yield {"a": other, "model": model, "optimizer": optimizer}

    names = set()
    for number in range(3):
        state = list(states())[number]
        model = net()
        state |= {"model": model, "optimizer": stepped(model)}
        path = tmp_path / str(number)
        checkpoint.save(state, checkpoint_id=path)
        index = dist._C._CheckpointIndex.open(str(path), False)
        names.add(tuple(each for each in index.tensors if each.startswith("optimizer")))
        for loaded in states():
            loaded = {key: each for key, each in loaded.items() if key in state}
            checkpoint.load(loaded, checkpoint_id=path)
            mine, saved = loaded["optimizer"].state, state["optimizer"].state
            for here, there in zip(mine.values(), saved.values(), strict=True):
                assert torch.equal(here["exp_avg"], there["exp_avg"])
    assert len(names) == 1
    both = net(), net(width=7)
    parameters = [*both[0].parameters(), *both[1].parameters()]
    state = {"a": both[0], "b": both[1], "optimizer": torch.optim.SGD(parameters, lr=0.1)}
    checkpoint.save(state, checkpoint_id=tmp_path / "both")
    checkpoint.load(state, checkpoint_id=tmp_path / "both")


class Odd(torch.optim.SGD):
    """State of many types."""

    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = odd_state(each)


def odd_state(parameter):
    kinds = [
        *(f"float8_{each}" for each in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
        "complex32",
        "complex64",
        "complex128",
        "bool",
        "uint16",
        "bfloat16",
    ]
    state = {
        each: torch.arange(1, parameter.numel() + 1).view(parameter.shape).to(torch.float32)
        for each in kinds
    }
    state = {key: each.to(getattr(torch, key)) for key, each in state.items()}
    return state | {
        "number": 7,
        "large": 2**62 + 1,
        "scalar": torch.tensor(9),
        "scalar_complex": torch.tensor(1 + 2j, dtype=torch.complex128),
        "none": torch.zeros(0, 3, dtype=torch.complex128),
    }


def assert_same_states(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert type(found[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
            here, there = found[key].contiguous(), value.contiguous()
            if value.dim():
                here, there = here.view(torch.uint8), there.view(torch.uint8)
            assert torch.equal(here, there), key
        else:
            assert found[key] == value


# spec: S10 S1 every type of an optimizer's state comes back in its type and shape, 0-dim numbers as
# what they were; through torch.save's files too
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_types_of_state(tmp_path):
    model = net()
    saved = Odd(model.parameters(), lr=0.1)
    saved.step()
    path = tmp_path / "c"
    checkpoint.save({"model": model, "optimizer": saved}, checkpoint_id=path)
    checkpoint.to_torch_save(path, tmp_path / "c.pt")
    checkpoint.from_torch_save(tmp_path / "c.pt", tmp_path / "again")
    for source in (path, tmp_path / "again"):
        for has_state in (False, True):
            model = net(2)
            loaded = Odd(model.parameters(), lr=0.1)
            if has_state:
                loaded.step()
            checkpoint.load({"model": model, "optimizer": loaded}, checkpoint_id=source)
            for here, there in zip(loaded.state.values(), saved.state.values(), strict=True):
                assert_same_states(here, there)


# spec: S1 tensors of each type come back, also where the state is divided otherwise
def test_types_of_tensors(tmp_path):
    parameter = torch.zeros(3, 2)
    state = {k: v for k, v in odd_state(parameter).items() if isinstance(v, torch.Tensor)}
    checkpoint.save(state, checkpoint_id=tmp_path / "c")
    loaded = {key: torch.zeros_like(each) for key, each in state.items()}
    checkpoint.load(loaded, checkpoint_id=tmp_path / "c")
    assert_same_states(loaded, state)
    row = {
        "complex128": checkpoint.Shard(torch.zeros(1, 2, dtype=torch.complex128), (3, 2), (1, 0))
    }
    checkpoint.load(row, checkpoint_id=tmp_path / "c")
    assert torch.equal(row["complex128"].tensor[0], state["complex128"][1])


# spec: S10 a dictionary that is empty when it is loaded gets what was saved: an optimizer's state
# dictionary that has never stepped gets its moments
def test_empty_dictionaries_are_filled(tmp_path):
    model = net()
    optimizer = stepped(model)
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "more": {"a.b": torch.ones(2), "c": {3: torch.zeros(1), "n": 5}},
    }
    checkpoint.save(saved, checkpoint_id=tmp_path / "c")
    fresh = torch.optim.Adam(net(2).parameters(), lr=0.9)
    loaded = {"model": {}, "optimizer": fresh.state_dict(), "more": {}}
    checkpoint.load(loaded, checkpoint_id=tmp_path / "c")
    for key, value in saved["model"].items():
        assert torch.equal(loaded["model"][key], value)
    assert loaded["more"].keys() == {"a.b", "c"} and loaded["more"]["c"]["n"] == 5
    assert torch.equal(loaded["more"]["c"][3], torch.zeros(1))
    fresh.load_state_dict(loaded["optimizer"])
    for here, there in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert_same_states(here, there)
    assert fresh.param_groups[0]["lr"] == 0.1
    everything = {}
    checkpoint.load(everything, checkpoint_id=tmp_path / "c")
    assert set(everything) == set(saved)


class Lazy:
    """Has its state when it is loaded only."""

    def __init__(self, state=None):
        self.state = state or {}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state


def test_objects_without_state_are_filled(tmp_path):
    checkpoint.save({"x": Lazy({"t": torch.ones(2), "n": 3})}, checkpoint_id=tmp_path / "c")
    state = {"x": Lazy()}
    checkpoint.load(state, checkpoint_id=tmp_path / "c")
    assert state["x"].state["n"] == 3 and torch.equal(state["x"].state["t"], torch.ones(2))


# spec: S10 S4 a load that cannot be done changes nothing: names, sizes, types, values and files are
# compared before anything is filled
def test_a_load_that_fails_changes_nothing(tmp_path):
    saved = {"a": torch.ones(3), "b": torch.ones(3), "z": torch.ones(3), "n": 1}
    checkpoint.save(saved, checkpoint_id=tmp_path / "c")
    for wrong in (
        {"zz": torch.zeros(3)},
        {"z": torch.zeros(4)},
        {"z": torch.zeros(3, dtype=torch.complex64).real.bool()},
        {"zz": 5},
    ):
        state = {"a": torch.zeros(3), "b": torch.zeros(3), "n": 0, **wrong}
        with pytest.raises(dist.DistError):
            checkpoint.load(state, checkpoint_id=tmp_path / "c")
        assert state["a"].sum() == 0 and state["b"].sum() == 0 and state["n"] == 0
    for name in os.listdir(tmp_path / "c"):
        if name.endswith(".safetensors"):
            os.truncate(tmp_path / "c" / name, 100)
    state = {"a": torch.zeros(3), "b": torch.zeros(3), "n": 0}
    with pytest.raises(dist.DistError, match="cut off"):
        checkpoint.load(state, checkpoint_id=tmp_path / "c")
    assert state["a"].sum() == 0 and state["n"] == 0

# SPDX-License-Identifier: BSD-3-Clause
"""`muster.fsdp`: states of models and of their optimizers come and go."""

import pytest
import torch
from sharded_models import WAYS, Block, Net, adam, assert_same, sharded, train, whole
from training import on_ranks

import muster as dist
from muster import checkpoint, fsdp
from muster.fsdp import FSDP
from muster.nn.parallel import DistributedDataParallel


def states(rank, size, folder):
    expected = Net().state_dict()
    model = FSDP(Net(), auto_wrap_policy={Block})
    assert_same(model.state_dict(), expected, 0)
    kind, config = (
        fsdp.StateDictType,
        fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )
    with FSDP.state_dict_type(model, kind.FULL_STATE_DICT, config):
        state = model.state_dict()
        assert_same(state, expected if rank == 0 else {}, 0)
        if rank == 0:
            torch.save(state, f"{folder}/whole.pt")
    dist.barrier()
    with FSDP.state_dict_type(
        model, kind.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(offload_to_cpu=True)
    ):
        part = model.state_dict()
        assert list(part) == list(expected)
        elements = torch.tensor([part[name].numel() for name, _ in model.named_parameters()])
        dist.all_reduce(elements)
        assert elements.tolist() == [each.numel() for _, each in Net().named_parameters()]
    for wrap in WAYS.values():
        other = wrap(Net(seed=5))
        fsdp.set_model_state_dict(
            other,
            torch.load(f"{folder}/whole.pt"),
            options=fsdp.StateDictOptions(full_state_dict=True),
        )
        assert_same(whole(other), expected, 0)
        own = fsdp.get_model_state_dict(other, options=fsdp.StateDictOptions(cpu_offload=True))
        again = wrap(Net(seed=6))
        assert not fsdp.set_model_state_dict(again, own).missing_keys
        assert_same(whole(again), expected, 0)
        on_zero = fsdp.get_model_state_dict(
            other, options=fsdp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        assert_same(on_zero, expected if rank == 0 else {}, 0)
        with FSDP.summon_full_params(other), torch.no_grad():
            other.scale.fill_(3)
        assert whole(other)["scale"].item() == 3
    other = FSDP(Net(seed=5))
    other.load_state_dict(torch.load(f"{folder}/whole.pt"))
    assert_same(other.state_dict(), expected, 0)
    with FSDP.state_dict_type(model, kind.SHARDED_STATE_DICT):
        again = FSDP(Net(seed=7), auto_wrap_policy={Block})
        FSDP.set_state_dict_type(again, kind.SHARDED_STATE_DICT)
        again.load_state_dict(model.state_dict())
        assert_same(whole(again), expected, 0)
    wrong = dict(expected, scale=torch.zeros(2))
    with pytest.raises(RuntimeError, match="size mismatch for.*scale"):
        other.load_state_dict(wrong)
    del wrong["scale"]
    with pytest.raises(RuntimeError, match="scale"):
        other.load_state_dict(wrong)
    assert_same(other.state_dict(), expected, 0)


# spec: M2 state_dict called on every rank gives the full one on rank 0, and a sharded form; loading
# reshards
@pytest.mark.parametrize("size", [1, 3])
def test_states(size, tmp_path):
    on_ranks(size, states, str(tmp_path))


def saves(rank, size, folder):
    model = FSDP(Net(), auto_wrap_policy={Block})
    optimizer = adam(model)
    losses = train(model, optimizer, rank=0)  # the same batches whatever the number of ranks
    state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if rank == 0:
        torch.save(state, f"{folder}/both.pt")
    return losses + train(model, optimizer, rank=0)


def goes_on(rank, size, folder):
    state = torch.load(f"{folder}/both.pt")
    model = sharded(Net(seed=4))
    optimizer = adam(model)
    fsdp.set_model_state_dict(
        model, state["model"], options=fsdp.StateDictOptions(full_state_dict=True)
    )
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    losses = train(model, optimizer, rank=0)
    with pytest.raises(ValueError, match="'nobody'"):
        FSDP.optim_state_dict_to_load(
            model, optimizer, {"state": {}, "param_groups": [{"params": ["nobody"]}]}
        )
    with pytest.raises(ValueError, match="not the model's"):
        FSDP.optim_state_dict(model, adam(Net()))
    return losses


# spec: M2 a job of another size goes on where one has stopped, with its optimizer
def test_goes_on_with_another_number_of_ranks(tmp_path):
    whole_run = on_ranks(2, saves, str(tmp_path))[0]
    # The optimizer's state is what one process has, by name.
    state = torch.load(f"{tmp_path}/both.pt")["optimizer"]
    alone = Net()
    optimizer = adam(alone)
    train(alone, optimizer, rank=0)
    for name, parameter in alone.named_parameters():
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(state["state"][name][key], value, rtol=1e-4, atol=1e-6)
    for size in (1, 3):
        for losses in on_ranks(size, goes_on, str(tmp_path)):
            torch.testing.assert_close(losses, whole_run[4:], rtol=1e-4, atol=1e-5)


def by_the_checkpoint_names(rank, size):
    from muster.checkpoint import state_dict as names

    model = FSDP(Net(), auto_wrap_policy={Block})
    optimizer = adam(model)
    train(model, optimizer, rank=rank)
    options = names.StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = names.get_state_dict(model, optimizer, options=options)
    other = FSDP(Net(seed=5), auto_wrap_policy={Block})
    fresh = adam(other)
    names.set_state_dict(
        other, fresh, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options
    )
    assert_same(names.get_model_state_dict(other, options=options), of_model, 0)
    again = names.get_optimizer_state_dict(other, fresh, options=options)
    for name, values in of_optimizer["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(again["state"][name][key], value, rtol=0, atol=0)
    for name in names.__all__:
        if name.startswith(("get_", "set_", "StateDict")):
            assert getattr(names, name) is getattr(fsdp, name), name


# spec: M2 torch.distributed.checkpoint.state_dict's names: models and optimizers, there and back
def test_states_by_the_names_of_torchs_checkpoints():
    on_ranks(2, by_the_checkpoint_names)


class App:
    """As torch's tutorial of DCP has it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = fsdp.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        fsdp.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def applications(rank, size, path):
    for number, wrap in enumerate((sharded, DistributedDataParallel)):
        model = wrap(Net())
        optimizer = adam(model)
        train(model, optimizer, rank, 2)
        state = fsdp.get_model_state_dict(model)
        assert list(state) == list(Net().state_dict())  # without DDP's "module."
        checkpoint.save({"app": App(model, optimizer)}, checkpoint_id=f"{path}{number}")
        other = wrap(Net(seed=5))
        fresh = adam(other)
        checkpoint.load({"app": App(other, fresh)}, checkpoint_id=f"{path}{number}")
        assert_same(whole(other), whole(model), 0)
        full = fsdp.StateDictOptions(full_state_dict=True)
        mine, theirs = (
            fsdp.get_optimizer_state_dict(*each, options=full)["state"]
            for each in ((other, fresh), (model, optimizer))
        )
        assert list(mine) == list(theirs)
        for name, each in theirs.items():
            assert mine[name]["step"] == each["step"] == 2
            assert torch.equal(mine[name]["exp_avg"], each["exp_avg"])
        # The optimizer has steps of its own: another one's, and the given state's, stay.
        given = fsdp.get_optimizer_state_dict(model, optimizer, options=full)
        fsdp.set_optimizer_state_dict(other, fresh, given, options=full)
        train(other, fresh, rank, 1)
        assert all(each["step"] == 2 for each in given["state"].values())
        assert all(each["step"] == 2 for each in optimizer.state.values())


# spec: M2 K8 objects with state_dict(), as torch's tutorial has them; an optimizer that has never
# stepped loads its moments
def test_stateful_objects(tmp_path):
    on_ranks(2, applications, str(tmp_path / "c"))

# SPDX-License-Identifier: BSD-3-Clause
"""Whole parameters inside a scope, and optimizers' states: whole ones from shards, and back."""

import contextlib

import torch

import muster as dist
from muster.nn.modules_in_use import is_dtensor

from . import units
from .options import FullOptimStateDictConfig


@contextlib.contextmanager
def whole_parameters(of, writeback):
    """While it lasts the parameters of these units are whole, on every rank; those that are so
    already stay. Collective.
    """
    done = []
    try:
        for unit in of:
            if not unit.is_summoned:
                rows = units.divided_by_rows(unit)
                if rows is not None:
                    rows.ready()
                unit.summon()
                if rows is not None:
                    rows.hold()
                done.append(unit)
        yield
    finally:
        for unit in done:
            unit.end_summon(writeback)
            rows = units.divided_by_rows(unit)
            if rows is not None:
                rows.let_go()


def sizes_of(unit, index):
    """Of the whole parameter."""
    of = units.divided_by_rows(unit)
    return unit.sizes_of(index) if of is None else of.sizes_of(index)


def part_of(unit, index, whole):
    """This rank's part of a whole value, in the form that its parameter has."""
    of = units.divided_by_rows(unit)
    return unit.shard_of(index, whole) if of is None else of.part_of(index, whole)


def whole_values(unit, gathered):
    """From what the unit has gathered over its own group, in order."""
    of = units.divided_by_rows(unit)
    if of is None:
        return gathered
    return [of.whole(index, each) for index, each in enumerate(gathered)]


def shard_or_complain(unit, index, value, complaints):
    """This rank's shard of a whole value; where its sizes are others, a sentence of that and what
    is there already.
    """
    wanted = sizes_of(unit, index)
    if list(value.shape) == wanted:
        return part_of(unit, index, value)
    complaints.append(
        f"size mismatch for {unit.names[index]}: the whole parameter has the sizes {wanted}, and "
        f"{list(value.shape)} was given"
    )
    return units.shown_parameters(unit)[index].detach()


def _numbered(optim):
    return [each for of in optim.param_groups for each in of["params"]]


def _names_of(model, optim):
    """By the optimizer's numbers."""
    names = {id(each): units.plain(name) for name, each in model.named_parameters()}
    missing = [number for number, each in enumerate(_numbered(optim)) if id(each) not in names]
    if missing:
        units.refuse(f"the optimizer's parameters {missing} are not the model's")
    return [names[id(each)] for each in _numbered(optim)]


def names_of_groups(model, optim):
    """By the optimizer's groups."""
    names = iter(_names_of(model, optim))
    return [[next(names) for _ in of["params"]] for of in optim.param_groups]


def _is_shard(value, parameter):
    if is_dtensor(parameter):
        return is_dtensor(value) and value.placements == parameter.placements
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() == 1


def _local(value):
    return value.to_local() if is_dtensor(value) else value


def _config_of(model):
    """(Whether its state is this rank's shards, the optimizer's config or None), as
    `FSDP.state_dict_type` has it.
    """
    kind, _, config = getattr(model, "_fsdp_state", (None, None, None))
    return kind is not None and kind.name != "FULL_STATE_DICT", config


def optim_state_dict(model, optim, optim_state_dict=None, group=None):
    """Collective: the optimizer's state by the parameters' names. Whole: what is as long as a
    parameter's shard comes whole; all else is this rank's. `FSDP.state_dict_type` with a
    FullOptimStateDictConfig says whether it comes on the CPU and on rank 0 alone; with the sharded
    and the local type it is this rank's.
    """
    shards, config = _config_of(model)
    return _by_name(model, optim, optim_state_dict, not shards, config)


def _by_name(model, optim, state, whole_ones, config=None):
    of = units.units_in(model)
    offload = config is not None and config.offload_to_cpu
    rank0_only = whole_ones and getattr(config, "rank0_only", False)
    wanted = not (rank0_only and of and not of[0].is_first)
    state = optim.state_dict() if state is None else state
    names = _names_of(model, optim)
    number_of = {id(each): number for number, each in enumerate(_numbered(optim))}
    whole = {name: dict(state["state"].get(number, {})) for number, name in enumerate(names)}
    for unit in of if whole_ones else ():
        parameters = units.shown_parameters(unit)
        numbers = [number_of.get(id(each)) for each in parameters]
        own = [{} if number is None else state["state"].get(number, {}) for number in numbers]
        # Ranks may have no elements of a parameter, but its state all the same: they agree on the
        # keys.
        for key in sorted({key for each in own for key in each}):
            values = [each.get(key) for each in own]
            known = [at for at, value in enumerate(values) if value is not None]
            if not all(_is_shard(values[at], parameters[at]) for at in known):
                continue
            like = _local(values[known[0]])
            filled = [
                like.new_zeros(_local(parameter).shape) if value is None else _local(value)
                for value, parameter in zip(values, parameters)
            ]
            gathered = whole_values(unit, unit.full_of(filled))
            for at in known if wanted else ():
                whole[names[numbers[at]]][key] = gathered[at].to(
                    "cpu" if offload else gathered[at].device, copy=True
                )
    if not wanted:
        return {}
    if not whole_ones and offload:
        for each in whole.values():
            for key, value in each.items():
                if isinstance(value, torch.Tensor):
                    each[key] = value.to("cpu", copy=True)
    at, groups = 0, []
    for each in state["param_groups"]:
        groups.append(dict(each, params=names[at : at + len(each["params"])]))
        at += len(each["params"])
    return {"state": {name: each for name, each in whole.items() if each}, "param_groups": groups}


def optim_state_dict_to_load(
    model, optim, optim_state_dict, is_named_optimizer=False, load_directly=False, group=None
):
    """The way back: this rank's part of what `optim_state_dict` gave, for `optim.load_state_dict`;
    load_directly=True loads it too.
    """
    return _by_number(model, optim, optim_state_dict, not _config_of(model)[0], load_directly)


def _by_number(model, optim, given, whole_ones, load_directly=False):
    names = _names_of(model, optim)
    number_of = {id(each): number for number, each in enumerate(_numbered(optim))}
    state = {
        number: dict(given["state"][name])
        for number, name in enumerate(names)
        if name in given["state"]
    }
    # An optimizer works on the very tensors that it loads, and they may be another's.
    for each in state.values():
        for key, value in each.items():
            if isinstance(value, torch.Tensor) and (not whole_ones or not value.dim()):
                each[key] = value.clone()
    of_parameters = [
        (unit, index, state.get(number_of.get(id(each)), {}))
        for unit in (units.units_in(model) if whole_ones else ())
        for index, each in enumerate(units.shown_parameters(unit))
    ]
    # A number beside a scalar parameter says nothing of itself; what is like its parameter
    # everywhere else is so here.
    not_like = {"step"} | {
        key
        for unit, index, own in of_parameters
        for key, value in own.items()
        if not isinstance(value, torch.Tensor) or list(value.shape) != sizes_of(unit, index)
    }
    for unit, index, own in of_parameters:
        for key in own.keys() - not_like:
            own[key] = part_of(unit, index, own[key])
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [
        name for each in given["param_groups"] for name in each["params"] if name not in numbers
    ]
    if unknown:
        units.refuse(
            f"the optimizer has no {', '.join(map(repr, unknown))}, which is in the state that is "
            "to be loaded"
        )
    groups = [
        dict(each, params=[numbers[name] for name in each["params"]])
        for each in given["param_groups"]
    ]
    result = {"state": state, "param_groups": groups}
    if load_directly:
        optim.load_state_dict(result)
    return result


# ---- torch's former names ----


def full_optim_state_dict(model, optim, optim_input=None, rank0_only=True, group=None):
    """Collective: `optim_state_dict` of the whole type, on the CPU, on rank 0 or on every rank."""
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return _by_name(model, optim, None, True, config)


def sharded_optim_state_dict(model, optim, group=None):
    """`optim_state_dict` of the sharded type."""
    return _by_name(model, optim, None, False)


def _needs(optim, name):
    if optim is None:
        units.refuse(f"{name} takes the optimizer: optim=")


def shard_full_optim_state_dict(full_optim_state_dict, model, optim_input=None, optim=None):
    """This rank's part of a whole state that every rank has, for `optim.load_state_dict`."""
    _needs(optim, "shard_full_optim_state_dict")
    return _by_number(model, optim, full_optim_state_dict, True)


def flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim):
    """Makes a result of `sharded_optim_state_dict` ready for `optim.load_state_dict`."""
    return _by_number(model, optim, sharded_optim_state_dict, False)


def scatter_full_optim_state_dict(
    full_optim_state_dict, model, optim_input=None, optim=None, group=None
):
    """Collective: the same of a whole state that only rank 0 has; others give None."""
    _needs(optim, "scatter_full_optim_state_dict")
    given = [full_optim_state_dict]
    dist.broadcast_object_list(given, group_src=0, group=group)
    return _by_number(model, optim, given[0], True)


def rekey_optim_state_dict(
    optim_state_dict, optim_state_key_type, model, optim_input=None, optim=None
):
    """The state by parameters' numbers in place of names, or the other way."""
    _needs(optim, "rekey_optim_state_dict")
    names = _names_of(model, optim)
    numbers = {name: number for number, name in enumerate(names)}
    table = numbers if optim_state_key_type.name == "PARAM_ID" else dict(enumerate(names))

    def renamed(key):
        return table.get(key, key)

    return {
        "state": {renamed(key): each for key, each in optim_state_dict["state"].items()},
        "param_groups": [
            dict(each, params=[renamed(key) for key in each["params"]])
            for each in optim_state_dict["param_groups"]
        ],
    }

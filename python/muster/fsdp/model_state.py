# SPDX-License-Identifier: BSD-3-Clause
"""States of models that `fully_shard` or FullyShardedDataParallel has sharded, under
torch.distributed.checkpoint.state_dict's names.
"""

import dataclasses

import torch

import muster as dist
from muster.nn.modules_in_use import is_dtensor
from muster.nn.parallel import DistributedDataParallel

from . import flat_optimizer_state as flat
from . import state_dict as states
from . import units
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .options import FullOptimStateDictConfig, StateDictType


@dataclasses.dataclass
class StateDictOptions:
    """For `get_model_state_dict`, `set_model_state_dict` and those of optimizers; torch's class of
    this name is taken too.
    """

    full_state_dict: bool = False  #: whole parameters; else this rank's shards
    cpu_offload: bool = (
        False  #: on the CPU; whole ones on rank 0 alone, the others get an empty dictionary
    )
    ignore_frozen_params: bool = False  #: without parameters that require no gradient
    keep_submodule_prefixes: bool = True  #: deprecated: names are the whole model's
    strict: bool = True  #: names must be the model's
    broadcast_from_rank0: bool = False  #: rank 0 alone gives whole values; with full_state_dict
    flatten_optimizer_state_dict: bool = False  #: one dictionary: "state.NAME.KEY"
    dsd_fqn_modifiers: str = "_fqn_modifiers"  #: no other


def _checked(options):
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        units.refuse("broadcast_from_rank0 goes with full_state_dict=True")
    if options.dsd_fqn_modifiers != "_fqn_modifiers" or not options.keep_submodule_prefixes:
        units.refuse("dsd_fqn_modifiers and keep_submodule_prefixes cannot be changed")
    return options


def _shards(model):
    """While it lasts `model.state_dict()` is that of the shards."""
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def get_model_state_dict(model, *, options=None):
    """The model's state by the names that it has without wrappers; a `StateDictOptions` says what
    of. Whole parameters are copies, and getting them is collective; one unit after the other is
    gathered.
    """
    options, model = _checked(options), _without_ddp(model)
    of = units.units_in(model)
    wanted = not (options.full_state_dict and options.cpu_offload and of and not of[0].is_first)

    def copied(tensor):
        return tensor.detach().to("cpu" if options.cpu_offload else tensor.device, copy=True)

    whole = {}
    for unit in of if options.full_state_dict else ():
        gathered = states.whole_values(unit, unit.full())
        whole |= {(unit, index): copied(each) for index, each in enumerate(gathered) if wanted}
    if not wanted:
        return {}
    with _shards(model):
        state = model.state_dict()
    if options.ignore_frozen_params:
        for name, each in model.named_parameters(remove_duplicate=False):
            if not each.requires_grad:
                state.pop(units.plain(name), None)
    places = units.parameters_by_name(model)
    for name, each in state.items():
        place = places.get(name)
        if place in whole:
            state[name] = whole[place]
        elif isinstance(each, torch.Tensor) and (options.full_state_dict or options.cpu_offload):
            if options.full_state_dict and is_dtensor(each):  # of an ignored parameter
                each = each.full_tensor()
            state[name] = copied(each)
    return state


def set_model_state_dict(model, model_state_dict, *, options=None):
    """The way back: what `get_model_state_dict` gave with the same options. Whole values are given
    on every rank, each takes its shards of them; with broadcast_from_rank0 on rank 0 alone, which
    sends them one after the other. Returns what `load_state_dict` does; raises RuntimeError for
    names and sizes that are not the model's, and leaves the model as it was where a size is not.
    """
    options, model = _checked(options), _without_ddp(model)
    if options.broadcast_from_rank0:
        return _set_from_first(model, model_state_dict, options.strict)
    state = dict(model_state_dict)
    if options.full_state_dict:
        complaints = []
        for name, place in units.parameters_by_name(model).items():
            if place is not None and isinstance(state.get(name), torch.Tensor):
                state[name] = states.shard_or_complain(*place, state[name], complaints)
        if complaints:
            raise RuntimeError("\n".join(complaints))
    with _shards(model):
        return model.load_state_dict(state, strict=options.strict)


def _from_first(value):
    """Rank 0's value, on every rank."""
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _set_from_first(model, given, strict):
    """Every rank learns first what rank 0 has, so that all load it or all raise."""
    with _shards(model):
        own = model.state_dict()
    places = units.parameters_by_name(model)

    def sizes_of(name):
        place = places.get(name)
        return states.sizes_of(*place) if place else list(own[name].shape)

    complaints, others = [], {}
    if dist.get_rank() == 0:
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                others[name] = value
            elif isinstance(own.get(name), torch.Tensor) and list(value.shape) != sizes_of(name):
                complaints.append(
                    f"size mismatch for {name}: the whole value has the sizes {sizes_of(name)} in "
                    f"the model, and rank 0 gave {list(value.shape)}"
                )
    names, others, complaints = _from_first((list(given), others, complaints))
    missing = [name for name in own if name not in names]
    unexpected = [name for name in names if name not in own]
    if strict and (missing or unexpected):
        complaints.append(f"missing in rank 0's state: {missing}, not the model's: {unexpected}")
    if complaints:
        raise RuntimeError("\n".join(complaints))
    state = dict(own)
    for name in names:
        if name in others or name not in own:
            state[name] = others.get(name)
            continue
        like = own[name]
        if dist.get_rank() == 0:
            whole = given[name].detach().to(like.device, like.dtype).contiguous()
        else:
            whole = torch.empty(sizes_of(name), dtype=like.dtype, device=like.device)
        dist.broadcast(whole, src=0)
        place = places.get(name)
        state[name] = states.part_of(*place, whole) if place else whole
    with _shards(model):
        loaded = model.load_state_dict(state, strict=False)
    loaded.missing_keys.extend(missing)
    return loaded


def _without_ddp(model):
    """torch's names have no `module.` of DistributedDataParallel."""
    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel)):
        model = model.module
    return model


def _make_state(optim):
    """The state that a first step makes, so that one that never stepped has memory to load into."""
    parameters = [each for group in optim.param_groups for each in group["params"]]
    if optim.state or any(each.grad is not None for each in parameters):
        return
    rates = [group.get("lr") for group in optim.param_groups]
    try:
        for group in optim.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        for each in parameters:
            if each.requires_grad:
                each.grad = torch.zeros_like(each)
        optim.step()
    finally:
        for group, rate in zip(optim.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
        for each in parameters:
            each.grad = None


def _listed(optimizers):
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def get_optimizer_state_dict(model, optimizers, *, options=None):
    """Collective: the state of an optimizer, or of several, by the parameters' names: {"state":
    ..., "param_groups": [...]}. Whole or this rank's shards, as `get_model_state_dict` has it.
    """
    options, model = _checked(options), _without_ddp(model)
    config = FullOptimStateDictConfig(options.cpu_offload, options.cpu_offload)
    merged = {"state": {}, "param_groups": []}
    for optim in _listed(optimizers):
        _make_state(optim)
        found = states._by_name(model, optim, None, options.full_state_dict, config)
        if found:
            merged["state"].update(found["state"])
            merged["param_groups"] += found["param_groups"]
    if not merged["param_groups"]:
        return {}
    return flat.flattened(merged) if options.flatten_optimizer_state_dict else merged


class _Tensor:
    """Stands for a tensor in what rank 0 sends as one object."""

    def __init__(self, like):
        self.sizes, self.dtype, self.device = list(like.shape), like.dtype, like.device.type


def _all_from_first(tree):
    """Rank 0's dictionary, with the tensors in it, on every rank."""
    tensors = []

    def taken(part):
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return _Tensor(part)
        if isinstance(part, dict):
            return {key: taken(each) for key, each in part.items()}
        return [taken(each) for each in part] if type(part) is list else part

    first = dist.get_rank() == 0
    told = _from_first(taken(tree) if first else None)

    def filled(part):
        if isinstance(part, _Tensor):
            if first:
                tensor = tensors.pop(0).detach().contiguous()
            else:
                tensor = torch.empty(part.sizes, dtype=part.dtype, device=part.device)
            dist.broadcast(tensor, src=0)
            return tensor
        if isinstance(part, dict):
            return {key: filled(each) for key, each in part.items()}
        return [filled(each) for each in part] if type(part) is list else part

    return filled(told)


def set_optimizer_state_dict(model, optimizers, optim_state_dict, *, options=None):
    """The way back: what `get_optimizer_state_dict` gave with the same options, on every rank, or
    on rank 0 alone with broadcast_from_rank0. A flat state is known by itself.
    """
    options, model = _checked(options), _without_ddp(model)
    if options.broadcast_from_rank0:
        optim_state_dict = _all_from_first(optim_state_dict)
    optimizers, at = _listed(optimizers), 0
    if "state" not in optim_state_dict:
        names = [states.names_of_groups(model, optim) for optim in optimizers]
        optim_state_dict = flat.unflattened(optim_state_dict, [each for of in names for each in of])
    for optim in optimizers:
        groups = optim_state_dict["param_groups"][at : at + len(optim.param_groups)]
        at += len(groups)
        names = {name for each in groups for name in each["params"]}
        own = {name: each for name, each in optim_state_dict["state"].items() if name in names}
        given = {"state": own, "param_groups": groups}
        states._by_number(model, optim, given, options.full_state_dict, load_directly=True)


def get_state_dict(model, optimizers, *, options=None):
    """Collective: (`get_model_state_dict`, `get_optimizer_state_dict`)."""
    return (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def set_state_dict(model, optimizers, *, model_state_dict, optim_state_dict, options=None):
    """The way back of both; returns what `set_model_state_dict` does."""
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)

"""States of models that `fully_shard` or FullyShardedDataParallel has sharded, under
torch.distributed.checkpoint.state_dict's names.
"""

import dataclasses

import torch

from . import state_dict as states
from . import units
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .options import FullOptimStateDictConfig, StateDictType


@dataclasses.dataclass
class StateDictOptions:
    """For `get_model_state_dict` and `set_model_state_dict`."""

    full_state_dict: bool = False  #: whole parameters; else this rank's shards
    cpu_offload: bool = (
        False  #: on the CPU; whole ones on rank 0 alone, the others get an empty dictionary
    )
    strict: bool = True  #: names must be the model's


def _shards(model):
    """While it lasts `model.state_dict()` is that of the shards."""
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def get_model_state_dict(model, *, options=None):
    """The model's state by the names that it has without wrappers; a `StateDictOptions` says what
    of. Whole parameters are copies, and getting them is collective; one unit after the other is
    gathered.
    """
    options = options or StateDictOptions()
    of = units.units_in(model)
    wanted = not (options.full_state_dict and options.cpu_offload and of and not of[0].is_first)

    def copied(tensor):
        return tensor.detach().to("cpu" if options.cpu_offload else tensor.device, copy=True)

    whole = {}
    for unit in of if options.full_state_dict else ():
        gathered = unit.full()
        whole |= {(unit, index): copied(each) for index, each in enumerate(gathered) if wanted}
    if not wanted:
        return {}
    with _shards(model):
        state = model.state_dict()
    places = units.parameters_by_name(model)
    for name, each in state.items():
        place = places.get(name)
        if place in whole:
            state[name] = whole[place]
        elif isinstance(each, torch.Tensor) and (options.full_state_dict or options.cpu_offload):
            state[name] = copied(each)
    return state


def set_model_state_dict(model, model_state_dict, *, options=None):
    """The way back: what `get_model_state_dict` gave with the same options. Whole values are given
    on every rank, each takes its shards of them. Returns what `load_state_dict` does; raises
    RuntimeError for names and sizes that are not the model's, and leaves the model as it was where
    a size is not.
    """
    options = options or StateDictOptions()
    if getattr(options, "broadcast_from_rank0", False):
        units.refuse("broadcast_from_rank0 is not there: every rank is given the whole values")
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


def _listed(optimizers):
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def get_optimizer_state_dict(model, optimizers, *, options=None):
    """Collective: the state of an optimizer, or of several, by the parameters' names: {"state":
    ..., "param_groups": [...]}. Whole or this rank's shards, as `get_model_state_dict` has it.
    """
    options = options or StateDictOptions()
    config = FullOptimStateDictConfig(options.cpu_offload, options.cpu_offload)
    merged = {"state": {}, "param_groups": []}
    for optim in _listed(optimizers):
        found = states._by_name(model, optim, None, options.full_state_dict, config)
        if found:
            merged["state"].update(found["state"])
            merged["param_groups"] += found["param_groups"]
    return merged if merged["param_groups"] else {}


def set_optimizer_state_dict(model, optimizers, optim_state_dict, *, options=None):
    """The way back: what `get_optimizer_state_dict` gave with the same options, on every rank."""
    options = options or StateDictOptions()
    at = 0
    for optim in _listed(optimizers):
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

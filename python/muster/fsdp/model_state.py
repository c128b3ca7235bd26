"""States of models that `fully_shard` or FullyShardedDataParallel has sharded, under torch.distributed.checkpoint.state_dict's names."""

import contextlib
import dataclasses

import torch

from . import state_dict as states
from . import units
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .options import StateDictType


@dataclasses.dataclass
class StateDictOptions:
    """For `get_model_state_dict` and `set_model_state_dict`."""

    full_state_dict: bool = False  #: whole parameters; else this rank's shards
    cpu_offload: bool = False  #: on the CPU; whole ones on rank 0 alone, the others get an empty dictionary
    strict: bool = True  #: names must be the model's


@contextlib.contextmanager
def _shown(model, options, writeback):
    """While it lasts `model.state_dict()` is what its parameters hold, and that is the asked for."""
    whole = states.whole_parameters(units.units_in(model), writeback) if options.full_state_dict else contextlib.nullcontext()
    with whole, FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        yield


def get_model_state_dict(model, *, options=None):
    """The model's state by the names that it has without wrappers; a `StateDictOptions` says what of. Whole parameters are copies, and getting
    them is collective."""
    options = options or StateDictOptions()
    of = units.units_in(model)
    if options.full_state_dict and options.cpu_offload and of and of[0].group.rank() != 0:
        with _shown(model, options, writeback=False):
            return {}
    copies = options.full_state_dict or options.cpu_offload
    with _shown(model, options, writeback=False):
        state = model.state_dict()
        for name, each in state.items():
            if copies and isinstance(each, torch.Tensor):
                state[name] = each.to("cpu" if options.cpu_offload else each.device, copy=True)
    return state


def set_model_state_dict(model, model_state_dict, *, options=None):
    """The way back: what `get_model_state_dict` gave with the same options. Whole values are given on every rank, each takes its shards of them:
    collective. Returns what `load_state_dict` does."""
    options = options or StateDictOptions()
    with _shown(model, options, writeback=True):
        return model.load_state_dict(model_state_dict, strict=options.strict)

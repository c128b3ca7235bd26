# SPDX-License-Identifier: BSD-3-Clause
"""A nested state as flat names: tensors for the C++ half, all else as JSON; and what was read, back
into its place.

Names are the keys on the way, joined by dots: {"model": {"w": t}} has "model.w". A module's are its
parameters' own, without what wrappers put before them; an optimizer's `state.<parameter>.<key>`, as
torch's state dicts have them.
"""

import json
import sys

import torch

from muster import _C

from . import containers
from .optimizers import OptimizerContents
from .ranks import RandomState
from .shard import Shard, is_tensor, item, refuse
from .values import decode, encode

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def _plain(name):
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _unwrapped(module):
    """Without DistributedDataParallel, ours or stock torch's."""
    while type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
        module = module.module
    return module


def _is_stateful(value):
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _is_sampler(value):
    return callable(getattr(value, "set_epoch", None)) and hasattr(value, "epoch")


def _holds_tensors(value):
    if isinstance(value, dict):
        return any(_holds_tensors(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(each) for each in value)
    return is_tensor(value) or isinstance(value, torch.nn.Module) or _is_stateful(value)


def _module_tensors(module):
    """(name, tensor) of what a module's state_dict has, shared ones by each name."""
    for name, each in module.named_parameters(remove_duplicate=False):
        yield _plain(name), each
    for path, part in module.named_modules(remove_duplicate=False):
        for name, each in part._buffers.items():
            if each is not None and name not in part._non_persistent_buffers_set:
                yield _plain(f"{path}.{name}" if path else name), each


def _with_extra_state(module):
    for path, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield _plain(f"{path}._extra_state" if path else "_extra_state"), part


def _units():
    """Those of `muster.fsdp` in this process."""
    module = sys.modules.get("muster.fsdp.units")
    return list(module.alive) if module else []


def _is_shard(parameter):
    try:
        return _C._sharded_part(parameter) is not None
    except _C.DistError:  # whole now
        return False


def _refuse_shard(name, value):
    """The `state_dict()` of a sharded module shares its memory and looks like a whole tensor."""
    if type(value) is not torch.Tensor or not value.numel() or _C._sharded_part(value) is not None:
        return
    memory = value.untyped_storage().data_ptr()
    for unit in _units():
        for each in unit.parameters():
            if memory and each.untyped_storage().data_ptr() == memory and _is_shard(each):
                refuse(
                    f"'{name}' is this rank's shard of a parameter of a sharded module: give the "
                    "module itself, not its state_dict()"
                )


def _refuse_state_of_shards(name, value):
    """Refuses an optimizer's `state_dict()` of shards: it is by number, and has no tensor of more
    than one dimension.
    """
    if (
        set(value) != {"state", "param_groups"}
        or not isinstance(value["state"], dict)
        or not _units()
    ):
        return
    of = [each for key, each in value["state"].items() if type(key) is int]
    tensors = [
        each
        for state in of
        if isinstance(state, dict)
        for each in state.values()
        if isinstance(each, torch.Tensor) and each.dim()
    ]
    if tensors and all(type(each) is torch.Tensor and each.dim() == 1 for each in tensors):
        refuse(
            f"'{name}' is what an optimizer of sharded parameters has on this rank: give the "
            "optimizer itself, not its state_dict()"
        )


class Contents:
    """The contents of a state dictionary, from one walk: for saving `items()` and `values()`; for
    loading `wanted(index)`, which changes nothing and raises where the checkpoint does not fit,
    then `fill()`.
    """

    def __init__(self, state_dict, rank):
        self._rank = rank
        self._modules = {}
        self._find_modules("", state_dict)
        self._names = {
            key: {id(each): _plain(name) for name, each in module.named_parameters()}
            for key, module in self._modules.items()
        }
        self._taken = set()  # names
        self._tensors = []  # (name, tensor or Shard)
        self._values = {}
        self._optimizers = []
        self._random = {}
        self._fill = []  # (name of the value or None, call with the decoded values)
        self._empty = []  # (name, dictionary)
        self._containers = containers.Saved()
        self._containers.note("", state_dict)
        if not state_dict:
            self._empty.append(("", state_dict))
        for key, each in state_dict.items():
            self._walk(str(key), each, state_dict, key)

    def _find_modules(self, key, value):
        if isinstance(value, torch.nn.Module):
            self._modules[key] = _unwrapped(value)
        elif isinstance(value, dict):
            for inner, each in value.items():
                self._find_modules(f"{key}.{inner}" if key else str(inner), each)
        elif isinstance(value, (list, tuple)):
            for inner, each in enumerate(value):
                self._find_modules(f"{key}.{inner}", each)

    def _walk(self, name, value, holder, key):
        if is_tensor(value):
            _refuse_shard(name, value)
            self._tensor(name, value)
        elif isinstance(value, torch.nn.Module):
            self._module(name, _unwrapped(value))
        elif isinstance(value, torch.optim.Optimizer):
            self._claim(f"{name}.param_groups")
            self._claim(f"{name}.identity")
            self._optimizers.append(OptimizerContents(name, value, self._names))
        elif isinstance(value, RandomState):
            self._random[name] = value
        elif isinstance(value, dict) and not isinstance(value, Shard):
            _refuse_state_of_shards(name, value)
            self._dictionary(name, value)
        elif isinstance(value, (list, tuple)) and _holds_tensors(value):
            if not all(map(_holds_tensors, value)) and isinstance(value, tuple):
                refuse(
                    f"'{name}' is a tuple of tensors and others, which cannot be loaded in place: "
                    "make it a list"
                )
            self._containers.note(name, value)
            for inner, each in enumerate(value):
                self._walk(f"{name}.{inner}", each, value, inner)
        elif _is_stateful(value):
            self._stateful(name, value)
        elif _is_sampler(value):
            self._value(f"{name}.epoch", value.epoch, value.set_epoch)
        else:
            self._value(name, value, lambda read: holder.__setitem__(key, read))

    def _dictionary(self, name, value):
        self._containers.note(name, value)
        if not value:
            self._empty.append((name, value))
        for inner, each in value.items():
            self._walk(f"{name}.{inner}", each, value, inner)

    def _claim(self, name):
        if name in self._taken:
            refuse(
                f"'{name}' is there twice: the keys on the way to a value are joined by dots, and "
                "those of two values come to the same"
            )
        self._taken.add(name)

    def _tensor(self, name, value):
        self._claim(name)
        self._tensors.append((name, value))

    def _value(self, name, value, put):
        self._claim(name)
        self._values[name] = value
        self._fill.append((name, lambda values: put(values[name])))

    def _module(self, name, module):
        for path, each in _module_tensors(module):
            if path.rpartition(".")[2] == "_flat_param":
                refuse(
                    f"'{name}.{path}' is a flat parameter of torch's FullyShardedDataParallel, in "
                    "which the names and sizes of the module's "
                    "own are not told apart: shard the module by muster.fsdp, or by torch's "
                    "fully_shard, whose parameters are DTensors"
                )
            self._tensor(f"{name}.{path}", each)
        for path, part in _with_extra_state(module):
            self._value(f"{name}.{path}", part.get_extra_state(), part.set_extra_state)

    def _stateful(self, name, value):
        state = value.state_dict()
        _refuse_state_of_shards(name, state)
        self._dictionary(name, state)
        self._fill.append((None, lambda _: value.load_state_dict(state)))

    def items(self):
        all_items = [item(name, each) for name, each in self._tensors]
        for key, each in self._random.items():
            all_items += [item(*pair) for pair in each.tensors(key, self._rank).items()]
        for each in self._optimizers:
            all_items += each.items()
        return [each for each in all_items if each is not None]

    def values(self):
        values = dict(self._values)
        for each in self._optimizers:
            values |= each.values()
        encoded = {name: encode(value, name) for name, value in values.items()}
        return encoded | {containers.NAME: self._containers.all}

    def wanted(self, index, *, with_values=True):
        """`with_values` False: a checkpoint of others, which has none; what is no tensor stays."""
        encoded = json.loads(index.values)
        self._read_values = None
        if with_values:
            for name, _ in self._fill:
                if name is not None and name not in encoded:
                    refuse(f"there is no value '{name}' in it")
            self._read_values = {
                name: decode(each) for name, each in encoded.items() if name != containers.NAME
            }
        items = [item(name, each) for name, each in self._tensors]
        self._read_random = {}
        for key, each in self._random.items():
            for name, now in each.tensors(key, self._rank).items():
                if name in index.tensors:
                    self._read_random[name] = now.new_empty(index.tensors[name][1])
                    items.append(item(name, self._read_random[name]))
        for each in self._optimizers:
            items += each.make(index)
        self._restored = containers.Restored(index, encoded if with_values else {})
        self._restored_into = [
            (holder, self._restored.of(name) or {}) for name, holder in self._empty
        ]
        items += [item(name, each) for name, each in self._restored.tensors.items()]
        return [each for each in items if each is not None]

    def fill(self):
        """After the tensors of `wanted` have been read."""
        self._restored.finish()
        for holder, made in self._restored_into:
            holder.update(made)
        for key, each in self._random.items():
            each.set(key, self._rank, self._read_random)
        for each in self._optimizers:
            each.fill(self._read_values)
        if self._read_values is not None:
            for _, each in self._fill:
                each(self._read_values)

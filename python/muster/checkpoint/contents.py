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

from .ranks import RandomState
from .shard import DTYPES, Shard, beside, is_tensor, item, refuse, whole_size
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


class _Optimizer:
    """An optimizer's state by its parameters' names; of a ZeroRedundancyOptimizer, this rank's
    part.
    """

    def __init__(self, key, optimizer, names):
        self.key, self.whole = key, optimizer
        self.part = optimizer
        while type(self.part).__name__ == "ZeroRedundancyOptimizer":
            self.part = self.part.optim
        if isinstance(self.part, torch.optim.LBFGS):
            refuse(
                f"'{key}': LBFGS looks at all parameters together, and its state is no state of "
                "each"
            )
        everything = [each for group in optimizer.param_groups for each in group["params"]]
        if not names:  # no module is in the state: by their numbers
            names = {id(each): str(number) for number, each in enumerate(everything)}
        missing = [number for number, each in enumerate(everything) if id(each) not in names]
        if missing:
            refuse(
                f"'{key}' has parameters (numbers {missing[:5]}) that no module of the state has; "
                "put their module in"
            )
        self.names = names

    def _name(self, parameter, key):
        return f"{self.key}.state.{self.names[id(parameter)]}.{key}"

    def _owned(self):
        return [each for group in self.part.param_groups for each in group["params"]]

    def items(self):
        for parameter in self._owned():
            for key, value in self.part.state.get(parameter, {}).items():
                name = self._name(parameter, key)
                if type(value) is int:
                    value = torch.tensor(value, dtype=torch.int64)
                if value is None:
                    continue
                if not isinstance(value, torch.Tensor):
                    refuse(
                        f"'{name}' is a {type(value).__name__}: tensors and whole numbers are "
                        "saved of a parameter"
                    )
                yield beside(name, value, parameter)

    def values(self):
        def plain(value):
            return value.item() if isinstance(value, torch.Tensor) else value

        groups = []
        for group in self.whole.param_groups:
            kept = {key: plain(value) for key, value in group.items() if key != "params"}
            groups.append(dict(kept, params=[self.names[id(each)] for each in group["params"]]))
        return {f"{self.key}.param_groups": groups}

    def make(self, index):
        """State for what the checkpoint has, where it is to be filled."""
        prefix, stored = f"{self.key}.state.", {}
        for name, about in index.tensors.items():
            if name.startswith(prefix):
                parameter, _, key = name[len(prefix) :].rpartition(".")
                stored.setdefault(parameter, {})[key] = about
        self._compare(json.loads(index.values).get(f"{self.key}.param_groups"))
        self.made = {}
        for parameter in self._owned():
            of = stored.get(self.names[id(parameter)], {})
            self.made[parameter] = {
                key: self._memory(parameter, key, *about) for key, about in of.items()
            }
            for key, tensor in self.made[parameter].items():
                yield beside(self._name(parameter, key), tensor, parameter)

    def _compare(self, saved):
        """Refuses other parameters than were saved: their state would be left out unsaid. None:
        safetensors files of others.
        """
        if saved is None:
            return
        mine = self.values()[f"{self.key}.param_groups"]
        if len(mine) != len(saved):
            refuse(f"'{self.key}' has {len(mine)} parameter groups, and {len(saved)} were saved")
        for number, (here, there) in enumerate(zip(mine, saved, strict=True)):
            here, there = set(here["params"]), set(map(str, there.get("params", here["params"])))
            if here == there:
                continue
            why = ""
            if all(map(str.isdigit, here)) != all(map(str.isdigit, there)):
                why = (
                    ": parameters go by number where no module is in the state; "
                    "give the optimizer with its module at both times, or at neither"
                )
            refuse(
                f"'{self.key}': group {number} was saved with the parameters {_some(there - here)} "
                "that it has not here, and has "
                f"{_some(here - there)} that were not saved in it{why}"
            )

    @staticmethod
    def _memory(parameter, key, dtype, size):
        dtype = DTYPES.get(dtype) or refuse(f"an optimizer's '{key}' of type {dtype} is not loaded")
        if list(size) == whole_size(parameter) and key != "step":
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return torch.empty(size, dtype=dtype, device="cpu" if not size else parameter.device)

    def fill(self, values):
        """After the tensors have been read. `values` None: the groups stay."""
        for parameter, made in self.made.items():
            if not made:
                self.part.state.pop(parameter, None)
                continue
            self.part.state[parameter] = {
                key: int(value) if value.dtype == torch.int64 and value.dim() == 0 else value
                for key, value in made.items()
            }
        if values is None:
            return
        groups = _named(values, f"{self.key}.param_groups")
        for number, saved in enumerate(groups):
            kept = {key: value for key, value in saved.items() if key != "params"}
            for group in {
                id(each): each
                for each in (self.whole.param_groups[number], self.part.param_groups[number])
            }.values():
                for key, value in kept.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = value


def _some(names):
    return str(sorted(names)[:5]) + (" and more" if len(names) > 5 else "")


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
    """What `state_dict()` of an optimizer has of shards: by number, and none of more than one
    dimension.
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
    """What a state dictionary holds, in one walk: for saving `items()` and `values()`; for loading
    `wanted(index)`, then `fill(values)`.
    """

    def __init__(self, state_dict, rank):
        self._rank = rank
        self._modules = {}
        self._find_modules("", state_dict)
        several = len(self._modules) > 1
        self._names = {
            id(each): f"{key}.{_plain(name)}" if several else _plain(name)
            for key, module in self._modules.items()
            for name, each in module.named_parameters()
        }
        self._taken = set()  # names
        self._tensors = []  # (name, tensor or Shard)
        self._values = {}
        self._optimizers = []
        self._random = {}
        self._fill = []  # calls with the decoded values
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
            self._optimizers.append(_Optimizer(name, value, self._names))
        elif isinstance(value, RandomState):
            self._random[name] = value
        elif isinstance(value, dict) and not isinstance(value, Shard):
            _refuse_state_of_shards(name, value)
            for inner, each in value.items():
                self._walk(f"{name}.{inner}", each, value, inner)
        elif isinstance(value, (list, tuple)) and _holds_tensors(value):
            if not all(map(_holds_tensors, value)) and isinstance(value, tuple):
                refuse(
                    f"'{name}' is a tuple of tensors and others, which cannot be loaded in place: "
                    "make it a list"
                )
            for inner, each in enumerate(value):
                self._walk(f"{name}.{inner}", each, value, inner)
        elif _is_stateful(value):
            self._stateful(name, value)
        elif _is_sampler(value):
            self._value(f"{name}.epoch", value.epoch, value.set_epoch)
        else:
            self._value(name, value, lambda read: holder.__setitem__(key, read))

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
        self._fill.append(lambda values: put(_named(values, name)))

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
        for key, each in state.items():
            self._walk(f"{name}.{key}", each, state, key)
        self._fill.append(lambda _: value.load_state_dict(state))

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
        return {name: encode(value, name) for name, value in values.items()}

    def wanted(self, index):
        items = [item(name, each) for name, each in self._tensors]
        self._read_random = {}
        for key, each in self._random.items():
            for name, now in each.tensors(key, self._rank).items():
                if name in index.tensors:
                    self._read_random[name] = now.new_empty(index.tensors[name][1])
                    items.append(item(name, self._read_random[name]))
        for each in self._optimizers:
            items += each.make(index)
        return [each for each in items if each is not None]

    def fill(self, values):
        """`values` None: a checkpoint of others, which has none; what is no tensor stays."""
        values = values if values is None else {key: decode(each) for key, each in values.items()}
        for key, each in self._random.items():
            each.set(key, self._rank, self._read_random)
        for each in self._optimizers:
            each.fill(values)
        if values is not None:
            for each in self._fill:
                each(values)


def _named(values, name):
    if name not in values:
        raise _C.DistArgumentError(f"checkpoint: there is no value '{name}' in it")
    return values[name]

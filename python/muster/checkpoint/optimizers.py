# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer in a checkpoint: its state by its parameters' names, and what it was when it was
saved, so that no other one takes it.
"""

import json

import torch

from .shard import DTYPES, NUMBER, beside, refuse, whole_size

#: Options by which the classes of torch differ, for checkpoints that have no class.
_TELLING = {"betas", "momentum", "dampening", "alpha", "centered", "lr_decay", "rho", "etas"}
#: State that has its parameter's sizes in each class of torch.
_LIKE_PARAMETER = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "sum",
    "grad_avg",
}


def _inner(optimizer):
    """Without what wraps it."""
    while True:
        for name in ("optim", "optimizer"):
            inner = getattr(optimizer, name, None)
            if isinstance(inner, torch.optim.Optimizer):
                break
        else:
            return optimizer
        optimizer = inner


def _some(names):
    return str(sorted(names)[:5]) + (" and more" if len(names) > 5 else "")


def _plain(value):
    return value.item() if isinstance(value, torch.Tensor) else value


class OptimizerContents:
    """An optimizer's state by its parameters' names; of a ZeroRedundancyOptimizer, this rank's
    part.

    `modules`: by key, each as a dictionary of names by the identity of its parameters. The names
    are those that the parameters have in the one module that has all of them, so that they do not
    depend on what else is in the state.
    """

    def __init__(self, key, optimizer, modules):
        self.key, self.whole = key, optimizer
        self.part = optimizer
        while type(self.part).__name__ == "ZeroRedundancyOptimizer":
            self.part = self.part.optim
        if isinstance(self.part, torch.optim.LBFGS):
            refuse(
                f"'{key}': LBFGS looks at all parameters together, and its state is no state of "
                "each"
            )
        self.kind = type(_inner(self.part)).__name__
        self._choices = self._choices_of(modules)
        self.names = self._choices[0]

    def _choices_of(self, modules):
        """The ways to name the parameters, the one of what is saved first."""
        everything = [each for group in self.whole.param_groups for each in group["params"]]
        if not modules:  # no module is in the state: by their numbers
            return [{id(each): str(number) for number, each in enumerate(everything)}]
        wanted = set(map(id, everything))
        whole = [names for names in modules.values() if wanted <= set(names)]
        whole.sort(key=len)  # the smallest has the least besides
        prefixed = {}
        for key, names in modules.items():
            for each, name in names.items():
                prefixed.setdefault(each, f"{key}.{name}")
        missing = [number for number, each in enumerate(everything) if id(each) not in prefixed]
        if missing:
            refuse(
                f"'{self.key}' has parameters (numbers {missing[:5]}) that no module of the state "
                "has; put their module in"
            )
        return [*whole, prefixed]

    def _name(self, parameter, key):
        return f"{self.key}.state.{self.names[id(parameter)]}.{key}"

    def _owned(self):
        return [each for group in self.part.param_groups for each in group["params"]]

    def items(self):
        for parameter in self._owned():
            for key, value in self.part.state.get(parameter, {}).items():
                name = self._name(parameter, key)
                if type(value) is int:
                    if not -(2**63) <= value < 2**63:
                        refuse(f"'{name}' is {value}, which 64 bits do not hold")
                    yield (name, torch.tensor(value, dtype=torch.int64), [], NUMBER)
                    continue
                if value is None:
                    continue
                if not isinstance(value, torch.Tensor):
                    refuse(
                        f"'{name}' is a {type(value).__name__}: tensors and whole numbers are "
                        "saved of a parameter"
                    )
                yield beside(name, value, parameter)

    def _groups(self, names):
        for group in self.whole.param_groups:
            kept = {key: _plain(value) for key, value in group.items() if key != "params"}
            yield dict(kept, params=[names[id(each)] for each in group["params"]])

    def values(self):
        shapes = {
            self.names[id(each)]: list(whole_size(each))
            for group in self.whole.param_groups
            for each in group["params"]
        }
        return {
            f"{self.key}.param_groups": list(self._groups(self.names)),
            f"{self.key}.identity": {"class": self.kind, "shapes": shapes},
        }

    def make(self, index):
        """Memory for the state that the checkpoint has, after it has been compared."""
        values = json.loads(index.values)
        self._compare(values.get(f"{self.key}.param_groups"), values.get(f"{self.key}.identity"))
        prefix, stored = f"{self.key}.state.", {}
        for name, about in index.tensors.items():
            if name.startswith(prefix):
                parameter, _, key = name[len(prefix) :].rpartition(".")
                stored.setdefault(parameter, {})[key] = about
        self._numbers_are_marked = index.number > 0
        self.made, self._kinds = {}, {}
        for parameter in self._owned():
            of = stored.get(self.names[id(parameter)], {})
            self._kinds[parameter] = {key: dtype for key, (dtype, _) in of.items()}
            self.made[parameter] = {
                key: self._memory(parameter, key, *about) for key, about in of.items()
            }
            for key, tensor in self.made[parameter].items():
                yield beside(self._name(parameter, key), tensor, parameter)

    def _compare(self, groups, identity):
        """Refuses another optimizer than was saved: its state would be left out unsaid, or taken
        for something else. `groups` None: safetensors files of others.
        """
        if groups is None:
            return
        mine = list(self._groups(self.names))
        if len(mine) != len(groups):
            refuse(f"'{self.key}' has {len(mine)} parameter groups, and {len(groups)} were saved")
        self._compare_class(mine, groups, identity)
        saved = [set(map(str, each.get("params", ()))) for each in groups]
        for names in self._choices:
            if [set(each["params"]) for each in self._groups(names)] == saved:
                self.names = names
                break
        else:
            self._refuse_names([set(each["params"]) for each in mine], saved)
        shapes = identity["shapes"] if identity else {}
        for group in self.whole.param_groups:
            for each in group["params"]:
                name = self.names[id(each)]
                if name in shapes and list(shapes[name]) != list(whole_size(each)):
                    refuse(
                        f"'{self.key}': the parameter '{name}' was saved with the sizes "
                        f"{list(shapes[name])} and has {list(whole_size(each))} here"
                    )

    def _compare_class(self, mine, groups, identity):
        if identity:
            if identity["class"] != self.kind:
                refuse(
                    f"'{self.key}' is of the class {self.kind}, and {identity['class']} was saved, "
                    "whose state is another one: load it with that class, or leave the optimizer "
                    "out of the state"
                )
            return
        for here, there in zip(mine, groups, strict=True):
            if _TELLING & set(here) != _TELLING & set(there):
                refuse(
                    f"'{self.key}' is of the class {self.kind}, and an optimizer with the options "
                    f"{_some(set(there) - {'params'})} was saved, which is of another class"
                )

    def _refuse_names(self, mine, saved):
        for number, (here, there) in enumerate(zip(mine, saved, strict=True)):
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

    def _memory(self, parameter, key, dtype, size):
        whole = list(whole_size(parameter))
        kind = DTYPES.get(dtype)
        if kind is None:
            refuse(f"an optimizer's '{key}' of type {dtype} is not loaded")
        if dtype == "U8" and list(size) == [*whole, parameter.element_size()]:
            kind, size = parameter.dtype, whole  # how the first versions have complex128 and others
        if key in _LIKE_PARAMETER and list(size) != whole:
            refuse(
                f"'{self._name(parameter, key)}' was saved with the sizes {list(size)}, and the "
                f"parameter has {whole} here"
            )
        if list(size) == whole and key != "step":
            return torch.empty_like(parameter.detach(), dtype=kind)
        return torch.empty(size, dtype=kind, device="cpu" if not size else parameter.device)

    def _is_number(self, parameter, key, value):
        if self._numbers_are_marked:
            return self._kinds[parameter][key] == "INT"
        now = self.part.state.get(parameter, {}).get(key)  # the first versions do not say
        return value.dtype == torch.int64 and value.dim() == 0 and not torch.is_tensor(now)

    def fill(self, values):
        """After the tensors have been read. `values` None: the groups stay."""
        for parameter, made in self.made.items():
            if not made:
                self.part.state.pop(parameter, None)
                continue
            self.part.state[parameter] = {
                key: int(value) if self._is_number(parameter, key, value) else value
                for key, value in made.items()
            }
        if values is None:
            return
        groups = values[f"{self.key}.param_groups"]
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

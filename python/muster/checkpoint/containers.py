# SPDX-License-Identifier: BSD-3-Clause
"""Which dictionaries and lists a state is made of, so that one that is empty when it is loaded gets
what was saved of it: an optimizer's state_dict() that has never stepped.
"""

import re

import torch

from .shard import DTYPES
from .values import decode, encode

#: The value that has them.
NAME = "__muster__.containers"


class Saved:
    """Notes the containers of a state: {name: ["dict", keys] or ["list", length]}"""

    def __init__(self):
        self.all = {}

    def note(self, name, value):
        if isinstance(value, dict):
            keys = list(value)
            if all(isinstance(each, (str, int, float, bool, type(None), tuple)) for each in keys):
                self.all[name] = ["dict", encode(keys, name)]
        else:
            self.all[name] = ["tuple" if isinstance(value, tuple) else "list", len(value)]


class Restored:
    """The part of a checkpoint below a name, as nested containers: `tensors` by name are to be
    filled, `finish` puts the values in.
    """

    def __init__(self, index, values):
        self._index = index
        self._values = values
        self._containers = values.get(NAME, {})
        self.tensors = {}
        self._numbers = []  # (container, key, tensor)

    def of(self, name):
        """None where there is nothing."""
        known = self._containers.get(name)
        if known is None:
            return self._by_names(name)
        kind, inner = known
        if kind == "dict":
            made = {}
            for key in decode(inner):
                self._put(made, key, f"{name}.{key}" if name else str(key))
            return made
        made = [None] * inner
        for key in range(inner):
            self._put(made, key, f"{name}.{key}")
        return tuple(made) if kind == "tuple" else made

    def _put(self, holder, key, name):
        if name in self._index.tensors:
            dtype, size = self._index.tensors[name]
            tensor = self.tensors[name] = torch.empty(size, dtype=DTYPES[dtype])
            holder[key] = tensor
            if dtype == "INT":
                self._numbers.append((holder, key, tensor))
        elif name in self._values and name != NAME:
            holder[key] = decode(self._values[name])
        else:
            found = self.of(name)
            if found is not None:
                holder[key] = found

    def _by_names(self, name):
        """For a module, and in checkpoints that do not say: the rest of the names are the keys;
        names like those of an optimizer's state by numbers make such a state.
        """
        prefix = f"{name}." if name else ""
        names = [*self._index.tensors, *(each for each in self._values if each != NAME)]
        names = [each[len(prefix) :] for each in names if each.startswith(prefix)]
        if not names:
            return None
        made = {}
        if all(re.fullmatch(r"\d+\.[^.]+", each) for each in names):
            for each in names:
                number, key = each.split(".")
                self._put(made.setdefault(int(number), {}), key, prefix + each)
        else:
            for each in names:
                self._put(made, each, prefix + each)
        return made

    def finish(self):
        for holder, key, tensor in self._numbers:
            if isinstance(holder, (dict, list)):
                holder[key] = int(tensor)

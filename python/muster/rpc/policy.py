# SPDX-License-Identifier: BSD-3-Clause
"""The names that calls and answers of other workers may use on this one.

A pickle names classes and functions, and unpickling calls them: a worker that may send one can run
code here. `init_rpc(functions=[...])` limits that: a call is still a pickle, but it can name only
those functions and classes, and harmless values.
"""

import collections
import io
import pickle
import threading

import torch

from .. import _C
from ..objects import pickles_are_refused

# Values that arguments and results are made of besides tensors, numbers, text, lists, tuples, dicts
# and None.
_HARMLESS = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        dict,
        set,
        frozenset,
        slice,
        range,
        collections.OrderedDict,
        torch.Size,
        torch.device,
    )
}
_HARMLESS.update(
    {
        ("torch", str(kind).removeprefix("torch.")): kind
        for kind in vars(torch).values()
        if isinstance(kind, torch.dtype)
    }
)
_CONTAINERS = (list, dict, set, collections.OrderedDict)
# Owners of torch's own functions and methods, which are pickled as getattr(owner, name).
_OWNERS = {
    (owner.__module__, owner.__qualname__): owner
    for owner in (torch._C._VariableFunctionsClass, torch._C.TensorBase)
}


class Policy:
    """Names that may be used, by (module, qualified name). Immutable, and compared by what it
    allows.
    """

    def __init__(self, functions):
        self.named, self.members = {}, []
        for each in functions:
            if not callable(each):
                raise _C.DistArgumentError(
                    f"init_rpc: functions has {each!r}, which is neither a function nor a class"
                )
            name = getattr(each, "__qualname__", None)
            if any(
                getattr(owner, getattr(each, "__name__", ""), None) == each
                for owner in _OWNERS.values()
            ):
                self.members.append(each)
                continue
            if name is None or "<" in name or getattr(each, "__module__", None) is None:
                raise _C.DistArgumentError(
                    f"init_rpc: functions has {each!r}, which other workers cannot name: give "
                    "functions and classes of a module"
                )
            self.named[(each.__module__, name)] = each

    def __eq__(self, other):
        return isinstance(other, Policy) and (self.named, self.members) == (
            other.named,
            other.members,
        )

    def may_call(self, function):
        """Functions and classes that are listed, and torch's operators, which were looked at when
        they were read.
        """
        return (
            any(function is each for each in self.named.values())
            or function in self.members
            or isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        )

    def may_call_method(self, value, name):
        """Public methods that a listed class defines itself, and inherited ones that are listed:
        those of large base classes, such as torch.nn.Module.compile, can be made to run anything.
        """
        if (
            type(value) not in self.named.values()
            or not isinstance(name, str)
            or name.startswith("_")
        ):
            return False
        return name in vars(type(value)) or any(
            getattr(type(value), name, None) is each for each in self.named.values()
        )


class BoundedUnpickler(pickle._Unpickler):
    """Reads pickles that name a policy's functions and classes, harmless values, `makers` and
    `readable`, and nothing else.

    makers: functions by (module, name) that the pickle may call while it is read. readable:
    functions that it may name only, as it may name the policy's. The interpreter's own unpickler
    would let any object that was read be called or changed."""

    def __init__(self, data, policy, makers, readable):
        super().__init__(io.BytesIO(data))
        self._policy, self._makers, self._readable = policy, makers, readable

    def find_class(self, module, name):
        for known in (self._makers, self._readable, self._policy.named, _HARMLESS, _OWNERS):
            if (module, name) in known:
                return known[(module, name)]
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise pickle.UnpicklingError(
            f"{module}.{name} is not among what other workers may name here: give it to "
            "init_rpc(functions=[...]) on this worker"
        )

    def _member(self, owner, name):
        found = (
            getattr(owner, name) if owner in _OWNERS.values() and isinstance(name, str) else None
        )
        if found is None or found not in self._policy.members:
            raise pickle.UnpicklingError(
                f"{getattr(owner, '__qualname__', owner)}.{name} is not among what other workers "
                "may name here: give it to "
                "init_rpc(functions=[...]) on this worker"
            )
        return found

    def _may_be_made_by(self, maker):
        return (
            maker == self._member
            or any(maker is each for each in self._makers.values())
            or any(maker is each for each in _HARMLESS.values() if isinstance(each, type))
            or isinstance(maker, type)
            and any(maker is each for each in self._policy.named.values())
        )

    def _check_maker(self, maker):
        if not self._may_be_made_by(maker):
            raise pickle.UnpicklingError(
                f"{maker!r} makes no value that other workers may send here"
            )

    def load_reduce(self):
        self._check_maker(self.stack[-2])
        super().load_reduce()

    def load_newobj(self):
        self._check_maker(self.stack[-2])
        super().load_newobj()

    def load_newobj_ex(self):
        self._check_maker(self.stack[-3])
        super().load_newobj_ex()

    def load_build(self):
        if type(self.stack[-2]) not in self._policy.named.values():
            raise pickle.UnpicklingError(
                f"the state of {type(self.stack[-2]).__qualname__} is not other workers' to set"
            )
        super().load_build()

    def _check_container(self, container):
        if type(container) not in _CONTAINERS:
            raise pickle.UnpicklingError(
                f"{type(container).__qualname__} is no container that a pickle of a call may fill"
            )

    def load_append(self):
        self._check_container(self.stack[-2])
        super().load_append()

    def load_setitem(self):
        self._check_container(self.stack[-3])
        super().load_setitem()

    def load_appends(self):
        self._check_container(self.metastack[-1][-1])
        super().load_appends()

    def load_setitems(self):
        self._check_container(self.metastack[-1][-1])
        super().load_setitems()

    def load_additems(self):
        self._check_container(self.metastack[-1][-1])
        super().load_additems()

    def refuse(self):
        raise pickle.UnpicklingError("an instruction that no pickle of a call has")

    dispatch = dict(pickle._Unpickler.dispatch)
    dispatch.update(
        {
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.NEWOBJ_EX[0]: load_newobj_ex,
            pickle.BUILD[0]: load_build,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.ADDITEMS[0]: load_additems,
            pickle.INST[0]: refuse,
            pickle.OBJ[0]: refuse,
            pickle.EXT1[0]: refuse,
            pickle.EXT2[0]: refuse,
            pickle.EXT4[0]: refuse,
            pickle.PERSID[0]: refuse,
            pickle.BINPERSID[0]: refuse,
        }
    )


class _InForce:
    """The process's policy: workers that are threads of one process share it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._policy, self._workers = None, 0

    @property
    def policy(self):
        """The policy of all workers of this process. None: a pickle may name anything."""
        return self._policy

    def enter(self, policy):
        with self._lock:
            if self._workers > 0 and policy != self._policy:
                raise _C.DistArgumentError(
                    "init_rpc: workers that are threads of one process must give the same functions"
                )
            self._policy = policy
            self._workers += 1

    def leave(self):
        with self._lock:
            self._workers = max(0, self._workers - 1)
            if self._workers == 0:
                self._policy = None


in_force = _InForce()


def policy_of(allow_pickle, functions):
    """The policy that init_rpc's arguments ask for. None: a pickle may name anything."""
    if allow_pickle is None:
        allow_pickle = functions is None and not pickles_are_refused()
    elif allow_pickle and pickles_are_refused():
        raise _C.DistArgumentError(
            "init_rpc: allow_pickle is True, and MUSTER_ALLOW_PICKLE=0 refuses pickles for the "
            "whole job"
        )
    if allow_pickle:
        if functions is not None:
            raise _C.DistArgumentError(
                "init_rpc: functions bound what other workers may name here, which nothing does "
                "with allow_pickle=True; give one of them"
            )
        return None
    return Policy(functions or ())

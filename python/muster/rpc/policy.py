"""What calls and answers of other workers may name on this one.

A pickle names classes and functions, and reading it calls them: whoever may send one runs code here. `init_rpc(functions=[...])` bounds
that: then a call is still a pickle, but one that can name nothing but those functions and classes, and values that do no harm.
"""

import collections
import io
import pickle
import threading

import torch

from .. import _C
from ..objects import pickles_are_refused

# Values that arguments and results are made of besides tensors, numbers, text, lists, tuples, dicts and None.
_HARMLESS = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, range,
                 collections.OrderedDict, torch.Size, torch.device)
}
_HARMLESS.update({("torch", str(kind).removeprefix("torch.")): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)})
# Where torch's own functions and methods are found: they are pickled as getattr(owner, name).
_OWNERS = {(owner.__module__, owner.__qualname__): owner for owner in (torch._C._VariableFunctionsClass, torch._C.TensorBase)}


class Policy:
    """What may be named, by (module, qualified name). Immutable, and compared by what it allows."""

    def __init__(self, functions):
        self.named, self.members = {}, []
        for each in functions:
            if not callable(each):
                raise _C.DistArgumentError(f"init_rpc: functions has {each!r}, which is neither a function nor a class")
            name = getattr(each, "__qualname__", None)
            if any(getattr(owner, getattr(each, "__name__", ""), None) == each for owner in _OWNERS.values()):
                self.members.append(each)
                continue
            if name is None or "<" in name or getattr(each, "__module__", None) is None:
                raise _C.DistArgumentError(
                    f"init_rpc: functions has {each!r}, which other workers cannot name: give functions and classes of a module")
            self.named[(each.__module__, name)] = each

    def __eq__(self, other):
        return isinstance(other, Policy) and (self.named, self.members) == (other.named, other.members)

    def may_call(self, function):
        """Functions and classes that are listed, and torch's operators, which were looked at when they were read."""
        return (any(function is each for each in self.named.values()) or function in self.members
                or isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)))

    def may_call_method(self, value, name):
        """Public methods of values of the classes that are listed."""
        return type(value) in self.named.values() and not name.startswith("_")


class BoundedUnpickler(pickle._Unpickler):
    """Reads what names nothing but a policy's functions and classes, harmless values, and `own`: functions by name that stand for the
    parts that travel beside the pickle. The interpreter's own unpickler would let any object that was read be called or changed."""

    def __init__(self, data, policy, own):
        super().__init__(io.BytesIO(data))
        self._policy, self._own = policy, own

    def find_class(self, module, name):
        for known in (self._own, self._policy.named, _HARMLESS, _OWNERS):
            if (module, name) in known:
                return known[(module, name)]
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise pickle.UnpicklingError(
            f"{module}.{name} is not among what other workers may name here: give it to init_rpc(functions=[...]) on this worker")

    def _member(self, owner, name):
        found = getattr(owner, name) if owner in _OWNERS.values() and isinstance(name, str) else None
        if found is None or found not in self._policy.members:
            raise pickle.UnpicklingError(
                f"{getattr(owner, '__qualname__', owner)}.{name} is not among what other workers may name here: give it to "
                "init_rpc(functions=[...]) on this worker")
        return found

    def _may_be_made_by(self, maker):
        return (maker == self._member or any(maker is each for each in self._own.values())
                or any(maker is each for each in _HARMLESS.values() if isinstance(each, type))
                or isinstance(maker, type) and any(maker is each for each in self._policy.named.values()))

    def _check_maker(self, maker):
        if not self._may_be_made_by(maker):
            raise pickle.UnpicklingError(f"{maker!r} makes no value that other workers may send here")

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
            raise pickle.UnpicklingError(f"the state of {type(self.stack[-2]).__qualname__} is not other workers' to set")
        super().load_build()

    def refuse(self):
        raise pickle.UnpicklingError("an instruction that no pickle of a call has")

    dispatch = dict(pickle._Unpickler.dispatch)
    dispatch.update({
        pickle.REDUCE[0]: load_reduce, pickle.NEWOBJ[0]: load_newobj, pickle.NEWOBJ_EX[0]: load_newobj_ex, pickle.BUILD[0]: load_build,
        pickle.INST[0]: refuse, pickle.OBJ[0]: refuse, pickle.EXT1[0]: refuse, pickle.EXT2[0]: refuse, pickle.EXT4[0]: refuse,
        pickle.PERSID[0]: refuse, pickle.BINPERSID[0]: refuse,
    })


class _InForce:
    """The process's policy: workers that are threads of one process share it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._policy, self._workers = None, 0

    @property
    def policy(self):
        """None: pickles may name anything."""
        return self._policy

    def enter(self, policy):
        with self._lock:
            if self._workers > 0 and policy != self._policy:
                raise _C.DistArgumentError("init_rpc: workers that are threads of one process must give the same functions")
            self._policy = policy
            self._workers += 1

    def leave(self):
        with self._lock:
            self._workers = max(0, self._workers - 1)
            if self._workers == 0:
                self._policy = None


in_force = _InForce()


def policy_of(allow_pickle, functions):
    """What init_rpc was told, as a policy; None where pickles may name anything."""
    if allow_pickle is None:
        allow_pickle = functions is None and not pickles_are_refused()
    elif allow_pickle and pickles_are_refused():
        raise _C.DistArgumentError("init_rpc: allow_pickle is True, and MUSTER_ALLOW_PICKLE=0 refuses pickles for the whole job")
    if allow_pickle:
        if functions is not None:
            raise _C.DistArgumentError(
                "init_rpc: functions bound what other workers may name here, which nothing does with allow_pickle=True; give one of them")
        return None
    return Policy(functions or ())

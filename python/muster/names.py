"""Names of torch.distributed that are classes or values rather than calls."""

import pdb
import os
import importlib

from . import _C


class Backend(str):
    """A backend's lower-case name. `Backend("GLOO") == "gloo"`; an unknown name raises a ValueError (DistArgumentError),
    with the list of the known ones."""

    UNDEFINED = "undefined"
    NATIVE = "native"
    GLOO = "gloo"
    TCP = "tcp"
    NCCL = "nccl"
    MPI = "mpi"
    UCC = "ucc"

    def __new__(cls, name):
        if not isinstance(name, str):
            raise ValueError(f"Backend takes a name, not {name!r}")
        return str.__new__(cls, _C.parse_backend(name))


class reduce_op:
    """The deprecated spelling of ReduceOp: only these four."""

    SUM = _C.ReduceOp.SUM
    PRODUCT = _C.ReduceOp.PRODUCT
    MIN = _C.ReduceOp.MIN
    MAX = _C.ReduceOp.MAX


class _World(type):
    @property
    def WORLD(cls):
        """The default group; None before init_process_group."""
        return _C.default_group() if _C.is_initialized() else None


class group(metaclass=_World):
    """`group.WORLD` is the default group."""


class GroupMember(metaclass=_World):
    """`GroupMember.WORLD` is the default group. `NON_GROUP_MEMBER` equals every group that this process is no member of."""

    NON_GROUP_MEMBER = _C.NON_GROUP_MEMBER


class P2POp:
    """One operation of a batch: `op` is `isend` or `irecv`, `peer` a rank of the default group, `group_peer` one of `group`."""

    def __init__(self, op, tensor, peer=None, group=None, tag=0, group_peer=None):
        if op not in (_C.isend, _C.irecv):
            raise ValueError(f"P2POp: op must be isend or irecv, not {op!r}")
        self.op, self.tensor, self.peer, self.group, self.tag, self.group_peer = op, tensor, peer, group, tag, group_peer


def batch_isend_irecv(p2p_op_list):
    """Any mix in any order that matches the peers'. One Work per operation; none for a non-member."""
    return _C.batch_of_messages(
        [(each.op is _C.isend, each.tensor, each.peer, each.group, each.tag, each.group_peer) for each in p2p_op_list]
    )


def is_available():
    """True wherever muster can be imported."""
    return True


def _debugger():
    name = os.environ.get("PYTHONBREAKPOINT", "")
    if name == "0":
        return lambda: None
    if not name:
        return pdb.set_trace
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module or "builtins"), function)


def breakpoint(rank=0):
    """All ranks call it: `rank` stops in a debugger (PYTHONBREAKPOINT names another than pdb), the others wait without limit."""
    _C.breakpoint(rank, _debugger())

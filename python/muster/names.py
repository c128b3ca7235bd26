# SPDX-License-Identifier: BSD-3-Clause
"""Names of torch.distributed that are classes or values, or little calls on top of others."""

import contextlib
import datetime
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import _C
from ._deprecation import warn_deprecated
from ._lookups import constant_in_graphs, get_backend

default_pg_timeout = datetime.timedelta(minutes=30)
SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


class Backend(str):
    """A backend's lower-case name. `Backend("GLOO") == "gloo"`; an unknown name raises a ValueError
    (DistArgumentError), with the list of the known ones.
    """

    UNDEFINED = "undefined"
    NATIVE = "native"
    GLOO = "gloo"
    TCP = "tcp"
    NCCL = "nccl"
    MPI = "mpi"
    UCC = "ucc"
    XCCL = "xccl"

    backend_list: list[str] = _C.known_backends()  #: with those that are registered
    default_device_backend_map: dict[str, str] = {"cpu": NATIVE, "cuda": NCCL}
    #: From names to the kinds of devices that they serve.
    backend_capability: dict[str, list[str]] = {
        NATIVE: ["cpu", "cuda"],
        GLOO: ["cpu", "cuda"],
        TCP: ["cpu", "cuda"],
        NCCL: ["cuda"],
        MPI: ["cpu"],
        UCC: ["cpu", "cuda"],
    }

    def __new__(cls, name: str) -> "Backend":
        if not isinstance(name, str):
            raise ValueError(f"Backend takes a name, not {name!r}")
        return str.__new__(cls, _C.parse_backend(name))

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Makes `name` a backend of this process, and an attribute of Backend in capitals.

        func(store, rank, world_size, timeout) gives a ProcessGroupBackend; with `extended_api`
        func(DistributedBackendOptions, pg_options). It runs on every member of every group that is
        made with this name, with a store of that group alone. devices: a name, or a list of
        them: the kinds that it serves where a group names it without one; None: cpu and cuda.
        Raises ValueError (DistArgumentError) where there is such a backend already. A plugin
        library registers its own: `load_backend_plugin`.
        """
        kinds = [] if devices is None else [devices] if isinstance(devices, str) else list(devices)
        _C._register_backend(name.lower(), func, extended_api, kinds)
        cls._add(name.lower(), kinds or ["cpu", "cuda"])

    @classmethod
    def _add(cls, name: str, kinds: list[str]) -> None:
        setattr(cls, name.upper(), name)
        cls.backend_list.append(name)
        cls.backend_capability[name] = kinds


def load_backend_plugin(path: str) -> list[str]:
    """Loads a plugin library, which registers its backends, and keeps it for the rest of the
    process. Returns their names, which become attributes of Backend. Raises DistError where it
    cannot be loaded, is no plugin, or was made for another muster.
    """
    added = _C._load_backend_plugin(path)
    for name, kinds in added:
        Backend._add(name, kinds)
    return [name for name, _ in added]


class _OldOperations(type):
    def __getattr__(cls, name: str) -> _C.ReduceOp:
        if name not in ("SUM", "PRODUCT", "MIN", "MAX"):
            raise AttributeError(f"muster.reduce_op has no {name}; muster.ReduceOp has all of them")
        warn_deprecated("muster.reduce_op", "muster.ReduceOp", "0.1.0", "torch removes it")
        return getattr(_C.ReduceOp, name)


class reduce_op(metaclass=_OldOperations):
    """The deprecated spelling of ReduceOp: only SUM, PRODUCT, MIN and MAX. Each warns."""


class _World(type):
    @property
    def WORLD(cls) -> _C.ProcessGroup | None:
        """The default group; None before init_process_group."""
        return _C.default_group() if _C.is_initialized() else None


class group(metaclass=_World):
    """`group.WORLD` is the default group."""


class GroupMember(metaclass=_World):
    """`GroupMember.WORLD` is the default group. `NON_GROUP_MEMBER` equals every group that this
    process is no member of.
    """

    NON_GROUP_MEMBER = _C.NON_GROUP_MEMBER


class P2POp:
    """One operation of a batch: `op` is `isend` or `irecv`, `peer` a rank of the default group,
    `group_peer` one of `group`. Raises ValueError for another op.
    """

    def __init__(
        self,
        op: Callable[..., _C.Work | None],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: _C.ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (_C.isend, _C.irecv):
            raise ValueError(f"P2POp: op must be isend or irecv, not {op!r}")
        self.op, self.tensor, self.peer, self.group, self.tag, self.group_peer = (
            op,
            tensor,
            peer,
            group,
            tag,
            group_peer,
        )


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[_C.Work]:
    """Any mix in any order that matches the peers'. One Work per operation; none for a non-member.
    Raises ValueError for entries that are no P2POp, and (DistArgumentError) for ranks that there
    are not; what fails later is raised by the Work's wait, as of `isend` and `irecv`.
    """
    if not all(isinstance(each, P2POp) for each in p2p_op_list):
        raise ValueError("batch_isend_irecv takes a list of P2POp")
    return _C.batch_of_messages(
        [
            (each.op is _C.isend, each.tensor, each.peer, each.group, each.tag, each.group_peer)
            for each in p2p_op_list
        ]
    )


def is_available() -> bool:
    """True wherever muster can be imported."""
    return True


@constant_in_graphs
def is_backend_available(backend: str) -> bool:
    """Whether this build can make a backend of that name (text, either case)."""
    try:
        name = _C.parse_backend(backend)
    except _C.DistError:
        return False
    return getattr(_C, f"is_{name}_available", lambda: True)()


def is_xccl_available() -> bool:
    """False: muster has no such backend."""
    return False


def get_default_backend_for_device(device: str | torch.device) -> str:
    """The name of the backend that serves such tensors (a torch.device, or its text) where a group
    names none. Raises ValueError for kinds that none serves.
    """
    kind = torch.device(device).type
    name = Backend.default_device_backend_map.get(kind)
    if name is None:
        raise ValueError(f"no backend of muster's serves tensors on {kind}")
    return name


def get_backend_config(group: _C.ProcessGroup | None = None) -> str:
    """Which backend serves which kind of device in the group (None: the default one), as text:
    `cpu:native`.
    """
    name = get_backend(group)
    return name if ":" in name else ",".join(f"{kind}:{name}" for kind in ("cpu", "cuda"))


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's rank on its host, as the launcher gave it (LOCAL_RANK). Raises RuntimeError
    where there is neither that nor a fallback_rank.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "LOCAL_RANK is not set: start the program with `muster run`, or give fallback_rank"
    )


@constant_in_graphs
def get_pg_count() -> int:
    """Number of groups this process is a member of, including the default group and groups that
    models made for themselves.
    """
    return _C._group_count()


@constant_in_graphs
def supports_complex(reduceOp: _C.ReduceOp) -> bool:
    """Whether complex tensors can be combined by it."""
    op = _C.ReduceOp
    return reduceOp not in (op.MAX, op.MIN, op.PRODUCT, op.BAND, op.BOR, op.BXOR)


def gather_into_tensor(
    tensor: torch.Tensor,
    gather_tensor: torch.Tensor | None = None,
    dst: int | None = None,
    group: _C.ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: datetime.timedelta | None = None,
) -> _C.Work | None:
    """`gather` into one tensor: on dst (0 where none is given) gather_tensor is all ranks' tensors,
    concatenated along dimension 0 or stacked along a new one; elsewhere None. Work with async_op,
    else None. Raises ValueError (DistArgumentError) for other shapes, DistBackendError, with the
    ranks at fault, where a rank fails, does not come within `timeout` (None: the group's), or makes
    another call.
    """
    parts = None
    if gather_tensor is not None:
        size = _C.get_world_size(group)
        stacked = (size, *tensor.shape)
        joined = (size * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else None
        if tuple(gather_tensor.shape) not in (stacked, joined):
            raise _C.DistArgumentError(
                f"gather_into_tensor: gather_tensor is {list(gather_tensor.shape)}; {size} tensors "
                f"of {list(tensor.shape)} need "
                f"{list(joined or stacked)} or {list(stacked)}"
            )
        parts = list(gather_tensor.view(stacked).unbind())
    return _C.gather(tensor, parts, dst, group, async_op, group_dst, timeout=timeout)


@contextlib.contextmanager
def record_comm(name: str) -> Iterator[None]:
    """A range in torch's profiler around some calls, which show as ranges themselves."""
    with torch.autograd.profiler.record_function(name):
        yield


def _debugger() -> Callable[[], Any]:
    name = os.environ.get("PYTHONBREAKPOINT", "")
    if name == "0":
        return lambda: None
    if not name:
        import pdb  # not with muster: few programs stop here

        return pdb.set_trace
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module or "builtins"), function)


# .counts: how often each place has been passed, by file and line; of one rank where ranks are
# threads.
_passed = threading.local()


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """All ranks call it: `rank` stops in a debugger (PYTHONBREAKPOINT names another than pdb), the
    others wait without limit. skip: the first so many calls from this line of the program do
    nothing. timeout_s is taken for torch's sake: its waits have no limit. Raises ValueError
    (DistArgumentError) for a rank that does not exist, DistBackendError where a rank ends
    meanwhile.
    """
    if skip > 0:
        caller = sys._getframe(1)
        counts = _passed.__dict__.setdefault("counts", {})
        place = caller.f_code.co_filename, caller.f_lineno
        counts[place] = counts.get(place, 0) + 1
        if counts[place] <= skip:
            return
    _C.breakpoint(rank, _debugger())


gather_single = gather_into_tensor
all_gather_single = _C.all_gather_into_tensor
reduce_scatter_single = _C.reduce_scatter_tensor
_all_gather_base = _C.all_gather_into_tensor
_reduce_scatter_base = _C.reduce_scatter_tensor

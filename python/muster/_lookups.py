# SPDX-License-Identifier: BSD-3-Clause
"""Lookups of a process's rank, groups and meshes, in a form that torch.compile traces unbroken.

A graph keeps what they said when it was traced. It is traced anew for another group or mesh as an
argument, and after `forget_graphs`, which whatever makes another default group calls. Importing
this module puts functions of Python's around such methods of ProcessGroup and DeviceMesh.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from . import _C
from ._C import DebugLevel, DeviceMesh
from ._C import ProcessGroup as Group

Call = TypeVar("Call", bound=Callable[..., Any])
is_tracing = torch.compiler.is_dynamo_compiling


def constant_in_graphs(call: Call) -> Call:
    """torch.compiler.assume_constant_result, which would import all of torch._dynamo. Arguments are
    text and numbers: tracing takes no other for constants.
    """
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


def forget_graphs() -> None:
    """Graphs have ranks, sizes and names of groups in them as constants: those of the default group
    that was. torch.compile traces anew after this.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None and hasattr(compiler, "reset"):  # else it is not imported, or not whole
        compiler.reset()


# ---- functions


@constant_in_graphs
def _answer(function: str, group_name: str, *arguments: int) -> Any:
    """Calls a function of the extension with the group of that name; empty: the default one."""
    group = None
    if group_name:
        group = _C._find_group(group_name) or _C.NON_GROUP_MEMBER
    return getattr(_C, function)(group, *arguments)


def _name_of(group: Group | None) -> str:
    return "" if group is None else group.group_name


def is_initialized() -> bool:
    """Whether this process (or thread, where ranks are threads) has a default group."""
    return _C.is_initialized()


def get_rank(group: Group | None = None) -> int:
    """This process's rank in the group (None: the default one); -1 for a non-member."""
    return _answer("get_rank", _name_of(group)) if is_tracing() else _C.get_rank(group)


def get_world_size(group: Group | None = None) -> int:
    """The number of members; -1 for a non-member."""
    return _answer("get_world_size", _name_of(group)) if is_tracing() else _C.get_world_size(group)


def get_backend(group: Group | None = None) -> str:
    """The lower-case name that the group's backend was asked for by; `cpu:native` where none was.
    Members only.
    """
    return _answer("get_backend", _name_of(group)) if is_tracing() else _C.get_backend(group)


def get_group_rank(group: Group, global_rank: int) -> int:
    """From a rank of the default group to one of `group`. Raises ValueError (DistArgumentError) for
    a non-member.
    """
    if is_tracing():
        return _answer("get_group_rank", _name_of(group), global_rank)
    return _C.get_group_rank(group, global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """From a rank of `group` to one of the default group. Raises ValueError (DistArgumentError) for
    a rank that it has not.
    """
    if is_tracing():
        return _answer("get_global_rank", _name_of(group), group_rank)
    return _C.get_global_rank(group, group_rank)


def get_process_group_ranks(group: Group | None) -> list[int]:
    """The members, as ranks of the default group, in the group's order."""
    if is_tracing():
        return _answer("get_process_group_ranks", _name_of(group))
    return _C.get_process_group_ranks(group)  # type: ignore[arg-type]


@constant_in_graphs
def get_debug_level() -> DebugLevel:
    """That of TORCH_DISTRIBUTED_DEBUG, or what was set."""
    return _C.get_debug_level()


@constant_in_graphs
def is_gloo_available() -> bool:
    """True: `gloo` is another name for the native engine."""
    return _C.is_gloo_available()


@constant_in_graphs
def is_mpi_available() -> bool:
    """Whether this build has the mpi backend."""
    return _C.is_mpi_available()


@constant_in_graphs
def is_nccl_available() -> bool:
    """Whether the nccl backend can be used: NCCL's library can be loaded. A GPU is needed too."""
    return _C.is_nccl_available()


@constant_in_graphs
def is_ucc_available() -> bool:
    """Whether this build has the ucc backend."""
    return _C.is_ucc_available()


@constant_in_graphs
def is_torchelastic_launched() -> bool:
    """Whether TORCHELASTIC_RUN_ID is set, as the launcher does."""
    return _C.is_torchelastic_launched()


constant_in_graphs(is_initialized)

# ---- methods. None has a closure or defaults: torch.compile cannot guard those of a method whose
# object came out of a constant call.

_OF_GROUP = {
    name: getattr(Group, name) for name in ("rank", "size", "name", "__bool__", "__eq__", "__ne__")
}
_OF_MESH = {
    name: getattr(DeviceMesh, name)
    for name in ("size", "get_group", "get_rank", "get_local_rank", "get_coordinate", "__getitem__")
}


@constant_in_graphs
def _is_member(group_name: str) -> bool:
    return bool(_C._find_group(group_name))


def _rank(self: Group) -> int:
    return get_rank(self) if is_tracing() else _OF_GROUP["rank"](self)


def _size(self: Group) -> int:
    return get_world_size(self) if is_tracing() else _OF_GROUP["size"](self)


def _name(self: Group) -> str:
    if not is_tracing():
        return _OF_GROUP["name"](self)
    return get_backend(self) if _is_member(self.group_name) else "undefined"


def _bool(self: Group) -> bool:
    return _is_member(self.group_name) if is_tracing() else _OF_GROUP["__bool__"](self)


def _eq(self: Group, other: Any) -> Any:
    if not is_tracing():
        return _OF_GROUP["__eq__"](self, other)
    if not isinstance(other, Group):
        return False
    one, two = self.group_name, other.group_name
    return one == two or not (_is_member(one) or _is_member(two))


def _ne(self: Group, other: Any) -> Any:
    return not _eq(self, other) if is_tracing() else _OF_GROUP["__ne__"](self, other)


@constant_in_graphs
def _known(self: DeviceMesh, name: str, *given: Any, **named: Any) -> Any:
    return _OF_MESH[name](self, *given, **named)


def _of_mesh(mesh: DeviceMesh, name: str, given: Sequence[Any], named: dict[str, Any]) -> Any:
    """Calls a method. Reads the attributes that tell meshes apart, so that they are guarded."""
    if not is_tracing():
        return _OF_MESH[name](mesh, *given, **named)
    told = (*mesh.shape, *(mesh.mesh_dim_names or ()), *mesh._dim_group_names)
    return mesh._known(name, *given, **named) if told else None


def _mesh_size(self: DeviceMesh, *given: Any, **named: Any) -> int:
    return _of_mesh(self, "size", given, named)


def _mesh_group(self: DeviceMesh, *given: Any, **named: Any) -> Group:
    return _of_mesh(self, "get_group", given, named)


def _mesh_rank(self: DeviceMesh) -> int:
    return _of_mesh(self, "get_rank", (), {})


def _mesh_local_rank(self: DeviceMesh, *given: Any, **named: Any) -> int:
    return _of_mesh(self, "get_local_rank", given, named)


def _mesh_coordinate(self: DeviceMesh) -> tuple[int, ...] | None:
    return _of_mesh(self, "get_coordinate", (), {})


def _mesh_part(self: DeviceMesh, names: str | Sequence[str]) -> DeviceMesh:
    return _of_mesh(self, "__getitem__", (names,), {})


setattr(DeviceMesh, "_known", _known)
for _kind, _methods, _functions in (
    (Group, _OF_GROUP, (_rank, _size, _name, _bool, _eq, _ne)),
    (
        DeviceMesh,
        _OF_MESH,
        (
            _mesh_size,
            _mesh_group,
            _mesh_rank,
            _mesh_local_rank,
            _mesh_coordinate,
            _mesh_part,
        ),
    ),
):
    for (_called, _method), _function in zip(_methods.items(), _functions, strict=True):
        setattr(_kind, _called, functools.update_wrapper(_function, _method))

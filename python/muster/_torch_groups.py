# SPDX-License-Identifier: BSD-3-Clause
"""Muster's groups as groups of torch.distributed, for what of torch communicates by torch's own:
DTensor, functional collectives, DCP. Nothing here needs torch.distributed.init_process_group.

`torch_group(group)` is a c10d ProcessGroup over muster's engine. torch finds it by its name, and
by what it keeps of every group (`_world.pg_map` and its sisters). Those look-ups know ours too;
what lists or clears torch's groups sees torch's alone, so a program's own init_process_group and
destroy_process_group neither see nor end ours.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import _functional_collectives  # noqa: F401  registers its operators
from torch.distributed import device_mesh as _torch_mesh

from . import _C
from . import torch as _backend  # noqa: F401  makes "muster" a backend that torch knows
from ._lookups import get_process_group_ranks


@dataclass
class _Ours:
    """One of muster's groups with torch's object over it."""

    group: _C.ProcessGroup
    of: c10d.ProcessGroup
    store: torch.distributed.Store
    home: tuple[int, int]  # this rank and the size of the default group

    def ranks(self) -> dict[int, int]:
        """From ranks of the default group to its own."""
        return {rank: at for at, rank in enumerate(get_process_group_ranks(self.group))}


_lock = threading.RLock()  # guards the following
_by_name: dict[str, _Ours] = {}
_by_group: dict[c10d.ProcessGroup, _Ours] = {}
_first_home: list[tuple[int, int]] = []


def _home() -> tuple[int, int]:
    return _C.get_rank(None), _C.get_world_size(None)


def other_rank() -> int | None:
    """This process's rank where it is not the one that it had first, as in a later default group
    and where ranks are threads; else None. torch takes meshes of one shape for the same, and keeps
    the first, with its rank's place in it, so that such meshes must differ.
    """
    with _lock:
        if not _first_home:
            _first_home.append(_home())
        return None if _home() == _first_home[0] else _home()[0]


def torch_group(group: _C.ProcessGroup | None = None) -> c10d.ProcessGroup:
    """torch's object over `group` (None: the default one), the same at each call. It ends with the
    group. Raises ValueError (DistArgumentError) for a group without this process.
    """
    if group is None:
        group = _C.default_group()
    if not group:
        raise _C.DistArgumentError("torch_group: this process is not a member of the group")
    with _lock:
        rank = other_rank()
        name = f"muster:{group.group_name}" + ("" if rank is None else f"@{rank}")
        known = _by_name.get(name)
        if known is not None and known.group is group:
            return known.of
        if known is not None:  # of a default group that was
            _drop(name)
        return _add(name, group).of


def _add(name: str, group: _C.ProcessGroup) -> _Ours:
    _install()
    store = torch.distributed.HashStore()  # nobody meets on it
    made = c10d.ProcessGroup(store, group.rank(), group.size())
    kind = c10d.ProcessGroup.BackendType.CUSTOM
    made._set_default_backend(kind)
    backend = _C._torch_backend_over(group)
    for device in ("cpu", "cuda"):
        made._register_backend(torch.device(device), kind, backend)
    made._set_group_name(name)
    made._set_group_desc(f"muster's group {group.group_name}")
    ours = _Ours(group, made, store, _home())
    _by_name[name] = _by_group[made] = ours
    c10d._register_process_group(name, made)
    return ours


# Called with the name of each group that ends, under the lock: for tables of what is made of them.
when_dropped: list[Callable[[str], None]] = []


def _drop(name: str) -> None:
    ours = _by_name.pop(name)
    for each in when_dropped:
        each(name)
    _by_group.pop(ours.of, None)
    with contextlib.suppress(RuntimeError):  # torch's own destroy may have forgotten it
        c10d._unregister_process_group(name)


def forget(group: _C.ProcessGroup | None = None) -> None:
    """Before `group` ends; None: all of this rank's groups. The extension calls it."""
    home = _home() if group is None and _C.is_initialized() else None
    with _lock:
        for name, ours in list(_by_name.items()):
            if ours.group is group or ours.home == home:
                _drop(name)


def muster_group(group: c10d.ProcessGroup) -> _C.ProcessGroup | None:
    """Muster's group below one that `torch_group` gave; None for torch's own."""
    ours = _by_group.get(group)
    return None if ours is None else ours.group


# ---- torch's look-ups


class _AndOurs(dict[Any, Any]):
    """A table of torch's: `[]`, `get` and `in` find our groups too, all else only torch's."""

    def __init__(self, theirs: dict[Any, Any], answer: Callable[[_Ours], Any]) -> None:
        super().__init__(theirs)
        self._answer = answer

    def __missing__(self, group: Any) -> Any:
        return self._answer(_by_group[group])

    def get(self, group: Any, default: Any = None) -> Any:
        return self[group] if group in self else default

    def __contains__(self, group: Any) -> bool:
        return super().__contains__(group) or group in _by_group

    def __delitem__(self, group: Any) -> None:
        if group in _by_group and not super().__contains__(group):
            raise _C.DistArgumentError(
                f"{_by_group[group].of.group_name} is a group of muster's: "
                "muster.destroy_process_group ends it"
            )
        super().__delitem__(group)


_ANSWERS: dict[str, Callable[[_Ours], Any]] = {
    "_pg_map": lambda ours: ("muster", ours.store),
    "_pg_names": lambda ours: ours.of.group_name,
    "_pg_group_ranks": _Ours.ranks,
    "_pg_backend_config": lambda ours: "cpu:muster,cuda:muster",
    "_pg_to_tag": lambda ours: f"ptd:{ours.of.group_name}",
}


def _keeping_ours(unregister_all: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(unregister_all)
    def unregister_theirs() -> None:
        unregister_all()
        with _lock:
            for name, ours in _by_name.items():
                c10d._register_process_group(name, ours.of)

    return unregister_theirs


def _knowing_ours(get_rank: Callable[..., int]) -> Callable[..., int]:
    """torch's, for the modules that ask it about meshes: without a default group of torch's, ranks
    are muster's.
    """

    @functools.wraps(get_rank)
    def rank_in(group: c10d.ProcessGroup | None = None) -> int:
        if group is not None and group in _by_group:
            return group.rank()
        if group is not None or not _C.is_initialized():
            return get_rank(group)
        mine = _C.get_rank(None)
        if c10d.is_initialized() and get_rank() != mine:
            raise RuntimeError(
                f"this process is rank {get_rank()} of torch.distributed and rank {mine} of "
                "muster: meshes of both need one numbering; initialise both with the same ranks"
            )
        return mine

    return rank_in


class _ForCheckpoints:
    """torch.distributed, or what has it or is in it, as torch's DCP sees it: without a default
    group of torch's, each rank would save for itself, into one folder, and gather for itself.
    """

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if found is c10d or found is torch.distributed:
            return _ForCheckpoints(found)
        if self._of is torch:
            return found
        if not inspect.isfunction(found) or c10d.is_initialized() or not _C.is_initialized():
            return found
        return functools.partial(_in_default_group, found)


def _in_default_group(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with as_default_group():
        return call(*args, **kwargs)


@functools.cache
def _install() -> None:
    """Once, with the first group."""
    from torch.distributed.tensor import _collective_utils

    for name, answer in _ANSWERS.items():
        setattr(c10d, name, _AndOurs(getattr(c10d, name), answer))
    c10d._unregister_all_process_groups = _keeping_ours(c10d._unregister_all_process_groups)
    for module in (_torch_mesh, _collective_utils):
        setattr(module, "get_rank", _knowing_ours(module.get_rank))
    from torch.distributed import _state_dict_utils
    from torch.distributed.checkpoint import state_dict, state_dict_loader, state_dict_saver, utils

    for asking in (_state_dict_utils, state_dict, state_dict_loader, state_dict_saver, utils):
        setattr(asking, "dist", _ForCheckpoints(torch.distributed))
    setattr(_state_dict_utils, "distributed_c10d", _ForCheckpoints(c10d))
    setattr(state_dict, "torch", _ForCheckpoints(torch))


@contextlib.contextmanager
def as_default_group() -> Iterator[None]:
    """While it lasts, muster's default group is torch.distributed's default group too, for
    functions of torch that take no group; one of torch's own stays.
    """
    if c10d.is_initialized():
        yield
        return
    ours = torch_group()
    c10d._world.default_pg = ours
    try:
        yield
    finally:
        if c10d._world.default_pg is ours:
            c10d._world.default_pg = None

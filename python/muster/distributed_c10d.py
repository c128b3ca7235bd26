# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.distributed_c10d's names: the public ones are muster's own, and of the private
ones those that libraries call.
"""

import contextlib
import datetime
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NewType

import torch

import muster as _muster

from . import _C
from ._C import (  # noqa: F401
    DebugLevel,
    PrefixStore,
    ProcessGroup,
    ProcessGroupNCCL,
    ReduceOp,
    Store,
    Work,
    abort_process_group,
)
from ._lookups import constant_in_graphs, get_global_rank, get_world_size
from .names import default_pg_timeout
from .objects import _unpack
from .options import (  # noqa: F401
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BackendConfig,
    BarrierOptions,
    BroadcastOptions,
    BuiltinCommHookType,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from .rendezvous import register_rendezvous_handler, rendezvous  # noqa: F401

GroupName = NewType("GroupName", str)
_abort_process_group = abort_process_group
default_pg_nccl_timeout = datetime.timedelta(minutes=10)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(_muster, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


# ---- groups


@constant_in_graphs
def _get_default_group() -> ProcessGroup:
    """The default group. Raises ValueError (DistArgumentError) before init_process_group."""
    return _C.default_group()


def _get_default_store() -> Store:
    """The default group's part of the job's store."""
    return _C.default_group().get_group_store()


def _get_process_group_store(pg: ProcessGroup) -> Store:
    return pg.get_group_store()


def _group_or_default_group(group: ProcessGroup | None = None) -> ProcessGroup:
    return _get_default_group() if group is None else group


def _rank_not_in_group(group: ProcessGroup | None) -> bool:
    """Whether this process is no member; False of None, the default group."""
    return group is not None and not group


def _get_group_size(group: ProcessGroup | None) -> int:
    return get_world_size(group)


def _get_global_rank(group: ProcessGroup, rank: int) -> int:
    return get_global_rank(group, rank)


def _get_process_group_name(pg: ProcessGroup) -> str:
    """The name by which `_resolve_process_group` finds it: no two groups of a process share it."""
    return pg.group_name


@constant_in_graphs
def _resolve_process_group(group_name: str) -> ProcessGroup:
    """The group with that `group_name`. Raises ValueError (DistArgumentError) if this process has
    none.
    """
    found = _C._find_group(group_name)
    if found is None:
        raise _C.DistArgumentError(
            f"this process has no group named {group_name!r}; _get_process_group_name(group) gives "
            "a group's name"
        )
    return found


def _get_group_size_by_name(group_name: str | ProcessGroup) -> int:
    by_name = isinstance(group_name, str)
    group = _resolve_process_group(group_name) if by_name else group_name  # type: ignore[arg-type]
    return group.size()  # type: ignore[union-attr]


def _set_pg_timeout(timeout: datetime.timedelta, group: ProcessGroup | None = None) -> None:
    _C.set_timeout(timeout, group)


def _get_default_timeout(backend: str) -> datetime.timedelta:
    return default_pg_timeout


def _check_valid_timeout(timeout: object) -> None:
    if not isinstance(timeout, datetime.timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")


def _canonicalize_group_rank(
    group: ProcessGroup,
    global_rank: int | None = None,
    group_rank: int | None = None,
    return_global: bool = False,
) -> int:
    """A rank that is given in one of two ways, in the other one or the same. Raises ValueError
    (DistArgumentError) for neither and both.
    """
    if (global_rank is None) == (group_rank is None):
        raise _C.DistArgumentError(
            "give a rank of the default group or one of the group, and not both"
        )
    if group_rank is not None:
        return _C.get_global_rank(group, group_rank) if return_global else group_rank
    if return_global:
        return global_rank  # type: ignore[return-value]
    return _C.get_group_rank(group, global_rank)  # type: ignore[arg-type]


# ---- devices


def _get_pg_default_device(group: ProcessGroup | None = None) -> torch.device:
    """The device for small tensors of a library's own: the CPU where the group serves it, else its
    device.
    """
    kinds = _device_capability(group)
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _get_object_coll_device(group: ProcessGroup | None = None) -> str:
    return _get_pg_default_device(group).type


def _device_capability(group: ProcessGroup | None = None) -> list[str]:
    """The kinds of devices whose tensors the group takes, as text."""
    return [each.type for each in _group_or_default_group(group)._device_types]


# ---- objects


def _object_to_tensor(
    obj: Any,
    device: torch.device | str,
    group: ProcessGroup | None = None,
    weights_only: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pickle of it as bytes (uint8) and how many they are (int64, one element)."""
    file = io.BytesIO()
    if weights_only:
        torch.save(obj, file)
    else:
        pickle.Pickler(file).dump(obj)
    data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    return data, torch.tensor([data.numel()], dtype=torch.int64, device=device)


def _tensor_to_object(
    tensor: torch.Tensor,
    tensor_size: torch.Tensor | int,
    group: ProcessGroup | None = None,
    weights_only: bool = False,
) -> Any:
    """The inverse; pickles run code, as in muster's object collectives."""
    return _unpack(tensor.cpu()[: int(tensor_size)].numpy().tobytes(), weights_only)


# ---- calls


class _CoalescingManager:
    """The Works of the calls in a `_coalescing_manager`."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any = None) -> None:
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@contextlib.contextmanager
def _coalescing_manager(
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[_CoalescingManager]:
    """Calls inside are made as anywhere; asynchronous ones whose Works are appended to the manager
    have ended where the block ends, or with async_ops where its `wait` returns.
    """
    manager = _CoalescingManager()
    yield manager
    if not async_ops:
        manager.wait()


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], buffer_size: int, src: int = 0
) -> None:
    """The tensors of the group's rank src go to all, in place, in messages of up to about
    buffer_size bytes.
    """
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in [*tensors, None]:
        nothing_more = tensor is None or (batch and tensor.dtype != batch[0].dtype)
        full = nothing_more or size + tensor.nbytes > buffer_size  # type: ignore[union-attr]
        if batch and full:
            flat = torch.cat([each.detach().reshape(-1) for each in batch])
            _C.broadcast(flat, None, process_group, False, src)
            with torch.no_grad():
                for each, part in zip(batch, flat.split([one.numel() for one in batch])):
                    each.copy_(part.view_as(each))
            batch, size = [], 0
        if tensor is not None:
            batch.append(tensor)
            size += tensor.nbytes


def _store_based_barrier(
    rank: int,
    store: Store,
    group_name: str,
    rendezvous_count: int,
    timeout: datetime.timedelta,
    logging_interval: datetime.timedelta = datetime.timedelta(seconds=10),
) -> None:
    """Returns when so many users of the store have come under that name."""
    store.barrier(f"store_based_barrier/{group_name}", rendezvous_count, timeout)

# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.collective_utils' names: objects that all ranks get, or an error that all ranks
raise.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from ._C import ProcessGroup
from ._lookups import get_world_size
from .objects import all_gather_object, broadcast_object_list

__all__ = ["SyncPayload", "all_gather", "all_gather_object_enforce_type", "broadcast"]

T = TypeVar("T")


@dataclasses.dataclass
class SyncPayload(Generic[T]):
    """The message of one rank to the others."""

    stage_name: str | None
    success: bool
    payload: T
    exception: Exception | None = None


def _made(
    data_or_fn: T | Callable[[], T], stage_name: str | None, success: bool
) -> SyncPayload[T | None]:
    if not callable(data_or_fn):
        return SyncPayload(stage_name, success, data_or_fn)
    try:
        return SyncPayload(stage_name, success, data_or_fn())
    except Exception as error:
        return SyncPayload(stage_name, False, None, error)


def broadcast(
    data_or_fn: T | Callable[[], T],
    *,
    success: bool = True,
    stage_name: str | None = None,
    rank: int = 0,
    pg: ProcessGroup | None = None,
) -> T:
    """The data of rank `rank`, or what the function gives there, on every rank; without `pg` on
    this rank alone. Raises RuntimeError on all ranks if the function raises, or with success=False.
    """
    if not success and data_or_fn is not None:
        raise AssertionError("broadcast: with success=False there is no data: give None")
    is_source = rank == 0 if pg is None else pg.rank() == rank
    told = _made(data_or_fn, stage_name, success) if is_source else None
    if pg is not None:
        listed = [told]
        broadcast_object_list(listed, group=pg, group_src=rank)
        told = listed[0]
    if told is None or not told.success:
        stage = f": stage {told.stage_name}" if told and told.stage_name is not None else ""
        error = told.exception if told else None
        raise RuntimeError(
            f"Rank {rank} failed{stage}" + (f": exception {error}" if error else "")
        ) from error
    return cast(T, told.payload)


def all_gather(
    data_or_fn: T | Callable[[], T],
    stage_name: str | None = None,
    pg: ProcessGroup | None = None,
) -> list[T]:
    """Every rank's data, or what its function gives, by rank; without `pg` this rank's alone.
    Raises RuntimeError on all ranks if the function of any raises, or if the stages differ.
    """
    mine = _made(data_or_fn, stage_name, True)
    all_told: list[Any] = [mine]
    if pg is not None:
        all_told = [None] * get_world_size(pg)
        all_gather_object_enforce_type(pg, all_told, mine)
    failed = [(rank, each.exception) for rank, each in enumerate(all_told) if not each.success]
    stages = [each.stage_name for each in all_told]
    if failed:
        raise RuntimeError(
            "all_gather: " + "; ".join(f"rank {rank} failed: {error}" for rank, error in failed),
            failed,
        ) from failed[0][1]
    if any(each != stages[0] for each in stages):
        raise RuntimeError(f"all_gather: the ranks are at different stages, by rank: {stages}")
    return [each.payload for each in all_told]


def all_gather_object_enforce_type(
    pg: ProcessGroup,
    object_list: list[Any],
    obj: Any,
    type_checker: Callable[[Any, Any], bool] = lambda x, y: type(x) is type(y),
) -> None:
    """`all_gather_object`; raises TypeError on all ranks if a rank's object is of another type than
    that of the first.
    """
    all_gather_object(object_list, obj, group=pg)
    for rank, each in enumerate(object_list):
        if not type_checker(object_list[0], each):
            raise TypeError(
                f"Object type at index {rank} is {type(each)}, while first object type is "
                f"{type(object_list[0])}"
            )

# SPDX-License-Identifier: BSD-3-Clause
"""Collectives on picklable objects. Pickles run code: they are read only from ranks of the job,
which have proved its secret.

With weights_only, on all ranks alike, objects travel as `torch.save` writes them and are read by
torch's restricted unpickler: tensors, numbers, text, lists, dicts and the like. That is the form to
use where not every rank is trusted. MUSTER_ALLOW_PICKLE=0, set alike on all ranks, makes it the
only one.

They raise: ValueError (DistArgumentError) on all members where one cannot take part, naming
it: ranks that there are not, lists of a wrong length, objects that cannot be pickled; DistError
(`mismatch`) on all where calls or lengths differ; DistBackendError, with the ranks at fault, where
a rank fails or does not come within the group's timeout; pickle.UnpicklingError where weights_only
meets other classes. Before init_process_group: DistArgumentError.
"""

import io
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _C


def pickles_are_refused() -> bool:
    """Whether MUSTER_ALLOW_PICKLE=0 refuses pickles that may name anything, for the whole job.
    Raises DistArgumentError where it is neither 0 nor 1.
    """
    given = os.environ.get("MUSTER_ALLOW_PICKLE", "1").strip().lower()
    if given in ("1", "true", "yes", "on", ""):
        return False
    if given in ("0", "false", "no", "off"):
        return True
    raise _C.DistArgumentError(f"MUSTER_ALLOW_PICKLE is {given!r}; it is 1 (the default) or 0")


def _packer(objects: Sequence[Any], weights_only: bool) -> Callable[[], list[bytes]]:
    weights_only = weights_only or pickles_are_refused()

    def as_saved(value: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    return lambda: [as_saved(each) if weights_only else pickle.dumps(each) for each in objects]


def _unpack(packed: bytes, weights_only: bool) -> Any:
    if weights_only or pickles_are_refused():
        return torch.load(io.BytesIO(packed), weights_only=True)
    return pickle.loads(packed)


def _fill(target: list[Any] | None, packed: list[bytes] | None, weights_only: bool) -> None:
    if packed is not None:
        target[:] = [_unpack(each, weights_only) for each in packed]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: _C.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """The root's list goes to all; lists of the same length everywhere. `src` is 0 where neither it
    nor `group_src` is given. device: on which the bytes travel. weights_only: only what torch's
    restricted unpickler reads. Raises ValueError (DistArgumentError) on all for ranks that there
    are not and objects that cannot be pickled, DistError where lengths differ, DistBackendError
    where a rank fails or does not come.
    """
    packed = _C.broadcast_objects(
        group, device, src, group_src, len(object_list), _packer(object_list, weights_only)
    )
    _fill(object_list, packed, weights_only)


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: _C.ProcessGroup | None = None,
    weights_only: bool = False,
) -> None:
    """object_list[r] becomes the object of rank r; it has an entry for every member. weights_only:
    only what torch's restricted unpickler reads. Raises ValueError (DistArgumentError) on all for a
    list of another length and objects that cannot be pickled, DistBackendError where a rank fails
    or does not come.
    """
    _fill(
        object_list,
        _C.all_gather_objects(group, len(object_list), _packer([obj], weights_only)),
        weights_only,
    )


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: _C.ProcessGroup | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """On dst (0 where none is given) entry r of the list becomes the object of rank r; elsewhere
    the list is None. weights_only: only what torch's restricted unpickler reads. Raises ValueError
    (DistArgumentError) on all for a list of another length, one elsewhere, ranks that there are not
    and objects that cannot be pickled, DistBackendError where a rank fails or does not come.
    """
    length = 0 if object_gather_list is None else len(object_gather_list)
    _fill(
        object_gather_list,
        _C.gather_objects(group, dst, group_dst, length, _packer([obj], weights_only)),
        weights_only,
    )


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: _C.ProcessGroup | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Entry r of the list on src (0 where none is given) becomes entry 0 of rank r's output list.
    weights_only: only what torch's restricted unpickler reads. Raises ValueError
    (DistArgumentError) on all for lists of a wrong length, ranks that there are not and objects
    that cannot be pickled, DistBackendError where a rank fails or does not come.
    """
    given = scatter_object_input_list or []
    mine = _C.scatter_objects(
        group,
        src,
        group_src,
        len(scatter_object_output_list),
        len(given),
        _packer(given, weights_only),
    )
    if mine is not None:
        scatter_object_output_list[0] = _unpack(mine, weights_only)


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: _C.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """To be received by recv_object_list with a list as long and the same weights_only. use_batch
    is taken for torch's sake. Raises ValueError (DistArgumentError) for ranks that there are not,
    this one itself and objects that cannot be pickled, DistBackendError where the peer fails or
    does not take it in time.
    """
    _C.send_objects(group, device, dst, group_dst, _packer(object_list, weights_only))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: _C.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Returns the sender's rank; -1 for a non-member. src None: from any rank. use_batch is taken
    for torch's sake. Raises ValueError (DistArgumentError) for ranks that there are not and this
    one itself, DistError where the sender's list has another length, DistBackendError where the
    peer fails or sends nothing in time.
    """
    source, packed = _C.recv_objects(group, device, src, group_src, len(object_list))
    if source >= 0:
        _fill(object_list, packed, weights_only)
    return source

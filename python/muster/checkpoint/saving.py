# SPDX-License-Identifier: BSD-3-Clause
"""save, load and async_save."""

import concurrent.futures
import contextlib
import json
import os
import threading
import weakref

from muster import _C

from .contents import Contents
from .ranks import Members
from .shard import refuse
from .storage import FileSystemReader, FileSystemWriter

_savers = weakref.WeakKeyDictionary()  # by group of stock torch's: saves wait for each other


_savers_lock = threading.Lock()


def _saver(members):
    if members.key is None:
        return _C._CheckpointSaver.of(members.native)
    with _savers_lock:
        if members.key not in _savers:
            _savers[members.key] = _C._CheckpointSaver.of(members.native)
        return _savers[members.key]


class _Future(concurrent.futures.Future):
    """The future of a save. A program that asks it for the outcome has heard of a failure."""

    def __init__(self, saving):
        super().__init__()
        self._saving = saving

    def exception(self, timeout=None):
        error = super().exception(timeout)
        if error is not None:
            with contextlib.suppress(Exception):
                self._saving.wait()
        return error

    def result(self, timeout=None):
        self.exception(timeout)
        return super().result(timeout)


def _items(of):
    """As the C++ half has them, naming the one that it cannot take."""
    try:
        return _C._CheckpointItems(of)
    except TypeError:
        for each in of:
            try:
                _C._CheckpointItems([each])
            except TypeError:
                refuse(
                    f"'{each[0]}': a Shard has a tensor, the size of the whole as whole numbers, "
                    "and as offsets such numbers or one"
                )
        raise


def _no_planner(planner):
    if planner is not None:
        refuse("planner is not there: how a state is divided and read is worked out from the state")


def _writer(checkpoint_id, storage_writer):
    if storage_writer is None:
        if checkpoint_id is None:
            refuse("give checkpoint_id, the folder of the checkpoint")
        return FileSystemWriter(checkpoint_id), os.fspath(checkpoint_id)
    if not isinstance(storage_writer, FileSystemWriter):
        refuse(
            f"storage_writer is a {type(storage_writer).__name__}; give a "
            "muster.checkpoint.FileSystemWriter or checkpoint_id alone"
        )
    return storage_writer, os.fspath(checkpoint_id or storage_writer.path)


def _begin(call, state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist):
    members = Members(process_group, no_dist)
    saver = _saver(members)
    try:
        _no_planner(planner)
        writer, path = _writer(checkpoint_id, storage_writer)
        contents = Contents(state_dict, members.rank)
        items, values = _items(contents.items()), json.dumps(contents.values())
    except Exception as error:
        saver.fail(str(error))  # the other ranks raise it too
        raise
    return getattr(saver, call)(
        items, values, path, writer.step, writer.overwrite, writer.keep_last
    )


def save(
    state_dict,
    *,
    checkpoint_id=None,
    storage_writer=None,
    planner=None,
    process_group=None,
    no_dist=False,
    use_collectives=True,
):
    """Writes a checkpoint into the folder `checkpoint_id`. Every rank of `process_group` calls it
    with a state of the same names; None is the default group, of muster or else of stock torch, or
    this process alone where there is none (or with no_dist).

    state_dict: a nested dictionary of modules, optimizers, tensors (also DTensors and `Shard`s),
    samplers, `RandomState`, anything with state_dict and load_state_dict, and values that JSON can
    say. Parts that several ranks have alike are written by one of them; values are rank 0's.
    Returns when it is on the disk; until then the checkpoint that was at that path is whole. Raises
    on all ranks where one cannot save."""
    _begin("save", state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist)


def async_save(
    state_dict,
    *,
    checkpoint_id=None,
    storage_writer=None,
    planner=None,
    process_group=None,
    async_checkpointer_type=None,
    async_stager=None,
    no_dist=False,
    use_collectives=True,
):
    """As `save`, returning a concurrent.futures.Future when this rank's part has been copied into
    memory: the program may go on to change it. A thread writes. The next save of the group waits
    for it; take `result()` before the group is destroyed.
    """
    if async_stager is not None:
        refuse("async_stager is not there: what is written is copied into memory that stays")
    saving = _begin(
        "async_save", state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist
    )
    future = _Future(saving)
    future.set_running_or_notify_cancel()

    def end():
        try:
            saving.wait_unheard()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=end, name="muster-checkpoint").start()
    return future


def _refuse_different(told):
    """On every rank where two have opened different checkpoints."""
    first, *others = map(json.loads, told)
    for rank, each in enumerate(others, 1):
        if each[0] != first[0]:
            refuse(
                f"the ranks load different checkpoints: rank 0 {first[1]} saved at {first[2]}, "
                f"rank {rank} {each[1]} saved at {each[2]}; "
                "give all the same one (ask latest() on one rank and broadcast its answer)"
            )


def load(
    state_dict,
    *,
    checkpoint_id=None,
    storage_reader=None,
    planner=None,
    process_group=None,
    no_dist=False,
):
    """Fills `state_dict` in place from the checkpoint in the folder `checkpoint_id`, which every
    rank can read: tensors, modules, optimizers (whose state is made where there is none), samplers,
    random states; values are put into the dictionaries. Each rank reads only the bytes of tensors
    that it needs. A tensor of another floating-point or integer type than was saved is cast. A
    dictionary that is empty gets what was saved of it. Raises on all ranks, naming tensor and file,
    where one has no such tensor or value, other sizes, an optimizer of another class or other
    parameters, all before anything is filled; or damaged bytes.
    """
    members = Members(process_group, no_dist, loads=True)
    contents = index = items = why = None
    mine = ""
    try:
        _no_planner(planner)
        reader = storage_reader or FileSystemReader(
            refuse("give checkpoint_id, the folder of the checkpoint")
            if checkpoint_id is None
            else checkpoint_id
        )
        if not hasattr(reader, "safetensors"):
            refuse(
                f"storage_reader is a {type(reader).__name__}; give one of muster.checkpoint's, or "
                "checkpoint_id alone"
            )
        index = _C._CheckpointIndex.open(
            os.fspath(checkpoint_id or reader.path), reader.safetensors
        )
        contents = Contents(state_dict, members.rank)
        items = _items(contents.wanted(index, with_values=not reader.safetensors))
        _C._checkpoint_check(index, items)
        mine = json.dumps([index.digest, index.folder, index.saved_at])
    except Exception as error:
        why = error
    try:
        told = _C._checkpoint_agree(members.native, None if why is None else str(why), mine)
    except Exception:
        if why is not None:
            raise why from None
        raise
    _refuse_different(told)
    _C._checkpoint_load(index, items, members.native)
    contents.fill()


def latest(folder):
    """The newest checkpoint in a folder, by its step and the order of the commits: what to load
    after a restart. None where there is none.
    """
    return next(reversed(_C._checkpoints_in(os.fspath(folder))), None)

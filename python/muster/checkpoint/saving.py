"""save, load and async_save."""

import concurrent.futures
import json
import os
import threading
import weakref

from muster import _C

from .contents import Contents
from .ranks import Members
from .shard import refuse
from .storage import FileSystemReader, FileSystemWriter

_savers = weakref.WeakKeyDictionary()  # by group: saves wait for each other


class _Alone:
    """In place of a group."""


_alone = _Alone()


def _saver(members):
    key = _alone if members.key is None else members.key
    if key not in _savers:
        _savers[key] = _C._CheckpointSaver(members.native)
    return _savers[key]


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
            f"storage_writer is a {type(storage_writer).__name__}; give a muster.checkpoint.FileSystemWriter or checkpoint_id alone"
        )
    return storage_writer, os.fspath(checkpoint_id or storage_writer.path)


def _begin(call, state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist):
    members = Members(process_group, no_dist)
    saver = _saver(members)
    try:
        _no_planner(planner)
        writer, path = _writer(checkpoint_id, storage_writer)
        contents = Contents(state_dict, members.rank)
        items, values = contents.items(), json.dumps(contents.values())
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
    """Writes a checkpoint into the folder `checkpoint_id`. Every rank of `process_group` calls it with a state of the same names; None is the
    default group, of muster or else of stock torch, or this process alone where there is none (or with no_dist).

    state_dict: a nested dictionary of modules, optimizers, tensors (also DTensors and `Shard`s), samplers, `RandomState`, anything with
    state_dict and load_state_dict, and values that JSON can say. What is the same on several ranks is written by one of them; values are
    rank 0's. Returns when it is on the disk; what was at that path is whole until then. Raises on all ranks where one cannot save."""
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
    """As `save`, returning a concurrent.futures.Future when this rank's part has been copied into memory: the program may go on to change
    it. A thread writes. The next save of the group waits for it; take `result()` before the group is destroyed."""
    if async_stager is not None:
        refuse("async_stager is not there: what is written is copied into memory that stays")
    saving = _begin(
        "async_save", state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist
    )
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def end():
        try:
            saving.wait()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=end, name="muster-checkpoint").start()
    return future


def load(
    state_dict,
    *,
    checkpoint_id=None,
    storage_reader=None,
    planner=None,
    process_group=None,
    no_dist=False,
):
    """Fills `state_dict` in place from the checkpoint in the folder `checkpoint_id`, which every rank can read: tensors, modules, optimizers
    (whose state is made where there is none), samplers, random states; values are put into the dictionaries. Of tensors each rank reads
    the bytes that it needs. A tensor of another floating-point or integer type than was saved is cast. Raises on all ranks, naming tensor
    and file, where one has no such tensor or value, other sizes, or damaged bytes."""
    members = Members(process_group, no_dist)
    contents = index = items = why = None
    try:
        _no_planner(planner)
        reader = storage_reader or FileSystemReader(
            refuse("give checkpoint_id, the folder of the checkpoint")
            if checkpoint_id is None
            else checkpoint_id
        )
        if not hasattr(reader, "safetensors"):
            refuse(
                f"storage_reader is a {type(reader).__name__}; give one of muster.checkpoint's, or checkpoint_id alone"
            )
        index = _C._CheckpointIndex.open(
            os.fspath(checkpoint_id or reader.path), reader.safetensors
        )
        contents = Contents(state_dict, members.rank)
        items = contents.wanted(index)
    except Exception as error:
        why = error
    try:
        _C._checkpoint_agree(members.native, None if why is None else str(why))
    except Exception:
        if why is not None:
            raise why from None
        raise
    _C._checkpoint_load(index, items, members.native)
    contents.fill(None if reader.safetensors else json.loads(index.values))


def latest(folder):
    """The newest checkpoint in a folder, by the time of its commit: what to load after a restart. None where there is none."""
    return next(reversed(_C._checkpoints_in(os.fspath(folder))), None)

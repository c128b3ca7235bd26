# SPDX-License-Identifier: BSD-3-Clause
"""From and to other forms. `python -m muster.checkpoint` is the same as a command."""

import contextlib
import json
import math
import os
import secrets

import torch

from muster import _C

from . import containers
from .saving import load, save
from .shard import DTYPES, Number, refuse
from .storage import HuggingFaceStorageReader
from .values import decode


def export_safetensors(checkpoint_id, folder, *, prefix="model.", file_bytes=5_000_000_000):
    """Writes the tensors whose names begin with `prefix`, whole and without it, into a new folder:
    ``model-*.safetensors`` of up to `file_bytes` and ``model.safetensors.index.json``, which
    transformers loads. One process; one tensor at a time is in memory.
    """
    index = _C._CheckpointIndex.open(os.fspath(checkpoint_id), False)
    index.export(os.fspath(folder), prefix=prefix, file_bytes=file_bytes)


def local_path(name):
    """A path of this machine, as the names of checkpoints are. Names of other stores are refused
    (s3://bucket).
    """
    return _C._checkpoint_local_path(os.fspath(name))


def check_memory(checkpoint_id):
    """Refuses what memory cannot hold: sizes that a file claims may exceed all of it. The index."""
    index = _C._CheckpointIndex.open(os.fspath(checkpoint_id), False)
    wanted = sum(
        torch.empty(0, dtype=DTYPES[dtype]).element_size() * math.prod(size)
        for dtype, size in index.tensors.values()
    )
    try:
        with open("/proc/meminfo") as about:
            lines = dict(line.split(":", 1) for line in about)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return index
    if wanted > available:
        refuse(f"{wanted} bytes are to be in memory at once, and {available} are available")
    return index


def save_whole(contents, file):
    """As torch.save; what is at `file` is whole until then."""
    beside = f"{file}.{secrets.token_hex(8)}.writing"
    try:
        torch.save(contents, beside)
        os.replace(beside, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def to_torch_save(checkpoint_id, file):
    """Writes `file` as torch.save does: {"tensors": {name: whole tensor}, "values": {name: value}},
    and {"numbers": {name: number}} where an optimizer has whole numbers of a parameter. One
    process, with memory for all.
    """
    file = local_path(file)
    index = check_memory(checkpoint_id)
    flat = {
        name: torch.empty(size, dtype=DTYPES[dtype])
        for name, (dtype, size) in index.tensors.items()
    }
    load(flat, checkpoint_id=checkpoint_id, no_dist=True)
    numbers = {name for name, (dtype, _) in index.tensors.items() if dtype == "INT"}
    values = json.loads(index.values)
    values.pop(containers.NAME, None)
    contents = {
        "tensors": {name: each for name, each in flat.items() if name not in numbers},
        "values": decode(values),
    }
    if numbers:
        contents["numbers"] = {name: int(flat[name]) for name in sorted(numbers)}
    save_whole(contents, file)


def from_torch_save(file, checkpoint_id):
    """A checkpoint of what torch.save wrote: tensors and values, read with weights_only=True, so
    that nothing in the file is run.
    """
    if isinstance(file, str | os.PathLike):
        file = local_path(file)
    state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        refuse(f"{file} holds a {type(state).__name__}; a dictionary is needed")
    if set(state) - {"numbers"} == {"tensors", "values"}:  # what to_torch_save wrote
        numbers = {name: Number(each) for name, each in state.get("numbers", {}).items()}
        state = {**state["tensors"], **numbers, **state["values"]}
    save(state, checkpoint_id=checkpoint_id, no_dist=True)


def from_torch_dcp(folder, checkpoint_id, *, trust=False):
    """A checkpoint of a `.distcp` folder of torch.distributed.checkpoint, read by torch itself. One
    process, with memory for all.

    trust: torch unpickles the folder's .metadata, which runs whatever code its author put there.
    Give True only for folders that you trust; without it nothing is read.
    """
    folder = local_path(folder)
    if not trust:
        refuse(
            f"{folder} is in torch's format, whose .metadata is a pickle: reading it "
            "can run code of its author. If you trust that, give trust=True (--trust)"
        )
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    save(state, checkpoint_id=checkpoint_id, no_dist=True)


def from_safetensors(folder, checkpoint_id):
    """A checkpoint of a folder of safetensors files (torch's HuggingFaceStorageWriter, others)."""
    reader = HuggingFaceStorageReader(folder)
    _C._checkpoint_import(reader.path, os.fspath(checkpoint_id))

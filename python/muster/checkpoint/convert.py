"""From and to other forms. `python -m muster.checkpoint` is the same as a command."""

import os

import torch

from muster import _C

from .saving import load, save
from .shard import DTYPES, refuse
from .storage import HuggingFaceStorageReader


def export_safetensors(checkpoint_id, folder, *, prefix="model.", file_bytes=5_000_000_000):
    """Writes the tensors whose names begin with `prefix`, whole and without it, into a new folder:
    ``model-*.safetensors`` of up to `file_bytes` and ``model.safetensors.index.json``, which
    transformers loads. One process; one tensor at a time is in memory.
    """
    index = _C._CheckpointIndex.open(os.fspath(checkpoint_id), False)
    index.export(os.fspath(folder), prefix=prefix, file_bytes=file_bytes)


def _empty(tensors):
    """Nested dictionaries as the names say, with memory for the tensors."""
    state = {}
    for name, (dtype, size) in tensors.items():
        *path, last = name.split(".")
        at = state
        for each in path:
            at = at.setdefault(each, {})
        at[last] = torch.empty(size, dtype=DTYPES[dtype])
    return state


def to_torch_save(checkpoint_id, file):
    """Writes `file` as torch.save does: {"tensors": {name: whole tensor}, "values": {name: value}}.
    One process, with memory for all.
    """
    import json

    from .values import decode

    index = _C._CheckpointIndex.open(os.fspath(checkpoint_id), False)
    flat = {
        name: torch.empty(size, dtype=DTYPES[dtype])
        for name, (dtype, size) in index.tensors.items()
    }
    load(flat, checkpoint_id=checkpoint_id, no_dist=True)
    torch.save({"tensors": flat, "values": decode(json.loads(index.values))}, file)


def from_torch_save(file, checkpoint_id):
    """A checkpoint of what torch.save wrote: tensors and values, read with weights_only=True, so
    that nothing in the file is run.
    """
    state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        refuse(f"{file} holds a {type(state).__name__}; a dictionary is needed")
    if set(state) == {"tensors", "values"}:  # what to_torch_save wrote
        state = {**state["tensors"], **state["values"]}
    save(state, checkpoint_id=checkpoint_id, no_dist=True)


def from_torch_dcp(folder, checkpoint_id):
    """A checkpoint of a `.distcp` folder of torch.distributed.checkpoint, read by torch itself,
    which unpickles its metadata: only for folders that you trust. One process, with memory for all.
    """
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

# SPDX-License-Identifier: BSD-3-Clause
"""Sharded checkpoints under torch.distributed.checkpoint's names: saved by any number of ranks,
loaded by any other, however the model is wrapped there.

    from muster import checkpoint
    state = {"model": model, "optimizer": optimizer, "step": 3}
    checkpoint.save(state, checkpoint_id="run/step-3")
    checkpoint.load(state, checkpoint_id="run/step-3")     # in place

Give modules and optimizers themselves, not their `state_dict()`: what of them is sharded, and how,
is then known. No pickle is written or read. The format is sharded safetensors, which torch's
HuggingFaceStorageReader reads too (docs/user/checkpoints.md).
"""

from .convert import export_safetensors, from_torch_dcp, from_torch_save, to_torch_save
from .ranks import RandomState
from .saving import async_save, latest, load, save
from .shard import Shard
from .storage import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
)

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "RandomState",
    "Shard",
    "async_save",
    "export_safetensors",
    "from_torch_dcp",
    "from_torch_save",
    "latest",
    "load",
    "save",
    "to_torch_save",
]

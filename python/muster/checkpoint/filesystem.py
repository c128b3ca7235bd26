# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.filesystem's names for a checkpoint's folder. Its other names say
how torch writes files, or on what else than file systems; muster writes safetensors files in C++.
"""

from .storage import FileSystemReader, FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter"]

_ABSENT = {
    "FileSystem": "checkpoints are folders of a mounted file system",
    "FileSystemBase": "checkpoints are folders of a mounted file system",
    "SerializationFormat": "checkpoints are safetensors files",
}


def __getattr__(name):
    why = f" of torch's: {_ABSENT[name]}" if name in _ABSENT else ""
    raise AttributeError(f"module '{__name__}' has no '{name}'{why}")

# SPDX-License-Identifier: BSD-3-Clause
"""The places of checkpoints, under torch's names."""

import os


class _Storage:
    def __init__(self, path):
        self.path = os.fspath(path)


class FileSystemWriter(_Storage):
    """Writes a checkpoint into the folder `path`. overwrite=False: one that is there is an error.
    keep_last: of the checkpoints in the folder around it so many stay, this one included; 0: all.
    step: shown by `muster checkpoint ls`.

    Torch's further arguments single_file_per_rank, sync_files, thread_count and the like say how to
    write; here there is one way, and it is on the disk when saving returns."""

    def __init__(self, path, *, overwrite=True, keep_last=0, step=None, **_of_torch):
        super().__init__(path)
        self.overwrite, self.keep_last, self.step = overwrite, keep_last, step


class FileSystemReader(_Storage):
    """Reads a checkpoint of muster's in the folder `path`."""

    safetensors = False


class HuggingFaceStorageReader(_Storage):
    """Reads a folder of safetensors files: what torch's HuggingFaceStorageWriter wrote, sharded or
    not, or a model as transformers saves it. Values that are no tensors are not in it, and stay as
    they are.
    """

    safetensors = True

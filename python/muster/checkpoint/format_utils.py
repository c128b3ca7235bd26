# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.format_utils' functions, for checkpoints of muster's."""

from . import convert
from .saving import load

__all__ = ["dcp_to_torch_save", "torch_save_to_dcp"]

_ABSENT = ("BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner")


def dcp_to_torch_save(dcp_checkpoint_dir, torch_save_path):
    """Writes the checkpoint in a folder as one file of torch.save, with the dictionaries that were
    saved. One process, with memory for all. A folder in torch's own format (`.distcp`) is refused:
    `convert.from_torch_dcp` reads it where it is trusted.
    """
    file = convert.local_path(torch_save_path)
    convert.check_memory(dcp_checkpoint_dir)
    state = {}
    load(state, checkpoint_id=dcp_checkpoint_dir, no_dist=True)
    convert.save_whole(state, file)


def torch_save_to_dcp(torch_save_path, dcp_checkpoint_dir):
    """A checkpoint of what torch.save wrote, read with weights_only=True."""
    convert.from_torch_save(torch_save_path, dcp_checkpoint_dir)


def __getattr__(name):
    why = (
        ": checkpoints of muster's have no planners and no such readers" if name in _ABSENT else ""
    )
    raise AttributeError(f"module '{__name__}' has no '{name}'{why}")

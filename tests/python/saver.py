# SPDX-License-Identifier: BSD-3-Clause
"""A process that saves a checkpoint, for tests of several that meet."""

import os


def save(answer, environment, value, path, step, call, loads):
    """Tells the pipe `answer` what became of a save of `value` at `path`. `step`: none, a number,
    or a number and how many checkpoints are kept; `loads`: what is loaded first, or None.
    """
    os.environ.update(environment)
    import torch

    from muster import checkpoint

    writer = checkpoint.FileSystemWriter(
        path, step=step[0] if step else None, keep_last=step[1] if step[1:] else 0
    )
    state = {"a": torch.full((4,), float(value))}
    if loads is not None:
        checkpoint.load({"a": torch.zeros(4)}, checkpoint_id=loads, no_dist=True)
    try:
        if call == "save":
            checkpoint.save(state, storage_writer=writer, no_dist=True)
        else:
            checkpoint.async_save(state, storage_writer=writer, no_dist=True).result()
        answer.send("saved")
    except Exception as error:
        answer.send(f"refused: {error}")

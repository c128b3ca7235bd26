"""What wrappers around a module ask of it and of what its forward gives."""

import dataclasses

import torch

from muster import _C


def tensors_in(value, found):
    """Those that a loss can be made of."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            tensors_in(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            tensors_in(each, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            tensors_in(getattr(value, field.name, None), found)
    return found


def refuse_sync_batch_norm(module, wrapper):
    """It asks torch.distributed for the other ranks, and where that has none its statistics are each rank's own, without a word."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    found = [
        name for name, each in module.named_modules() if isinstance(each, torch.nn.SyncBatchNorm)
    ]
    if found:
        raise _C.DistArgumentError(
            f"{wrapper}: {', '.join(found)}: SyncBatchNorm sums up over a group of torch.distributed's, and there is none. Use BatchNorm, "
            "or torch's own after torch.distributed.init_process_group('muster')"
        )

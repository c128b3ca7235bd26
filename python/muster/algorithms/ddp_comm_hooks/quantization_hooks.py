# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that travel as bytes, each with the range of what it stands for."""

import torch

import muster as dist

from .lazily import Lazily

__all__ = ["quantization_pertensor_hook", "quantization_perchannel_hook"]

_STEPS = 255


def _quantized(rows):
    """Each row as bytes, and what a byte stands for there: a step, and the value of 0."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = ((high - low) / _STEPS).clamp_min(torch.finfo(rows.dtype).tiny)
    return ((rows - low) / step).round().clamp(0, _STEPS).to(torch.uint8), torch.cat([step, low], 1)


def _averaged(rows, group):
    """The average of all members' rows, quantized as they arrive."""
    size = group.size()
    data, scales = _quantized(rows)
    all_data = data.new_empty(size, *data.shape)
    all_scales = scales.new_empty(size, *scales.shape)
    dist.all_gather_into_tensor(all_scales, scales, group=group)
    dist.all_gather_into_tensor(all_data, data, group=group)
    total = torch.zeros_like(rows)
    for each, (step, low) in zip(all_data, (scale.split(1, dim=1) for scale in all_scales)):
        total += each * step + low
    return total / size


def quantization_pertensor_hook(process_group, bucket):
    """The average of what every rank rounds to one of 256 values between its bucket's least and
    greatest: a byte for each gradient.
    process_group: None is the model's own."""
    group = bucket.group if process_group is None else process_group
    buffer = bucket.buffer()
    return Lazily(lambda: _averaged(buffer.view(1, -1), group).view_as(buffer))


def quantization_perchannel_hook(process_group, bucket, bucket_size=512):
    """The same, with a range of its own for each bucket_size gradients: closer where gradients of
    one bucket differ in size.
    """
    group = bucket.group if process_group is None else process_group
    buffer = bucket.buffer()

    def averaged():
        padding = -buffer.numel() % bucket_size
        rows = torch.nn.functional.pad(buffer, (0, padding)).view(-1, bucket_size)
        return _averaged(rows, group).view(-1)[: buffer.numel()].view_as(buffer)

    return Lazily(averaged)

# SPDX-License-Identifier: BSD-3-Clause
"""A part of a tensor, and which part of it other tensors are."""

import dataclasses
import sys

import torch

from muster import _C


@dataclasses.dataclass
class Shard:
    """This rank's part of a whole tensor, for values of a state that are no parameters of a sharded
    module.

    tensor: what this rank has. size: of the whole tensor. offsets: where the box that `tensor` is
    begins, a number per dimension; or one
    number: `tensor` is the stretch of the whole's row-major elements from that one on."""

    tensor: torch.Tensor
    size: tuple
    offsets: object


#: In the place of an item: a whole number of Python's, as a tensor without dimensions.
NUMBER = -1


class Number(int):
    """A whole number that is stored as a tensor: an optimizer's state of a parameter."""


def refuse(text):
    """Raises what bad arguments raise."""
    raise _C.DistArgumentError(f"checkpoint: {text}")


def is_dtensor(value):
    """Whether it is a DTensor of stock torch, which is not imported for programs without any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def item(name, value):
    """(name, tensor, size of the whole, place) as the C++ half takes it, of a tensor of any kind;
    None where this rank has nothing of it.
    """
    if isinstance(value, Number):
        return (name, torch.tensor(int(value), dtype=torch.int64), [], NUMBER)
    if isinstance(value, Shard):
        tensor, size, place = value.tensor, list(value.size), value.offsets
        if isinstance(place, int) and place < 0:
            refuse(f"'{name}' is a Shard whose elements begin at number {place}")
        return (name, tensor, size, int(place) if isinstance(place, int) else list(place))
    if is_dtensor(value):
        chunks = value.__create_chunk_list__()
        if not chunks:
            return None
        if len(chunks) > 1:
            refuse(f"'{name}' is a DTensor of several pieces on a rank, which are not saved")
        local = value.to_local()
        local = local.wait() if hasattr(local, "wait") else local
        return (name, local, list(value.size()), list(chunks[0].offsets))
    part = _C._sharded_part(value)
    if part is not None:
        return (name, value, *part)
    return (name, value, list(value.shape), None)


def is_tensor(value):
    """Whether `item` takes it."""
    return isinstance(value, (torch.Tensor, Shard, Number))


def beside(name, value, parameter):
    """The item of a tensor that an optimizer keeps of a parameter: divided as that is where it is
    like it.
    """
    if not is_dtensor(value) and value.shape == parameter.shape:
        part = _C._sharded_part(parameter)
        if part is not None:
            return (name, value, *part)
    return item(name, value)


def whole_size(parameter):
    """The sizes of the whole parameter, as a list."""
    part = None if is_dtensor(parameter) else _C._sharded_part(parameter)
    return list(parameter.shape) if part is None else part[0]


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4_E2M1X2": torch.float4_e2m1fn_x2,
    "C32": torch.complex32,
    "C128": torch.complex128,
    "INT": torch.int64,  # a number of Python's
}

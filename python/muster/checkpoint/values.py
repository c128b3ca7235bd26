# SPDX-License-Identifier: BSD-3-Clause
"""Values other than tensors, as JSON and back: None, bool, int, float, str, bytes, list, tuple,
set, dict with any of these as keys, torch.Size, torch.dtype, torch.device and numbers of numpy's.
Reading runs no code.
"""

import base64
import math

import torch

_KIND = "__muster__"


def encode(value, name):
    """`value` as what json.dumps takes; raises DistArgumentError naming it for a type that has no
    form here.
    """
    from .shard import refuse

    def wrapped(kind, of):
        return {_KIND: kind, "of": of}

    def all_of(values):
        return [encode(each, name) for each in values]

    if isinstance(value, float) and not math.isfinite(value):
        return wrapped("float", repr(value))
    if type(value) is int and not -(2**63) <= value < 2**64:
        return wrapped("int", hex(value))  # as a number of JSON's it would be read as a float
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return wrapped("bytes", base64.b64encode(value).decode())
    if isinstance(value, list):
        return all_of(value)
    if isinstance(value, torch.Size):
        return wrapped("size", list(value))
    if isinstance(value, tuple):
        return wrapped("tuple", all_of(value))
    if isinstance(value, (set, frozenset)):
        return wrapped("set", all_of(sorted(value, key=repr)))
    if isinstance(value, torch.dtype):
        return wrapped("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return wrapped("device", str(value))
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: encode(each, name) for key, each in value.items()}
        return wrapped("dict", [all_of(pair) for pair in value.items()])
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return encode(value.item(), name)
    if isinstance(value, (bool, int, float, str)):  # classes made of them, such as enumerations
        return encode({bool: bool, int: int, float: float, str: str}[_base(value)](value), name)
    refuse(
        f"'{name}' is a {type(value).__module__}.{type(value).__qualname__}, which is no tensor "
        "and has no form as JSON: give its "
        "state_dict(), or a dict, list, number, text or bytes that it can be made of"
    )


def _base(value):
    return next(each for each in (bool, int, float, str) if isinstance(value, each))


def _dtype(name):
    from .shard import refuse

    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else refuse(f"torch has no dtype {name!r}")


def decode(value):
    """The way back."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(each) for key, each in value.items()}
    of = value["of"]
    return {
        "int": lambda: int(of, 16),
        "float": lambda: float(of),
        "bytes": lambda: base64.b64decode(of),
        "size": lambda: torch.Size(of),
        "tuple": lambda: tuple(decode(of)),
        "set": lambda: set(decode(of)),
        "dtype": lambda: _dtype(of),
        "device": lambda: torch.device(of),
        "dict": lambda: {decode(key): decode(each) for key, each in of},
    }[value[_KIND]]()

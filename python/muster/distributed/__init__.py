"""muster's names under torch.distributed's path: `muster.distributed.nn.functional` for `torch.distributed.nn.functional`."""

from typing import Any

import muster as _muster
from muster import *  # noqa: F403

__all__ = _muster.__all__


def __getattr__(name: str) -> Any:
    if name == "nn":  # torch.distributed's, which is a part of muster's
        import importlib

        return importlib.import_module(".nn", __name__)
    return getattr(_muster, name)

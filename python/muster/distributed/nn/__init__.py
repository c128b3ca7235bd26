"""torch.distributed.nn's names: collectives that gradients flow through, and RemoteModule."""

from typing import Any

from . import functional  # noqa: F401
from .functional import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "RemoteModule":  # it brings calls to other workers along
        from muster.nn import RemoteModule

        return RemoteModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

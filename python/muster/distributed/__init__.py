# SPDX-License-Identifier: BSD-3-Clause
"""muster's names under torch.distributed's path: `muster.distributed.fsdp` is `muster.fsdp`, and so
on for every module.
"""

from typing import Any

import muster as _muster
from muster import *  # noqa: F403

__all__ = _muster.__all__


def __getattr__(name: str) -> Any:
    return getattr(_muster, name)

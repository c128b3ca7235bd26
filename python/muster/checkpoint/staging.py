# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.staging has classes that say how an asynchronous save copies its
state. muster has one way, a copy into memory that stays for the next save, and none of these names;
`async_save` refuses `async_stager`.
"""

__all__ = []

_ABSENT = ("AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions")


def __getattr__(name):
    why = ": async_save copies into memory that stays, without options" if name in _ABSENT else ""
    raise AttributeError(f"module '{__name__}' has no '{name}'{why}")

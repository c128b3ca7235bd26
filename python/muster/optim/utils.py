# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.optim.utils' names: torch's own, which know of no other rank."""

from torch.distributed.optim.utils import as_functional_optim, register_functional_optim

__all__ = ["as_functional_optim", "register_functional_optim"]

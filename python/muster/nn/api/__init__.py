# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.nn.api's name."""

from .remote_module import RemoteModule  # noqa: F401

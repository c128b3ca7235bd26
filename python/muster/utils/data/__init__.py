# SPDX-License-Identifier: BSD-3-Clause
"""torch.utils.data's names where they ask who is in the job."""

from .distributed import DistributedSampler  # noqa: F401

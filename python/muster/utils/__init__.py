# SPDX-License-Identifier: BSD-3-Clause
"""torch.utils' names where they ask who is in the job."""

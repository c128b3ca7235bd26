# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.algorithms.model_averaging's names: parameters that are averaged now and then,
instead of gradients in every pass.
"""

from . import averagers, hierarchical_model_averager, utils  # noqa: F401

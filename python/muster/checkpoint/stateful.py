# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.stateful's names: anything with `state_dict` and `load_state_dict`
can be in a state, whether it says so by `Stateful` or not.
"""

from torch.distributed.checkpoint.stateful import Stateful, StatefulT

__all__ = ["Stateful", "StatefulT"]

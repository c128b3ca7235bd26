# SPDX-License-Identifier: BSD-3-Clause
"""Averages within small groups often, and within large ones seldom (hierarchical SGD)."""

import warnings
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

import muster as dist

from . import averagers, utils

__all__ = ["HierarchicalModelAverager"]


class HierarchicalModelAverager(averagers.ModelAverager):
    """period_group_size_dict: an ordered dict from a period to the number of consecutive ranks that
    average then, both growing; the last one's is the number of ranks of `process_group`. If the
    number of the step is a multiple of several periods, the largest counts. The first warmup_steps
    calls average nothing. Makes the smaller groups: every rank of the default group makes it.

    Raises ValueError for an empty dict, a period below 1, a last size that is not the group's, and
    warmup_steps below 0.
    """

    def __init__(
        self,
        period_group_size_dict: "OrderedDict[int, int] | None" = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ValueError("Arg ``period_group_size_dict`` must not be empty.")
        periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        if periods[0] <= 0:
            raise ValueError(
                "The minimum period in arg ``period_group_size_dict`` must be a positive value."
            )
        if sizes[-1] != self.process_group.size():
            raise ValueError(
                f"The last value in arg ``period_group_size_dict`` {sizes[-1]} must be equal to "
                "the size of arg "
                f"``process_group`` {self.process_group.size()}."
            )
        if warmup_steps < 0:
            raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")
        if periods[0] == 1:
            warnings.warn(
                "HierarchicalModelAverager: with a period of 1, averaging gradients in backward "
                "costs less",
                stacklevel=2,
            )
        self.warmup_steps = warmup_steps
        self._periods = list(reversed(periods))
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        for period, size in period_group_size_dict.items():
            whole = size == self.process_group.size()
            mine = self.process_group if whole else dist.new_subgroups(size, self.process_group)[0]
            self.period_process_group_dict[period] = mine

    def _find_process_group(self) -> dist.ProcessGroup | None:
        for period in self._periods:
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> None:
        """Averages those parameters, or those of parameter groups, that have a gradient."""
        if self.step >= self.warmup_steps:
            group = self._find_process_group()
            if group is not None:
                utils.average_parameters_or_parameter_groups(params, group)
        self.step += 1

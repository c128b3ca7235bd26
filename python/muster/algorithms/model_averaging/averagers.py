# SPDX-License-Identifier: BSD-3-Clause
"""When parameters are averaged."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

import muster as dist

from . import utils

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """Averages parameters over `process_group` (None: the default group); `step` counts the calls,
    from 0.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Any) -> None:
        """Called after each step of the optimizer, on every rank."""


class PeriodicModelAverager(ModelAverager):
    """Every `period`th call averages, from the call of number `warmup_steps` on; until then
    gradients are averaged in another way, as DistributedDataParallel does. Raises ValueError for a
    period of 0 or less, and for warmup_steps below 0. With a period of 1 a plain
    DistributedDataParallel does the same with less traffic.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")
        if period <= 0:
            raise ValueError("Arg ``period`` must be a positive value.")
        if period == 1:
            warnings.warn(
                "PeriodicModelAverager: with a period of 1, averaging gradients in backward costs "
                "less",
                stacklevel=2,
            )
        self.period, self.warmup_steps = period, warmup_steps

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> None:
        """Averages those parameters, or those of parameter groups, that have a gradient."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            utils.average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1

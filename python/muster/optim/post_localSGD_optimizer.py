# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer whose steps are followed by averages of the parameters."""

import warnings

import torch

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Any optimizer, after each of whose steps `averager` (a ModelAverager) averages its
    parameters: post-local SGD, beside the hook of that name in the model. Its state and parameter
    groups are the optimizer's; `state_dict` has the averager's step too.
    """

    def __init__(self, optim, averager):
        self.optim, self.averager = optim, averager
        self.param_groups = optim.param_groups

    @property
    def state(self):
        """The optimizer's."""
        return self.optim.state

    def __repr__(self):
        return repr(self.optim)

    def state_dict(self):
        """The optimizer's, and `step`, how often it has been stepped."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict):
        """After a state without `step` the averager begins anew, with a warning."""
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step "
                "counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self):
        """The optimizer's step; then the averager's, collective when it averages."""
        self.optim.step()
        self.averager.average_parameters(params=self.param_groups)

    def zero_grad(self, set_to_none=True):
        """The optimizer's."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group):
        """The optimizer's."""
        self.optim.add_param_group(param_group)

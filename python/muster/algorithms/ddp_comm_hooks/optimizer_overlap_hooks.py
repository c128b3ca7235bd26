# SPDX-License-Identifier: BSD-3-Clause
"""The step of an optimizer as part of backward."""

import torch

from .lazily import Lazily

__all__: list[str] = []


class _OptimizerHookState:
    """functional_optimizer: as `as_functional_optim` makes them, with a method
    step_param(parameter, gradient). params_to_optimize: those that it steps; None: all.
    """

    def __init__(self, functional_optim, params=None):
        if not hasattr(functional_optim, "step_param"):
            raise ValueError(f"Class {type(functional_optim)} must implement method step_param.")
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)


class _OptimizersOfParameters:
    """Those that torch.distributed.optim._apply_optimizer_in_backward gave to parameters, as one
    functional optimizer. They step once the gradient is averaged; torch's own hooks of them, which
    step with each rank's own, are removed.
    """

    def __init__(self, parameters):
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map as handles,
        )

        self._left = []  # parameters that have been stepped: their gradients are used up
        for each in parameters:
            for handle in handles.get(each, ()):
                handle.remove()
            handles.pop(each, None)

    def step_param(self, parameter, gradient):
        parameter.grad = gradient
        for optimizer in parameter._in_backward_optimizers:
            optimizer.step()
        self._left.append(parameter)

    def forget_gradients(self):
        for each in self._left:
            each.grad = None
        self._left.clear()


def _hook_then_optimizer(hook, optimizer_state):
    """Runs `hook`, and then the step of each parameter of the bucket with its averaged gradient."""

    def with_step(state, bucket):
        pending = hook(state, bucket)

        def stepped():
            value = pending.wait()
            averaged = value[0] if isinstance(value, (list, tuple)) else value
            buffer = bucket.buffer()
            if averaged is not buffer:
                buffer.copy_(averaged.view(-1))
            chosen = optimizer_state.params_to_optimize
            with torch.no_grad():
                for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
                    if chosen is None or parameter in chosen:
                        optimizer_state.functional_optimizer.step_param(parameter, gradient)
            return buffer

        return Lazily(stepped)

    return with_step

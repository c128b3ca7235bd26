# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer over parameters that live on several workers."""

import threading

import torch

from .. import autograd, rpc
from ..rpc import inside

# All steps on one worker come one after the other, whichever optimizers and trainers they are of:
# parameters may be shared.
_one_steps = threading.Lock()


class _OwnerOptimizer:
    """One owner's part."""

    def __init__(self, optimizer_class, parameters, args, kwargs):
        self.parameters = [each.local_value() for each in parameters]
        for each in self.parameters:
            if not isinstance(each, torch.Tensor) or not each.is_leaf or not each.requires_grad:
                raise ValueError(
                    "DistributedOptimizer: parameters are leaf tensors that require grad"
                )
        # The same memory with a version count and a grad of their own: what another trainer's
        # forward has saved stays usable, and no step sees another's gradients.
        self.views = [each.data.requires_grad_(True) for each in self.parameters]
        self.optimizer = optimizer_class(self.views, *args, **kwargs)

    def step(self, context_id):
        gradients = autograd.get_gradients(context_id)
        with _one_steps:
            try:
                for parameter, view in zip(self.parameters, self.views):
                    if view.data_ptr() != parameter.data_ptr():
                        view.data = parameter.data  # it has been given other memory
                    gradient = gradients.get(parameter)
                    view.grad = None if gradient is None else gradient.detach()
                self.optimizer.step()
            finally:
                for view in self.views:
                    view.grad = None


def _make(optimizer_class, parameters, args, kwargs):
    inside.check_call(optimizer_class, (parameters, *args), kwargs)
    return rpc.RRef(_OwnerOptimizer(optimizer_class, parameters, args, kwargs))


def _step(optimizer, context_id):
    local = optimizer.local_value()
    if not isinstance(local, _OwnerOptimizer):
        raise ValueError(
            f"DistributedOptimizer: the reference is to {type(local).__name__}, which is no "
            "optimizer of its"
        )
    local.step(context_id)


def _all(futures):
    """Their values, once all have come to an end; raises what the first of them failed with."""
    for each in futures:
        try:
            each.wait()
        except Exception:
            pass  # raised below
    return [each.wait() for each in futures]


class DistributedOptimizer:
    """One optimizer per owner of the parameters, torch.distributed.optim's.

    optimizer_class: any of torch.optim's but LBFGS, which asks for the loss again and again, or one
    of your own that both sides can import.
    params_rref: RRefs to the parameters, of any owners, each once. The rest goes to the optimizer's
    constructor. Blocks until all owners have made theirs; raises what their constructors raise.

    Several trainers may step at once, through one of these or through their own over the same
    parameters: on an owner one step runs after the other, whole, each with the gradients of its own
    context only, from the parameters that the one before it left.
    """

    def __init__(self, optimizer_class, params_rref, *args, **kwargs):
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise ValueError(
                "DistributedOptimizer cannot run LBFGS: it asks for the loss again and again "
                "within one step"
            )
        by_owner = {}
        for each in params_rref:
            by_owner.setdefault(each.owner(), []).append(each)
        if not by_owner:
            raise ValueError("DistributedOptimizer needs parameters")
        self.remote_optimizers = _all(
            [
                rpc.rpc_async(owner, _make, (optimizer_class, of_owner, args, kwargs))
                for owner, of_owner in by_owner.items()
            ]
        )

    def step(self, context_id):
        """Applies the gradients that the context has, on every owner; a parameter without one stays
        as it is. Blocks until all have stepped; then raises the first failure.
        """
        _all(
            [
                rpc.rpc_async(each.owner(), _step, (each, context_id))
                for each in self.remote_optimizers
            ]
        )

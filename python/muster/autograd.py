# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of what was computed on several workers: torch.distributed.autograd's names.
docs/user/dist-autograd.md tells of the rest.
"""

from . import (
    _C,
    rpc,  # noqa: F401  no context without it
)

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available():
    """True wherever muster can be imported."""
    return True


class context:
    """`with context() as context_id:` what is computed inside, here and by calls to other workers,
    belongs to that context. One at a time per thread; where it ends, what all workers keep for it
    goes too.
    """

    def __init__(self):
        self._context = _C._AutogradContext()

    def __enter__(self):
        return self._context.enter()

    def __exit__(self, *_):
        self._context.leave()


def backward(context_id, roots, retain_graph=False, *, mode="fast"):
    """Backward from scalar tensors of this worker; blocks until the whole job's part of the graph
    is done.

    mode: "fast", or "smart", which first finds out what the roots depend on, so that calls whose
    results are not used do no harm. Gradients go to the context, not to `.grad`. Raises DistError
    where the context is unknown here or a root is no scalar that requires grad, and what a backward
    function raises, with its worker.
    """
    _C._autograd_backward(context_id, list(roots), retain_graph, mode)


def get_gradients(context_id):
    """The gradients that backward has summed up for leaves of this worker: a dict by tensor."""
    return _C._autograd_gradients(context_id)

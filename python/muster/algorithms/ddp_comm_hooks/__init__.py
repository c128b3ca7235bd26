"""torch.distributed.algorithms.ddp_comm_hooks' names: what happens to a bucket of gradients between backward and the optimizer.

`model.register_comm_hook(state, hook)`: hooks of these modules run in C++. One of your own is any callable `hook(state, bucket)` that starts
the communication of a bucket and returns what `wait()` of gives the tensor for the optimizer: a `torch.futures.Future`, or `lazily(f)`.
"""

from . import ddp_zero_hook, default_hooks, powerSGD_hook  # noqa: F401
from .lazily import Lazily, lazily  # noqa: F401

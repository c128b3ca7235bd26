"""`muster.nn.functional` under torch.distributed's path."""

from muster.nn.functional import *  # noqa: F403
from muster.nn.functional import __all__, _all_gather_base  # noqa: F401

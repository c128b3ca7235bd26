"""torch.nn's names that train on several ranks: `muster.nn.parallel`."""

from . import parallel  # noqa: F401

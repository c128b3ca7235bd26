"""muster: torch.distributed's interface on an engine of its own. `import muster as dist`.

`muster.torch` registers the same engine as a backend of stock torch.
"""

import torch as _torch

from ._build import TORCH_VERSION as _BUILT_FOR
from ._build import VERSION as __version__

if _torch.__version__.split("+")[0] != _BUILT_FOR:
    raise ImportError(
        f"this muster was built for torch {_BUILT_FOR}, and torch {_torch.__version__} is installed: the two share C++ classes and must fit. "
        f"Install torch {_BUILT_FOR}, or build muster again with this torch (pip install --no-build-isolation --force-reinstall muster-dist)."
    )

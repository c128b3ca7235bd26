# SPDX-License-Identifier: BSD-3-Clause
"""Modules that are not files of this package: `muster.distributed.x` for `muster.x`, torch's own
that need no group of its, and those that are not there, which say what to use.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_OURS = "muster."
_PATH = "muster.distributed."

# They start processes, name failures, keep metrics and sample data: what they need is torch, and no
# group of torch.distributed's.
TORCHS = {
    "launcher": "torch.distributed.launcher",
    "remote_device": "torch.distributed.remote_device",
    "argparse_util": "torch.distributed.argparse_util",
    "logging_handlers": "torch.distributed.logging_handlers",
    "constants": "torch.distributed.constants",
}
# Modules of ours whose submodules are torch's, but for those of OURS_BELOW: its launcher's classes
# are below `elastic`, placements and what draws DTensors below `tensor`.
TORCHS_BELOW = {
    "elastic": "torch.distributed.elastic",
    "tensor": "torch.distributed.tensor",
}
OURS_BELOW = {"tensor._meshes", "tensor.device_mesh", "tensor.parallel", "tensor.parallel.api"}

_ON_BACKEND = (
    "it stands on torch.distributed's own groups: import torch.distributed.{name} and call "
    "torch.distributed.init_process_group('muster') after `import muster.torch`, which puts those "
    "groups on the same engine "
    "(docs/user/torch-backend.md)"
)
REFUSED = {
    name: _ON_BACKEND.format(name=name)
    for name in ("pipelining", "_tensor", "_composable", "_shard")
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked first: a folder of torch's would be found under muster's name too, as modules of their
    own.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_OURS) or fullname == _PATH[:-1]:
            return None
        name = fullname.removeprefix(_PATH if fullname.startswith(_PATH) else _OURS)
        first, _, rest = name.partition(".")
        if first in REFUSED:
            raise ModuleNotFoundError(f"there is no {fullname}: {REFUSED[first]}", name=fullname)
        if first in TORCHS or (first in TORCHS_BELOW and rest and name not in OURS_BELOW):
            other = (TORCHS | TORCHS_BELOW)[first] + ("." + rest if rest else "")
        elif fullname.startswith(_PATH):
            other = _OURS + name
        else:
            return None
        try:
            if importlib.util.find_spec(other) is None:
                return None
        except ModuleNotFoundError:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=other)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._spec_of[module] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec_of.pop(module)  # it was given the other name's

    _spec_of: dict[ModuleType, importlib.machinery.ModuleSpec | None] = {}


def install() -> None:
    """Once, by muster's import."""
    sys.meta_path.insert(0, _Finder())

# SPDX-License-Identifier: BSD-3-Clause
"""The wheel's dependency: the torch it is built against, whose C++ classes it shares.

Asked by scikit-build-core, before anything is compiled. torch is looked for as FindLibtorch.cmake
does: where Python imports from, and in the environment of this Python, whose packages pip hides
from an isolated build.
"""

import importlib.util
import pathlib
import sys
import sysconfig

from libtorch import version_in

OLDEST = "2.6"  # as docs/user/compatibility.md says

MISSING = """\
muster is built against the torch that is installed, and {python} has none. Install torch first, and
then muster beside it:

    pip install torch
    pip install .

A build that makes an environment of its own (python -m build, uv build) needs torch there: turn
its isolation off. The wheel of `make wheel` needs no compiler and takes several versions of torch.
"""


def torch_folder():
    """The package folder of torch, or None. It is not imported, which takes seconds."""
    found = importlib.util.find_spec("torch")
    if found and found.origin:
        return pathlib.Path(found.origin).parent
    folder = pathlib.Path(sysconfig.get_path("platlib")) / "torch"
    return folder if version_in(folder) else None


def dynamic_metadata(field, settings):
    """The value of `field` of pyproject.toml."""
    if field != "dependencies" or settings:
        raise ValueError(
            f"fitting_torch knows dependencies, without settings, and not {field} with {settings}"
        )
    folder = torch_folder()
    if folder is None:
        raise SystemExit(MISSING.format(python=sys.executable))
    version = version_in(folder)
    if tuple(map(int, version.split(".")[:2])) < tuple(map(int, OLDEST.split("."))):
        raise SystemExit(f"muster needs torch {OLDEST} or later, and torch {version} is installed")
    return [f"torch=={version}"]

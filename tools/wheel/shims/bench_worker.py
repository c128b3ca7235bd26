# SPDX-License-Identifier: BSD-3-Clause
"""Becomes the muster_bench_worker that is linked with the installed torch. torch is not imported,
which would take longer than all that the worker does.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import sys

extensions = pathlib.Path(__file__).parents[1]
loader = runpy.run_path(str(extensions.parent / "_loader.py"))
folder = loader["fitting"](extensions, importlib.metadata.version("torch"))
libraries = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
others = os.environ.get("LD_LIBRARY_PATH")
os.environ["LD_LIBRARY_PATH"] = f"{libraries}:{others}" if others else str(libraries)
os.execv(folder / "muster_bench_worker", sys.argv)

# SPDX-License-Identifier: BSD-3-Clause
"""`python -m muster.torch program.py [arguments]`, or `-m module [arguments]`: runs the program
with muster's engine as backend `gloo`.
"""

import os
import runpy
import sys

import muster.torch

USAGE = (
    "usage: python -m muster.torch program.py [arguments]\n"
    "       python -m muster.torch -m module [arguments]\n"
)


def main(words):
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words
    if not words or words[0].startswith("-"):
        sys.stderr.write(USAGE)
        sys.exit(0 if words[:1] in (["-h"], ["--help"]) else 2)
    os.environ["MUSTER_REPLACE_GLOO"] = "1"  # for children
    muster.torch.replace_gloo_if_asked()
    sys.argv[:] = words
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


main(sys.argv[1:])

# SPDX-License-Identifier: BSD-3-Clause
"""Small trees that tests of tools/ make, and the tools run over them."""

import pathlib
import subprocess
import sys
import tempfile


def run_over(tool, files, *arguments, with_git=False):
    """The exit status of `tool ROOT`, and what it printed, over a tree of these files ({path:
    text}).
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if with_git:
            subprocess.run(["git", "init", "--quiet", folder], check=True)
        command = [sys.executable, "-B", tool, *arguments, folder]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout

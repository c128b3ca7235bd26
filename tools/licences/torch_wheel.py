# SPDX-License-Identifier: BSD-3-Clause
"""What the metadata of the installed torch says about licences."""

import os
import pathlib
import re
import subprocess

from .debian import Missing


class TorchWheel:
    """The folder `torch-*.dist-info` of a wheel."""

    def __init__(self, folder):
        self._folder = folder

    @classmethod
    def find(cls, root):
        """That of MUSTER_PYTHON, or of the tree's .venv."""
        python = os.environ.get("MUSTER_PYTHON") or str(root / ".venv/bin/python")
        program = "import importlib.metadata as m; print(m.distribution('torch').locate_file(''))"
        try:
            done = subprocess.run([python, "-c", program], capture_output=True, text=True)
        except OSError as error:
            raise Missing(f"{python}: {error.strerror}; tools/setup makes it") from error
        folders = list(pathlib.Path(done.stdout.strip() or ".").glob("torch-*.dist-info"))
        if done.returncode != 0 or len(folders) != 1:
            raise Missing(f"{python} has no torch: tools/setup installs it")
        return cls(folders[0])

    def licence(self):
        text = (self._folder / "METADATA").read_text(encoding="utf-8")
        match = re.search(r"^License(?:-Expression)?: (.+)", text, re.M)
        if not match:
            raise Missing(f"{self._folder}/METADATA does not say a licence")
        return match[1]

    def pybind11(self):
        """The text of the licence of the pybind11 that torch's headers contain."""
        path = self._folder / "licenses/third_party/pybind11/LICENSE"
        if not path.is_file():
            raise Missing(f"{path} does not exist: this needs the torch that tools/setup installs")
        return path.read_text(encoding="utf-8").strip()

# SPDX-License-Identifier: BSD-3-Clause
"""A small disk for the jobs of campaign.py."""

import pathlib
import shutil
import subprocess
import tempfile


class SmallDisk:
    """A file system of some megabytes that can be filled."""

    def __init__(self, megabytes=16):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="muster-chaos-disk-"))
        size = f"size={megabytes}m"
        words = ("mount", "-t", "tmpfs", "-o", size, "muster-chaos", self.folder)
        subprocess.run(words, check=True)
        self._ballast = self.folder / "ballast"

    def fill(self):
        try:
            with open(self._ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            pass  # full

    def empty(self):
        self._ballast.unlink(missing_ok=True)

    def close(self):
        subprocess.run(("umount", "-l", self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)

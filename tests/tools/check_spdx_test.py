# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_spdx, in git repositories made for it."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_spdx"
LINE = "SPDX-License-Identifier: BSD-3-Clause\n"

GOOD = {
    "src/a.cc": f"// {LINE}int a;\n",
    "tools/run": f"#!/bin/sh\n# {LINE}true\n",
    ".github/workflows/ci.yml": f"# {LINE}name: ci\n",
    "README.md": "No source file.\n",
    "data": "Not one either.\n",
}
BARE = {
    "src/b.h": ("int b();\n", f"// {LINE}int b();\n"),
    "python/c.py": ('"""c"""\n', f'# {LINE}"""c"""\n'),
    "src/CMakeLists.txt": ("project(x)\n", f"# {LINE}project(x)\n"),
    "tools/d": ("#!/usr/bin/env python3\npass\n", f"#!/usr/bin/env python3\n# {LINE}pass\n"),
    "Dockerfile": ("FROM a\n", f"# {LINE}FROM a\n"),
    ".github/e.yml": ("on: push\n", f"# {LINE}on: push\n"),
    "empty.py": ("", f"# {LINE}"),
    "late.cc": (f"\n\n\n// {LINE}", f"// {LINE}\n\n\n// {LINE}"),
}


class Tree:
    """A repository with these files ({path: text}) and the tool."""

    def __init__(self, folder, files):
        self._root = pathlib.Path(folder)
        for name, text in files.items():
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (self._root / "tools").mkdir(exist_ok=True)
        shutil.copy(TOOL, self._root / "tools")
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=folder, check=True)

    def run(self, *arguments):
        command = [sys.executable, "-B", "tools/check_spdx", *arguments]
        done = subprocess.run(command, cwd=self._root, capture_output=True, text=True)
        return done.returncode, done.stdout

    def text(self, name):
        return (self._root / name).read_text()


class CheckSpdx(unittest.TestCase):
    def tree(self, files):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return Tree(folder.name, files)

    def test_accepts_a_good_tree(self):
        self.assertEqual(self.tree(GOOD).run(), (0, ""))

    # spec: V11.spdx a source file without the line is named, of whatever language
    def test_names_each_file_without_the_line(self):
        for name, (text, _) in BARE.items():
            code, output = self.tree({**GOOD, name: text}).run()
            self.assertEqual(code, 1, name)
            self.assertEqual(output.count("\n"), 1, output)
            self.assertTrue(output.startswith(f"{name}: no 'SPDX-License-Identifier"), output)

    # spec: V11.spdx the line is added below `#!`, and nothing else changes
    def test_mends_them(self):
        tree = self.tree(GOOD | {name: text for name, (text, _) in BARE.items()})
        self.assertEqual(tree.run("--mend"), (0, f"added the line to {len(BARE)} files\n"))
        for name, (_, mended) in BARE.items():
            self.assertEqual(tree.text(name), mended)
        for name, text in GOOD.items():
            self.assertEqual(tree.text(name), text)
        self.assertEqual(tree.run(), (0, ""))


if __name__ == "__main__":
    unittest.main()

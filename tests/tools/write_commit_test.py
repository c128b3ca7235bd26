# SPDX-License-Identifier: BSD-3-Clause
"""cmake/write_commit.cmake, in trees of git and in others."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "cmake" / "write_commit.cmake"
NOBODY = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class WriteCommit(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = pathlib.Path(folder.name) / "tree"
        self.tree.mkdir()
        self.file = pathlib.Path(folder.name) / "commit.cc"

    def git(self, *arguments):
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.tree,
            check=True,
            env=os.environ | NOBODY,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit_of_checkout(self):
        """What is committed: a file `known`."""
        self.git("init", "--quiet")
        (self.tree / "known").write_text("one")
        self.git("add", "known")
        self.git("commit", "--quiet", "-m", "Add it")
        return self.git("rev-parse", "--short=12", "HEAD")

    def written(self):
        command = ["cmake", f"-DTREE={self.tree}", f"-DFILE={self.file}", "-P", SCRIPT]
        subprocess.run(command, check=True)
        return re.search(r'return "(.*)";', self.file.read_text())[1]

    # spec: V4.version the commit is that of the tree, also at a tag
    def test_names_the_commit(self):
        commit = self.commit_of_checkout()
        self.git("tag", "-a", "-m", "a tag", "v1")
        (self.tree / "unknown").write_text("not git's")
        self.assertEqual(self.written(), commit)

    # spec: V4.version a tree with changed files is called dirty, staged or not, until they are
    # committed
    def test_calls_a_changed_tree_dirty(self):
        commit = self.commit_of_checkout()
        (self.tree / "known").write_text("two")
        self.assertEqual(self.written(), commit + "-dirty")
        self.git("add", "known")
        self.assertEqual(self.written(), commit + "-dirty")
        self.git("commit", "--quiet", "-m", "Change it")
        self.assertEqual(self.written(), self.git("rev-parse", "--short=12", "HEAD"))

    # spec: V4.version a tree without git has no commit
    def test_names_none_without_git(self):
        self.assertEqual(self.written(), "")

    def test_leaves_the_file_if_nothing_changed(self):
        self.commit_of_checkout()
        self.written()
        os.utime(self.file, (1, 1))
        self.written()
        self.assertEqual(self.file.stat().st_mtime, 1)


if __name__ == "__main__":
    unittest.main()

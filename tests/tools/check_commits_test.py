# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_commits, on histories made for each rule."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_commits"
NOBODY = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def run(*messages):
    """The exit status and what it printed, in a tree with these commits after the check's own."""
    with tempfile.TemporaryDirectory() as folder:

        def git(*arguments):
            subprocess.run(
                ["git", *arguments], cwd=folder, check=True, env=os.environ | NOBODY, text=True
            )

        git("init", "--quiet")
        git("commit", "--quiet", "--allow-empty", "-m", "before the check anything goes.")
        (pathlib.Path(folder) / "tools").mkdir()
        shutil.copy(TOOL, pathlib.Path(folder) / "tools")
        git("add", "tools")
        git("commit", "--quiet", "-m", "Add the check")
        for message in messages:
            git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-m", message)
        command = [sys.executable, "-B", "tools/check_commits"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stdout


class CheckCommits(unittest.TestCase):
    def test_accepts_subjects_and_bodies_in_order(self):
        code, output = run("A" * 72, "Say it\n\nThe reason, in a line or two.\n")
        self.assertEqual((code, output), (0, "check_commits: 2 commits, 0 faults\n"))

    def test_refuses_each_fault(self):
        for message, fault in (
            ("A" * 73, "the subject has 73 characters"),
            ("say it", "a capital letter"),
            ("Say it.", "a period"),
            ("Say it\nat once", "an empty line"),
            ("Say it\n\n" + "a" * 101, "101 characters"),
        ):
            code, output = run("Go on", message)
            self.assertEqual(code, 1, message)
            self.assertIn(fault, output)
            self.assertIn("2 commits, 1 faults", output)


if __name__ == "__main__":
    unittest.main()

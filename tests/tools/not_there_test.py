# SPDX-License-Identifier: BSD-3-Clause
"""tools/not_there: the page says what no test proves, of this tree and of a made-up one."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = {
    "docs/acceptance.md": "## A. One\n\n- **A1** First. Clauses: x, y.\n- **A2** Second.\n",
    "tools/conformance.unproved": "A1.y  no test yet\nA2  it is slow\n",
    "docs/user/not-there.md": "# Not\n\n<!-- printed by tools/not_there --write -->\n\n| old |\n",
}
WRITTEN = "| A1 | y | no test yet |\n| A2 | all of it | it is slow |\n"


def run(*arguments):
    command = [sys.executable, "-B", ROOT / "tools/not_there", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class NotThere(unittest.TestCase):
    # spec: V9.generated what no test proves is a list that is printed from the list of proofs
    def test_this_tree(self):
        done = run("--check")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_made_up_tree(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in FILES.items():
                path = pathlib.Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            done = run("--root", folder, "--check")
            self.assertEqual(done.returncode, 1)
            self.assertIn("tools/not_there --write writes it", done.stderr)
            self.assertEqual(run("--root", folder, "--write").returncode, 0)
            page = (pathlib.Path(folder) / "docs/user/not-there.md").read_text()
            self.assertTrue(page.endswith(WRITTEN), page)
            self.assertEqual(run("--root", folder, "--check").returncode, 0)


if __name__ == "__main__":
    unittest.main()

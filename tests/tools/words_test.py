# SPDX-License-Identifier: BSD-3-Clause
"""tools/words, on small trees made for each rule."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "words"


def run(files, allowed="", *arguments):
    """The exit status, what it printed, and the allowances afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        (root / "tools").mkdir()
        shutil.copy(TOOL, root / "tools/words")
        (root / "tools/words.allowed").write_text(allowed)
        subprocess.run(["git", "init", "--quiet", folder], check=True)
        command = [sys.executable, "-B", root / "tools/words", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, (root / "tools/words.allowed").read_text()


class Words(unittest.TestCase):
    def test_accepts_the_words_of_the_field(self):
        code, output, _ = run({"a.md": "A rank that has left sends a close frame.\n", "b.h": "x\n"})
        self.assertEqual((code, output), (0, "words: 0 retired words left in 0 files\n"))

    def test_refuses_a_word_and_says_what_to_write(self):
        code, output, _ = run({"a.cc": "// says goodbye\nint x;  // to strangers\n"})
        self.assertEqual(code, 1)
        self.assertIn('a.cc:1: "goodbye": close, close_ack\n', output)
        self.assertIn("a.cc: 2 retired words; 0 are allowed\n", output)

    def test_refuses_sentences_of_documents_that_begin_with_a_relative_clause(self):
        self.assertEqual(run({"a.md": "It ends. What is left is freed.\n"})[0], 1)
        self.assertEqual(run({"a.md": "# Where is it?\n\nWhere does it lie? In a file.\n"})[0], 0)
        self.assertEqual(run({"a.md": "Who comes late waits.\n"})[0], 1)
        self.assertEqual(run({"a.md": "It ends. Whoever waits is told.\n"})[0], 1)
        self.assertEqual(run({"a.cc": 'auto text = "Who comes late waits.";\n'})[0], 0)

    def test_reads_the_sentences_of_comments_across_their_lines(self):
        code, output, _ = run({"a.cc": "int x;\n/// It ends.\n/// What is left is freed.\n"})
        self.assertEqual(code, 1)
        self.assertIn('a.cc:2: "What": subject first', output)
        self.assertEqual(run({"a.h": "// Says how long and\n// Where is a folder.\n"})[0], 0)
        self.assertEqual(run({"a.h": "int x;  ///< Of a call.\n"})[0], 1)
        self.assertEqual(run({"a.py": "# Who comes late waits.\n"})[0], 1)

    def test_the_number_of_a_file_may_only_fall(self):
        files = {"a.cc": "goodbye goodbye\n"}
        self.assertEqual(run(files, "1 a.cc\n")[0], 1)
        code, output, after = run(files, "3 a.cc\n1 gone.cc\n", "--lower")
        self.assertEqual(code, 0, output)
        self.assertTrue(after.endswith("--lower.\n2 a.cc\n"), after)
        self.assertIn("1 a.cc\n", run(files, "1 a.cc\n", "--lower")[2])


if __name__ == "__main__":
    unittest.main()

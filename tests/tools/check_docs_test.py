# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_docs, on small trees made for each rule."""

import pathlib
import unittest

from trees import run_over

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_docs"

GOOD = {
    "README.md": "# Good\n\nSee [the guide](docs/user/guide.md#two-words-a-1) and [this](#good).\n",
    "docs/index.md": "# Index\n\n```{toctree}\nuser/guide\nA title <user/errors>\n```\n",
    "docs/user/guide.md": "# Guide\n\n## Two words: `a`\n\n## Two words: a\n\n"
    "```\n[no link](nowhere.md)\n# no heading\n```\n`a[i](b)` [up](../../README.md)\n",
    "docs/user/errors.md": "# Generated\n\n" + "wide " * 40 + "\n" + "long\n" * 200,
}


def run(files):
    return run_over(TOOL, files, with_git=True)


class CheckDocs(unittest.TestCase):
    def test_accepts_a_good_tree(self):
        self.assertEqual(run(GOOD), (0, "check_docs: 4 pages, 0 faults\n"))

    def refuses(self, name, text, fault):
        code, output = run({**GOOD, name: GOOD[name] + text})
        self.assertEqual(code, 1, output)
        self.assertIn(fault, output)
        self.assertIn(", 1 faults", output)

    def test_refuses_wide_lines_and_long_pages(self):
        self.refuses("README.md", "word " * 20 + "words\n", "README.md:4: 105 columns; at most 100")
        self.refuses("docs/user/guide.md", "\n" * 150, "161 lines; at most 150: divide the page")

    # spec: V9.links a link to no file or heading is a fault; the tree has none (tools.check_docs)
    def test_refuses_broken_links(self):
        self.refuses("README.md", "[gone](docs/gone.md)\n", "there is no such file")
        self.refuses("README.md", "[gone](docs/index.md#gone)\n", "no heading makes this anchor")
        self.refuses("README.md", "[gone](#no-heading)\n", "no heading makes this anchor")

    def test_refuses_the_name_of_a_file_that_there_is_not(self):
        self.assertEqual(
            run({**GOOD, "src/a.h": "", "x.md": "`a.h` `src/a.h` `torch/b.h`\n"})[0], 0
        )
        self.refuses("README.md", "in `gone.h`\n", "README.md:4: gone.h: there is no such file")
        self.refuses("README.md", "in `x/guide.cc`\n", "x/guide.cc: there is no such file")

    def test_refuses_a_page_that_no_table_of_contents_names(self):
        code, output = run({**GOOD, "docs/lost.md": "# Lost\n"})
        self.assertEqual(code, 1)
        self.assertIn("docs/lost.md: no table of contents names this page", output)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: BSD-3-Clause
"""`make docs` builds every program whose help its pages print."""

import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAB = (ROOT / "src/lab/bench/lab.cc").read_text(encoding="utf-8")


def program_of(word):
    """That `muster-lab WORD` becomes; None: the command itself, or a script."""
    for condition, name in re.findall(
        r'if \((first == [^)]*)\)\s+return become_program\("(\w+)"', LAB
    ):
        if f'"{word}"' in condition:
            return name + word if name.endswith("_") else name
    return "muster_bench_worker" if word == "hosts" else None


class DocsTarget(unittest.TestCase):
    def test_builds_what_it_asks(self):
        pages = "".join(each.read_text() for each in (ROOT / "docs").rglob("*.md"))
        words = re.findall(r"^```\{command-help\} lab (\w+)", pages, re.M)
        self.assertGreater(len(words), 5)
        run = subprocess.run(
            ["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        wanted = {program_of(word) for word in words} - {None}
        self.assertIn("muster_bench_services", wanted)
        self.assertIn("bin/muster-lab", run.stdout)
        for each in wanted:
            self.assertIn(f"bin/{each}", run.stdout)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_environment, on small trees made for each rule."""

import pathlib
import unittest

from trees import run_over

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_environment"

GOOD = {
    "src/core/base/environment.cc": 'constexpr Row kJob[] = {\n    {"RANK, WORLD_SIZE", "",'
    '\n     "Who."},\n    {"MUSTER_LONG, "\n     "MUSTER_SHORT", "", "x"},\n};\n',
    "src/core/rendezvous/join.cc": 'settle_from_environment(rank, "RANK", 0);\n'
    'env_integer("WORLD_SIZE", 1, 2);\n// env_text("MUSTER_COMMENT")\n'
    'table = {{"MUSTER_LONG", 1}};\n',
    "src/core/store/join_test.cc": 'env_text("MUSTER_ONLY_IN_A_TEST");\n',
    "python/muster/names.py": 'os.environ.get("MUSTER_SHORT", "1")\n',
}


def run(files):
    return run_over(TOOL, files)


class CheckEnvironment(unittest.TestCase):
    def test_accepts_a_good_tree(self):
        self.assertEqual(run(GOOD), (0, "check_environment: 4 variables, 0 faults\n"))

    def refuses(self, name, text, fault):
        code, output = run({**GOOD, name: text})
        self.assertEqual(code, 1, output)
        self.assertIn(fault, output)

    def test_refuses_a_variable_without_a_row(self):
        new = "src/rpc/agent/agent.cc"
        for text in ('getenv("HOSTNAME");\n', 'env_flag("MUSTER_NEW");\n', 'f("SLURM_NEW");\n'):
            self.refuses(new, text, f"{new}:1: ")
        new = "python/muster/new.py"
        for text in ('os.environ["NEW"]\n', 'if "NEW" in os.environ:\n', 'os.environ.get("NEW")\n'):
            self.refuses(new, text, f"{new}:1: NEW has no row in src/core/base/environment.cc")

    def test_refuses_a_row_that_nothing_reads(self):
        self.refuses("python/muster/names.py", "pass\n", "nothing reads MUSTER_SHORT")


if __name__ == "__main__":
    unittest.main()

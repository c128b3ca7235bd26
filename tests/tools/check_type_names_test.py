# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_type_names, on small trees."""

import pathlib
import unittest

from trees import run_over

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_type_names"

GOOD = {
    "include/muster/work.h": "class Work {\n};\nstruct Store;\n",
    "src/core/store/store.h": "template <class T>\nstruct Store final : Base<T> {\n};\n"
    "template <>\nstruct Store<int> {\n};\n",
    "src/core/store/store.cc": "enum class Way : int { a };  // class Work {\n",
    "src/core/store/store_test.cc": "struct Work {\n};\n",
}


class CheckTypeNames(unittest.TestCase):
    def test_accepts_each_name_once(self):
        code, output = run_over(TOOL, GOOD)
        self.assertEqual(code, 0, output)
        self.assertIn("3 names, 0 of several types, 0 faults", output)

    def test_refuses_a_second_type(self):
        code, output = run_over(TOOL, {**GOOD, "src/rpc/rpc.cc": "\n struct Way {\n};\n"})
        self.assertEqual(code, 1)
        self.assertIn("Way: src/core/store/store.cc:1, src/rpc/rpc.cc:2\n", output)

    def test_allows_what_the_list_says_and_no_more(self):
        second = {**GOOD, "src/rpc/rpc.cc": "struct Way {\n};\n"}
        code, output = run_over(TOOL, {**second, "tools/type_names.allowed": "2 Way\n"})
        self.assertEqual(code, 0, output)
        third = {**second, "src/rpc/agent/agent.cc": "struct Way {\n};\n"}
        self.assertEqual(run_over(TOOL, {**third, "tools/type_names.allowed": "2 Way\n"})[0], 1)

    def test_refuses_a_list_that_allows_too_much(self):
        code, output = run_over(TOOL, {**GOOD, "tools/type_names.allowed": "# why\n2 Way\n"})
        self.assertEqual(code, 1)
        self.assertIn("Way stands for 1 types, not 2", output)


if __name__ == "__main__":
    unittest.main()

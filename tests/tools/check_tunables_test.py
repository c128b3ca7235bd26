# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_tunables, on small trees made for each rule."""

import pathlib
import unittest

from trees import run_over

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_tunables"

GOOD = {
    "src/core/tunables/tunables.h": """
struct Tunables {
  // How threads wait.
  Duration link_spin, link_yield;  // two
  ByCores<std::size_t> one_shot;
};
""",
    "src/core/tunables/tunables_fixed.h": "inline constexpr std::size_t kEagerBytes = 64 * 1024;\n",
    "src/core/wait/spin_wait.cc": "budget(tunables().link_spin, tunables().link_yield);\n",
    "src/core/collective/select/selection.cc": (
        "by(numbers.one_shot(shared)); to(fixed::kEagerBytes);\n"
    ),
    "src/rpc/wire/message.h": "constexpr int kPollsMost = 64;  // limit: of a message\n",
}


def run(files):
    return run_over(TOOL, files)


class CheckTunables(unittest.TestCase):
    def test_accepts_a_good_tree(self):
        report = "check_tunables: 3 files, 0 numbers to move or to explain, 0 rows unread\n"
        self.assertEqual(run(GOOD), (0, report))

    def test_refuses_an_empty_tree(self):
        self.assertEqual(run({})[0], 1)

    def refuses_number(self, text, rule):
        code, output = run({**GOOD, "src/rpc/agent/agent.cc": text})
        self.assertEqual(code, 1, output)
        self.assertIn(f"src/rpc/agent/agent.cc:1: {rule} outside the table", output)

    def test_refuses_numbers_outside_the_table(self):
        self.refuses_number("sleep(std::chrono::milliseconds(5));\n", "a duration")
        self.refuses_number("buffer.resize(64 * 1024);\n", "a size")
        self.refuses_number("constexpr int kPolls = 64;\n", "a count")
        self.refuses_number("if (bytes > 4096) split();\n", "a comparison with a number")

    def refuses_row(self, path, text, row):
        code, output = run({**GOOD, path: text})
        self.assertEqual(code, 1, output)
        self.assertIn(f"nothing reads {row}: use the row, or drop it", output)
        self.assertIn(" 1 rows unread", output)

    def test_refuses_a_row_that_nothing_reads(self):
        self.refuses_row(
            "src/core/wait/spin_wait.cc", "budget(tunables().link_spin);\n", "link_yield"
        )
        self.refuses_row(
            "src/core/collective/select/selection.cc",
            "by(numbers.one_shot(shared));  // fixed::kEagerBytes\n",
            "fixed::kEagerBytes",
        )

    def test_a_test_alone_is_no_reader(self):
        files = {**GOOD, "src/core/wait/wait_test.cc": "tunables().link_yield;\n"}
        files["src/core/wait/spin_wait.cc"] = "tunables().link_spin;\n"
        self.assertEqual(run(files)[0], 1)


if __name__ == "__main__":
    unittest.main()

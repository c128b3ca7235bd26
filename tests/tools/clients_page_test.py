# SPDX-License-Identifier: BSD-3-Clause
"""docs/user/clients.md against tests/clients: the page has a line for each library that is tested,
and the line is what the test does.
"""

import ast
import pathlib
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/user/clients.md").read_text(encoding="utf-8")
TESTS = ROOT / "tests/clients"

# How the page calls a library, and the word of its line that chooses the backend.
LIBRARIES = {
    "accelerate": ("accelerate", "--replace-gloo"),
    "lightning": ("Lightning", "process_group_backend="),
    "transformers": ("transformers' Trainer", "--replace-gloo"),
    "deepspeed": ("DeepSpeed", "dist_backend="),
    "ray": ("Ray Train", "TorchConfig(backend="),
    "ignite": ("ignite", "--replace-gloo"),
    "torchmetrics": ("torchmetrics", "init_process_group("),
    "torchft": ("torchft", "--replace-gloo"),
    "composer": ("Composer", "--replace-gloo"),
}


def clients():
    """CLIENTS of clients_test.py, which cannot be imported without torch."""
    source = ast.parse((TESTS / "clients_test.py").read_text(encoding="utf-8"))
    (value,) = [
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "CLIENTS"
    ]
    return ast.literal_eval(value)


class ClientsPage(unittest.TestCase):
    # spec: R4.page the line of each library is that of its test
    def test_lines_are_those_of_the_tests(self):
        tested = clients()
        self.assertEqual(set(tested), set(LIBRARIES))
        rows = dict(row.strip("| ").split(" | ") for row in PAGE.splitlines() if "` |" in row)
        for client, (title, word) in LIBRARIES.items():
            with self.subTest(client):
                self.assertIn(word, rows[title])
                program = (TESTS / f"with_{client}.py").read_text(encoding="utf-8")
                way, _ = tested[client]
                if way == "option":
                    self.assertIn(word, program)
                    self.assertIn('"muster"', rows[title])
                else:
                    self.assertEqual(word, "--replace-gloo")
                    self.assertNotIn('"muster"', program)


if __name__ == "__main__":
    unittest.main()

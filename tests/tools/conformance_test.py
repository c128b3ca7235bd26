"""tools/conformance, on small trees."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "conformance"

LIST = """# Acceptance list

## C. Stores

- **C1** Kinds.
- **C2** Ports, and
  what follows.

## F. Collectives

- **F1** Synchronous.
- **F2** Broadcast.
- **F3** All-reduce.
"""


def run(files, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"docs/acceptance.md": LIST, **files}.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run(
            [sys.executable, "-B", TOOL, "--root", folder, *arguments],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr


class Conformance(unittest.TestCase):
    def test_counts_per_letter(self):
        code, output = run(
            {"src/muster/store/kinds_test.cc": "// spec: C1 kinds\nTEST(Store, Kinds) {}\n"}
        )
        self.assertEqual(code, 0, output)
        self.assertIn("C    1/2   Stores; no test names C2\n", output)
        self.assertIn("F    0/3   Collectives; no test names F1 F2 F3\n", output)
        self.assertIn("1/5   lines", output)

    def test_takes_every_kind_of_test(self):
        code, output = run(
            {
                "src/muster/store/a_test.cc": "// spec: C1 kinds\nTEST_P(Store, Kinds) {}\n",
                "tests/python/b_test.py": "# spec: C2 ports\ndef test_ports():\n    pass\n",
                "tests/install/CMakeLists.txt": "# spec: F1 installed\n"
                "add_test(NAME install COMMAND true)\n",
            },
            "--expect",
            "C",
            "F1",
        )
        self.assertEqual(code, 0, output)

    def test_several_ids_in_one_comment(self):
        test = "// spec: C1 C2 both, F1 alone; F2 and F3 a pair\n// that goes on\nTEST(A, B) {}\n"
        code, output = run({"src/muster/a_test.cc": test}, "--clauses", "C", "F")
        self.assertEqual(code, 0, output)
        place = "[A.B, src/muster/a_test.cc:1]"
        self.assertEqual(
            output.splitlines(),
            [
                "C1 Kinds.",
                f"    both  {place}",
                "C2 Ports, and what follows.",
                f"    both  {place}",
                "F1 Synchronous.",
                f"    alone  {place}",
                "F2 Broadcast.",
                f"    a pair that goes on  {place}",
                "F3 All-reduce.",
                f"    a pair that goes on  {place}",
            ],
        )

    def test_an_id_in_the_middle_of_words_is_no_clause(self):
        code, output = run(
            {"src/muster/a_test.cc": "// spec: C1 like F1 does\nTEST(A, B) {}\n"}, "--expect", "F1"
        )
        self.assertEqual(code, 1)
        self.assertIn("no test names F1", output)

    def test_expected_ids_by_range_letter_and_file(self):
        test = {"src/muster/a_test.cc": "// spec: F1 F2 F3 all\nTEST(A, B) {}\n"}
        self.assertEqual(run(test, "--expect", "F1-F3")[0], 0)
        self.assertEqual(run(test, "--expect", "F")[0], 0)
        code, output = run(test, "--expect", "C1-2")
        self.assertEqual(code, 1)
        self.assertIn("no test names C1: Kinds.", output)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("F1-F3  # collectives\nC2\n")
            file.flush()
            code, output = run(test, "--expect", file.name)
            self.assertEqual(
                (code, output), (1, "conformance: no test names C2: Ports, and what follows.\n")
            )

    def test_refuses_what_would_not_count(self):
        for text, reason in (
            ("// spec: C9 none\nTEST(A, B) {}\n", "C9 is not in"),
            ("// spec: C1 kinds\n\nTEST(A, B) {}\n", "no test directly below"),
            ("// spec: C1 kinds\nvoid helper();\n", "no test directly below"),
            ("// spec: kinds\nTEST(A, B) {}\n", "without an id"),
            ("// spec: C1 kinds\nTEST(A, DISABLED_B) {}\n", "disabled"),
        ):
            code, output = run({"src/muster/a_test.cc": text})
            self.assertEqual(code, 1, text)
            self.assertIn(reason, output)

    def test_python_alone(self):
        files = {
            "src/muster/a_test.cc": "// spec: C1\nTEST(A, B) {}\n",
            "tests/python/b_test.py": "# spec: C2\ndef test_ports():\n    pass\n",
        }
        self.assertEqual(run(files, "--python", "--expect", "C2")[0], 0)
        code, output = run(files, "--python", "--expect", "C")
        self.assertEqual(code, 1)
        self.assertIn("no Python test names C1", output)

    def test_refuses_unknown_expectations(self):
        self.assertNotEqual(run({}, "--expect", "Z1")[0], 0)


if __name__ == "__main__":
    unittest.main()

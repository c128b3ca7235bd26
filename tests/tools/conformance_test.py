# SPDX-License-Identifier: BSD-3-Clause
"""tools/conformance, on small trees, and on small builds that ctest lists and runs."""

import os
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

# One test of each kind: GoogleTest by a whole suite, pytest, unittest, and ctest's own.
SOURCES = {
    "docs/acceptance.md": """## C. Stores

- **C1** Kinds. Clauses: tcp, file.
- **C2** Ports.
- **C3** Keys.
- **C4** Values.
""",
    "src/core/store/a_test.cc": """
// spec: C1.tcp kept
TEST_P(Suite, Kept) {}
// spec: C1.file read
TEST(Suite, Read) {}
""",
    "tests/python/b_test.py": """
import pytest
# spec: C2 ports
@pytest.mark.parametrize("port", [0, 1])
def test_ports(port):
    pass
""",
    "tests/tools/c_test.py": """
import unittest
class Keys(unittest.TestCase):
    # spec: C3 keys
    def test_keys(self):
        pass
unittest.main()
""",
    "tests/install/CMakeLists.txt": """
# spec: C4 values
add_test(NAME ${MUSTER_TEST_PREFIX}install.values COMMAND true)
""",
}

PROGRAM = """#!/bin/sh
if [ "$1" = --gtest_list_tests ]; then
  printf 'Kinds/Suite.\\n  Kept/tcp  # GetParam() = tcp\\n  Kept/tls\\nSuite.\\n  Read\\n'
  exit
fi
cat <<END
[ RUN      ] Kinds/Suite.Kept/tcp
[       OK ] Kinds/Suite.Kept/tcp (0 ms)
[ RUN      ] Kinds/Suite.Kept/tls
a.h:29: Skipped
not drawn with MUSTER_TEST_SEED=7
[  SKIPPED ] Kinds/Suite.Kept/tls (0 ms)
[ RUN      ] Suite.Read
words without an end of line[       OK ] Suite.Read (0 ms)
END
"""

# A stand-in that prints what pytest would: this Python may not have pytest.
PYTEST = """import sys
print("tests/python/b_test.py::test_ports[0] PASSED   [ 50%]")
print("tests/python/b_test.py::test_ports[1] PASSED   [100%]")
"""


def run(files, *arguments, acceptance=LIST):
    with tempfile.TemporaryDirectory() as folder:
        write(folder, {"docs/acceptance.md": acceptance, **files})
        return conformance(folder, *arguments)


def write(folder, files):
    for name, text in files.items():
        path = pathlib.Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def conformance(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-B", TOOL, "--root", folder, *arguments], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


class Build:
    """A tree with a build of it, which ctest has run."""

    def __init__(self, changes=None, program=PROGRAM, pytest=PYTEST, left_out=(), run=True):
        self._folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self._folder.name).resolve()
        folder = self.root / "build/release/src/core/store"
        tests = {
            "store.Suite": (folder, ["env", folder / "store_test", "--gtest_filter=*Suite.*"]),
            "python.b": (self.root, [self.root / "python", "-m", "pytest", "-v", self.path("b")]),
            "tools.c": (self.root, [sys.executable, "-B", self.path("c"), "-v"]),
            "install.values": (self.root, ["true"]),
        }
        lines = []
        for name, (directory, command) in tests.items():
            if name in left_out:
                continue
            words = " ".join(f'"{word}"' for word in command)
            lines.append(f'add_test("asan:{name}" {words})\n')
            lines.append(
                f'set_tests_properties("asan:{name}" PROPERTIES WORKING_DIRECTORY "{directory}")\n'
            )
        write(
            self.root,
            {
                **SOURCES,
                "build/release/src/core/store/store_test": program,
                "python": f"#!{sys.executable}\n{pytest}",
                "build/CTestTestfile.cmake": 'subdirs("release")\n',
                "build/release/CTestTestfile.cmake": "".join(lines),
                **(changes or {}),
            },
        )
        for name in ("build/release/src/core/store/store_test", "python"):
            (self.root / name).chmod(0o755)
        if run:
            self.run()

    def path(self, name):
        return self.root / {"b": "tests/python/b_test.py", "c": "tests/tools/c_test.py"}[name]

    def run(self):
        subprocess.run(
            ["ctest", "--test-dir", self.root / "build", "--test-output-size-passed", "0"]
            + ["--output-junit", "results/ctest.xml"],
            capture_output=True,
        )

    def ran(self, *arguments):
        return conformance(self.root, "--ran", self.root / "build/results", *arguments)

    def listed(self, *arguments):
        return conformance(self.root, "--listed", self.root / "build", *arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._folder.cleanup()


class Conformance(unittest.TestCase):
    def test_counts_per_letter(self):
        code, output = run(
            {"src/core/store/kinds_test.cc": "// spec: C1 kinds\nTEST(Store, Kinds) {}\n"}
        )
        self.assertEqual(code, 0, output)
        self.assertIn("C    1/2   Stores; no test names C2\n", output)
        self.assertIn("F    0/3   Collectives; no test names F1 F2 F3\n", output)
        self.assertIn("1/5   lines", output)

    def test_takes_every_kind_of_test(self):
        code, output = run(
            {
                "src/core/store/a_test.cc": "// spec: C1 kinds\nTEST_P(Store, Kinds) {}\n",
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
        code, output = run({"src/core/a_test.cc": test}, "--clauses", "C", "F")
        self.assertEqual(code, 0, output)
        place = "[A.B, src/core/a_test.cc:1]"
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
            {"src/core/a_test.cc": "// spec: C1 like F1 does\nTEST(A, B) {}\n"}, "--expect", "F1"
        )
        self.assertEqual(code, 1)
        self.assertIn("no test names F1", output)

    def test_expected_ids_by_range_letter_and_file(self):
        test = {"src/core/a_test.cc": "// spec: F1 F2 F3 all\nTEST(A, B) {}\n"}
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
            ("// spec: C1 kinds spec: C2 ports\nTEST(A, B) {}\n", "a second `spec:`"),
        ):
            code, output = run({"src/core/a_test.cc": text})
            self.assertEqual(code, 1, text)
            self.assertIn(reason, output)

    def test_a_python_test_is_found_below_its_decorators_and_once(self):
        test = "# spec: C1 kinds\n@marked(\n    1,\n)\ndef test_kinds():\n    pass\n"
        path = "tests/python/b_test.py"
        code, output = run({path: test}, "--clauses", "C1")
        self.assertEqual(
            (code, output), (0, f"C1 Kinds.\n    kinds  [{path}::test_kinds, {path}:1]\n")
        )
        code, output = run({path: test + "def test_kinds():\n    pass\n"})
        self.assertEqual(code, 1)
        self.assertIn("b_test.py:1: test_kinds is defined twice", output)

    def test_a_comment_within_a_string_is_none(self):
        text = 'TEXT = """\n# spec: C1 kinds\ndef test_kinds():\n    pass\n"""\n'
        code, output = run({"tests/python/b_test.py": text}, "--expect", "C1")
        self.assertEqual((code, output), (1, "conformance: no test names C1: Kinds.\n"))

    def test_python_alone(self):
        files = {
            "src/core/a_test.cc": "// spec: C1\nTEST(A, B) {}\n",
            "tests/python/b_test.py": "# spec: C2\ndef test_ports():\n    pass\n",
        }
        self.assertEqual(run(files, "--python", "--expect", "C2")[0], 0)
        code, output = run(files, "--python", "--expect", "C")
        self.assertEqual(code, 1)
        self.assertIn("no Python test names C1", output)

    def test_refuses_unknown_expectations(self):
        self.assertNotEqual(run({}, "--expect", "Z1")[0], 0)


class Clauses(unittest.TestCase):
    ACCEPTANCE = "## C. Stores\n\n- **C1** Kinds.\n  Clauses: tcp,\n  file.\n- **C2** Ports.\n"

    def run_over(self, *comments, unproved=None, arguments=("--expect", "C")):
        files = {
            "src/core/a_test.cc": "".join(
                f"// spec: {comment}\nTEST(A, B{number}) {{}}\n"
                for number, comment in enumerate(comments)
            )
        }
        if unproved is not None:
            files["tools/conformance.unproved"] = unproved
        return run(files, *arguments, acceptance=self.ACCEPTANCE)

    def test_each_clause_needs_a_test(self):
        self.assertEqual(self.run_over("C1.tcp one, C1.file C2 two")[0], 0)
        code, output = self.run_over("C1.tcp one, C2 two", "C1 the line alone")
        self.assertEqual((code, output), (1, "conformance: no test names C1.file: Kinds.\n"))

    def test_one_clause_may_be_expected(self):
        self.assertEqual(self.run_over("C1.tcp one", arguments=("--expect", "C1.tcp"))[0], 0)

    def test_refuses_an_unknown_clause(self):
        code, output = self.run_over("C1.udp one")
        self.assertEqual(code, 1)
        self.assertIn("src/core/a_test.cc:1: C1.udp is not in docs/acceptance.md", output)

    def test_a_refusal_proves_nothing_else(self):
        code, output = self.run_over("C1.tcp C1.file one", "C2.refusal a port of 70,000")
        self.assertEqual((code, output), (1, "conformance: no test names C2: Ports.\n"))

    def test_counts_what_is_proved_whole(self):
        _, output = self.run_over("C1.file one, C2 two", arguments=())
        self.assertIn("C    1/2   Stores; no test names C1.tcp\n", output)

    def test_what_is_not_proved_is_listed(self):
        self.assertEqual(self.run_over("C2", unproved="C1  none yet\n", arguments=())[0], 0)
        code, output = self.run_over("C2", unproved="C1.tcp  none yet\n", arguments=())
        self.assertEqual(code, 1)
        self.assertIn("no test names C1.file: Kinds.", output)
        code, output = self.run_over("C2", unproved="C1 none\nC7 none\n", arguments=())
        self.assertEqual(code, 1)
        self.assertIn("conformance.unproved: C7 is not in docs/acceptance.md", output)
        code, output = self.run_over("C2", unproved="C1\n", arguments=())
        self.assertEqual(code, 1)
        self.assertIn("C1 stands there without a reason", output)


class Runs(unittest.TestCase):
    def check(self, outcome, *words):
        code, output = outcome
        self.assertEqual(code, 1, output)
        for text in words:
            self.assertIn(text, output)

    def test_what_is_listed_and_what_ran(self):
        with Build() as build:
            alone = conformance(
                build.root, "--listed", build.root / "build/release", "--expect", "C"
            )
            for outcome in (alone, build.listed("--expect", "C"), build.ran("--expect", "C")):
                words = "conformance: every expected line is named by a test\n"
                self.assertEqual(outcome, (0, words))
            code, output = build.ran()
            self.assertEqual(code, 0, output)
            self.assertIn("C    4/4   Stores\n", output)

    def test_a_skipped_test_fails(self):
        skipped = PROGRAM.replace("[       OK ] Suite.Read", "[  SKIPPED ] Suite.Read")
        with Build(program=skipped) as build:
            words = "Suite.Read says that it proves C1.file, but it was skipped (Suite.Read)"
            self.check(build.ran("--expect", "C"), words, "no test names C1.file")
            write(build.root, {"tools/conformance.skips": "Suite.Read  no disk here\n"})
            output = build.ran("--expect", "C")[1]
            self.assertEqual(output, "conformance: no test names C1.file: Kinds.\n")
            write(build.root, {"tools/conformance.unproved": "C1.file  there is no disk\n"})
            self.assertEqual(build.ran()[0], 0, build.ran()[1])

    def test_a_skipped_case_fails(self):
        skipped = PYTEST.replace("ports[1] PASSED", "ports[1] SKIPPED (no ports)")
        with Build(pytest=skipped) as build:
            words = "it was skipped (tests/python/b_test.py::test_ports[1])"
            self.check(build.ran("--expect", "C"), words)
            write(build.root, {"tools/conformance.skips": "tests/python/b_test.py::* no ports\n"})
            self.assertEqual(build.ran("--expect", "C")[0], 0)

    def test_a_test_that_prints_has_run(self):
        printed = PYTEST.replace("ports[0] PASSED", "ports[0] \\nport 0: open\\nPASSED")
        with Build(pytest=printed) as build:
            self.assertEqual(build.ran("--expect", "C")[0], 0)
        for ended in ("ports[0] \\nport 0: open", "ports[0] \\nFAILED"):
            broken = PYTEST.replace("ports[0] PASSED", ended).replace("ports[1] PASSED", "ports[1]")
            with Build(pytest=broken) as build:
                self.assertNotEqual(build.ran("--expect", "C")[0], 0)

    def test_a_skip_of_unittest_fails(self):
        source = SOURCES["tests/tools/c_test.py"].replace("pass", "self.skipTest('no keys')")
        with Build(changes={"tests/tools/c_test.py": source}) as build:
            self.check(build.ran("--expect", "C"), "C3, but it was skipped", "no test names C3")

    def test_a_missing_test_fails(self):
        for name, lost in (("store.Suite", "C1.tcp"), ("python.b", "C2"), ("tools.c", "C3")):
            with self.subTest(name), Build(left_out=[name]) as build:
                words = f"says that it proves {lost}, but"
                absent = f"no test names {lost}"
                self.check(build.listed("--expect", "C"), f"{words} no list", absent)
                self.check(build.ran("--expect", "C"), f"{words} it did not run", absent)

    def test_a_test_that_does_not_exist_fails(self):
        source = "// spec: C1.tcp C2 C3 C4 kept\nTEST_P(Suite, Keeps) {}\n"
        with Build(changes={"src/core/store/d_test.cc": source}) as build:
            place = "src/core/store/d_test.cc:1: Suite.Keeps says that it proves C1.tcp and C2"
            self.check(build.listed(), place, "but no list of ctest or pytest has it")
            self.check(build.ran(), place, "but it did not run")

    def test_a_name_of_another_folder_is_another_test(self):
        source = "// spec: C1.tcp kept\nTEST_P(Suite, Kept) {}\n"
        with Build(changes={"src/core/group/a_test.cc": source}) as build:
            self.check(build.ran(), "src/core/group/a_test.cc:1: Suite.Kept", "did not run")

    def test_a_failed_test_proves_nothing(self):
        with Build(program=PROGRAM.replace("[       OK ] Suite", "[  FAILED  ] Suite")) as build:
            self.check(build.ran("--expect", "C"), "C1.file, but it failed", "names C1.file")

    def test_a_test_that_stopped_in_the_middle_proves_nothing(self):
        with Build(program=PROGRAM.split("words without")[0] + "END\n") as build:
            self.check(build.ran("--expect", "C"), "C1.file, but it did not run")

    def test_a_sample_without_a_case_proves_nothing(self):
        left_out = PROGRAM.replace(
            "[       OK ] Kinds/Suite.Kept/tcp",
            "not drawn with MUSTER_TEST_SEED=7\n[  SKIPPED ] Kinds/Suite.Kept/tcp",
        )
        with Build(program=left_out) as build:
            self.check(build.ran("--expect", "C"), "C1.tcp, but none of its cases was drawn")

    def test_instances_of_a_suite(self):
        source = "// spec: C1.tcp kept\nINSTANTIATE_TEST_SUITE_P(Kinds, Suite, Values());\n"
        with Build(changes={"src/core/store/e_test.cc": source}) as build:
            self.assertEqual(build.ran("--expect", "C")[0], 0)
        other = source.replace("Kinds", "Others")
        with Build(changes={"src/core/store/e_test.cc": other}) as build:
            self.check(build.ran("--expect", "C"), "Others.Suite says", "did not run")

    def test_a_case_of_a_test(self):
        source = "// spec: C1.tcp[{}] C2 C3 kept\nTEST_P(Suite, Kept) {{}}\n"
        for case, word in (("tcp", ""), ("tls", "none of its cases was drawn"), ("x", "run")):
            changes = {"src/core/store/e_test.cc": source.format(case)}
            with self.subTest(case), Build(changes=changes) as build:
                code, output = build.ran("--expect", "C")
                self.assertEqual(code, 1 if word else 0, output)
                self.assertIn(f"Suite.Kept[{case}] says" if word else "every expected", output)
                self.assertIn(word, output)

    def test_a_program_built_after_the_run_fails(self):
        with Build() as build:
            later = (build.root / "build/results/ctest.xml").stat().st_mtime + 1
            os.utime(build.root / "build/release/src/core/store/store_test", (later, later))
            self.check(build.ran("--expect", "C"), "store_test was built after the run")

    def test_what_is_proved_is_not_listed_as_unproved(self):
        with Build(changes={"tools/conformance.unproved": "C4  none yet\n"}) as build:
            for outcome in (conformance(build.root), build.listed(), build.ran()):
                self.check(outcome, "C4 is proved, and conformance.unproved says that it is not")

    def test_without_results_or_a_build(self):
        with Build(run=False) as build:
            self.check(build.ran("--expect", "C"), "has no results")
            (build.root / "build/CTestTestfile.cmake").unlink()
            self.check(build.listed(), "has no CTestTestfile.cmake")


if __name__ == "__main__":
    unittest.main()

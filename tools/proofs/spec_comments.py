# SPDX-License-Identifier: BSD-3-Clause
"""The lines that tests say they prove: the comments `spec:` above them."""

import ast
import io
import re
import tokenize

SPEC = re.compile(r"^\s*(?://|#)\s*spec:\s*(.*)")
COMMENT = re.compile(r"^\s*(?://|#)\s?(.*)")
GTEST = re.compile(r"^\s*(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)")
INSTANCES = re.compile(r"^\s*INSTANTIATE_(?:TYPED_)?TEST_SUITE_P\(\s*(\w+)\s*,\s*(\w+)")
INSTANCES_BEGIN = re.compile(r"^\s*INSTANTIATE_(?:TYPED_)?TEST_SUITE_P\(\s*$")
CTEST = re.compile(r"^\s*add_test\((?:\s*NAME\s+(\S+))?")
ID = re.compile(r"^([A-Z]\d+)(?:\.([a-z][a-z0-9_-]*))?(?:\[([\w-]+)\])?[,;:]?$")
FILES = (
    "src/**/*_test.cc",
    "src/**/*_test.h",
    "tests/**/*.cc",
    "tests/**/*.h",
    "tests/**/*.py",
    "tests/**/CMakeLists.txt",
    "python/**/*test*.py",
    "examples/**/CMakeLists.txt",
)


class Test:
    """A test as its source names it. `kind`: "gtest" (Suite.Test), "instances" (Prefix.Suite),
    "python" (Class::test, test, or Class for all of it) or "ctest" (the name that CMake gives, in
    which `${way}` stands for anything).
    """

    def __init__(self, kind, path, name):
        self.kind, self.path, self.name = kind, path, name

    def __str__(self):
        return f"{self.path}::{self.name}" if self.kind == "python" else self.name


class Proof:
    """The claim of one test about one line of the list. `case`: the parameter of the only instances
    of the test that prove it; all do if it is empty.
    """

    def __init__(self, said, words, place, test):
        self.line_id, self.clause, self.case = said
        self.words, self.place, self.test = words, place, test

    def name(self):
        return f"{self.line_id}.{self.clause}" if self.clause else self.line_id


def split_clauses(text):
    """`F5 F6 uneven, B4.env[tcp] set` -> [(("F5", "", ""), "uneven"), (("F6", "", ""), "uneven"),
    (("B4", "env", "tcp"), "set")]

    An id starts a clause at the beginning, behind another id (or `id and`), and behind a comma or
    semicolon.
    """
    groups, previous, before = [], "", ""
    for word in text.split():
        match = ID.match(word)
        follows_id = ID.match(previous) or (previous == "and" and ID.match(before))
        if match and (not previous or follows_id or previous[-1] in ",;"):
            if not follows_id or groups[-1][1]:
                groups.append(([], []))
            groups[-1][0].append((match[1], match[2] or "", match[3] or ""))
        elif groups and not (word == "and" and follows_id and not groups[-1][1]):
            groups[-1][1].append(word)
        before, previous = previous, word
    return [(said, " ".join(words).rstrip(",;")) for ids, words in groups for said in ids]


def python_tests(text):
    """{line on which a test begins, decorators included: its name}, and the names that a later
    definition takes away.
    """
    begins, hidden = {}, set()

    def look(body, within):
        seen = set()
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{within}{node.name}::")
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            elif not node.name.startswith("test"):
                continue
            name = within + node.name
            if name in seen:
                hidden.add(name)
            seen.add(name)
            begins[min([node.lineno] + [mark.lineno for mark in node.decorator_list])] = name

    look(ast.parse(text).body, "")
    return begins, hidden


def without_strings(text):
    """The lines of a Python file; those that are no comment of its are empty, so that a comment
    within a string is none.
    """
    lines = [""] * (text.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            lines[token.start[0] - 1] = token.line.rstrip("\n")
    return lines


def test_at(lines, number, path, python):
    """The Test that begins on the line, or None."""
    text = lines[number] if number < len(lines) else ""
    if path.endswith(".py"):
        name = python.get(number + 1)
        return Test("python", path, name) if name else None
    if path.endswith(".txt"):
        match = CTEST.match(text)
        return Test("ctest", path, match[1] or "") if match else None
    if INSTANCES_BEGIN.match(text) and number + 1 < len(lines):
        text += lines[number + 1].strip()
    for kind, pattern in (("gtest", GTEST), ("instances", INSTANCES)):
        if match := pattern.match(text):
            return Test(kind, path, f"{match[1]}.{match[2]}")
    return None


def comments_of(lines):
    """(line on which the comment begins, line behind it, its texts) for each block with `spec:`."""
    number = 0
    while number < len(lines):
        if not SPEC.match(lines[number]):
            number += 1
            continue
        start, texts = number, []
        while number < len(lines) and (comment := COMMENT.match(lines[number])):
            if spec := SPEC.match(lines[number]):
                texts.append(spec[1])
            else:
                texts[-1] += " " + comment[1]
            number += 1
        yield start, number, texts


def proofs_of(file, path, accepted):
    """(proofs, errors) of one file."""
    proofs, errors = [], []
    text = file.read_text(encoding="utf-8")
    if "spec:" not in text:
        return proofs, errors
    lines, python, hidden = text.splitlines(), {}, set()
    if path.endswith(".py"):
        lines, (python, hidden) = without_strings(text), python_tests(text)
    for start, behind, texts in comments_of(lines):
        place = f"{path}:{start + 1}"
        test = test_at(lines, behind, path, python)
        if test is None:
            errors.append(f"{place}: a spec comment with no test directly below it")
            continue
        if "DISABLED_" in test.name:
            errors.append(f"{place}: a disabled test proves nothing")
            continue
        if test.name in hidden:
            errors.append(f"{place}: {test.name} is defined twice, and only the last one runs")
        for words in texts:
            found = split_clauses(words)
            if not found:
                errors.append(f"{place}: a spec comment without an id")
            if re.search(r"\bspec:", words):
                errors.append(f"{place}: a second `spec:`; ids are parted by commas or semicolons")
            for said, about in found:
                proof = Proof(said, about, place, test)
                if not accepted.has(proof.name()):
                    errors.append(f"{place}: {proof.name()} is not in docs/acceptance.md")
                proofs.append(proof)
    return proofs, errors


def all_proofs(root, accepted):
    """(proofs, errors) of the tree."""
    proofs, errors = [], []
    for pattern in FILES:
        for file in sorted(root.glob(pattern)):
            found, wrong = proofs_of(file, file.relative_to(root).as_posix(), accepted)
            proofs += found
            errors += wrong
    return proofs, errors

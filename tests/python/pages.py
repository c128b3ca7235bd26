# SPDX-License-Identifier: BSD-3-Clause
"""The code blocks of a page, and a tutorial: its files written, its commands run and what they
print compared. Needs neither torch nor pytest.

    python3 pages.py PAGE FOLDER     runs the tutorial in FOLDER, which has the data already
"""

import ast
import builtins
import os
import pathlib
import re
import subprocess
import sys

FILES = {"python": "train.py", "cpp": "train.cc", "cmake": "CMakeLists.txt"}


def blocks_of(page):
    """(language, text) of each block, "" without a language."""
    return re.findall(r"^```(.*)\n((?:.*\n)*?)```$", page, re.M)


def undefined_names(program):
    """The names that this text of Python uses and nothing in it makes."""
    made, used = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    return used - made


def matches(expected, lines):
    """Whether these lines were expected: a line `...` stands for any number of lines, `...` in a
    line for any text.
    """
    text = re.escape("".join(line + "\n" for line in expected))
    text = text.replace(re.escape("...\n"), "(?:.*\n)*?") if "..." in expected else text
    return re.fullmatch(text.replace(re.escape("..."), ".*"), "".join(f"{x}\n" for x in lines))


def command_lines(lines):
    return [line for line in lines if line.startswith("muster run:") or line == "..."]


def other_lines(lines):
    return [line for line in lines if not line.startswith("muster run:")]


def run_commands(commands, expected, folder, environment, limit_s):
    """The launcher's lines come by another stream than the ranks': each has its own order."""
    ended = subprocess.run(
        ["bash", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    said = ended.stdout + ended.stderr
    lines = expected.splitlines()
    assert ended.returncode in (0, 137 if lines[-1].endswith("exit code 137") else 0), said
    assert matches(other_lines(lines), ended.stdout.splitlines()), said
    assert matches(command_lines(lines), command_lines(ended.stderr.splitlines())), said


def run_tutorial(page, folder, environment, limit_s=600):
    """Gives the number of blocks of commands."""
    blocks, count = blocks_of(page), 0
    for language, name in FILES.items():
        if text := "".join(text for each, text in blocks if each == language):
            (folder / name).write_text(text)
    for (language, text), (following, expected) in zip(blocks, blocks[1:], strict=False):
        if language == "sh":
            assert following == "", f"what do these commands print? {text}"
            run_commands(text, expected, folder, environment, limit_s)
            count += 1
    return count


if __name__ == "__main__":
    page, folder = map(pathlib.Path, sys.argv[1:])
    sys.exit(not run_tutorial(page.read_text(encoding="utf-8"), folder, os.environ))

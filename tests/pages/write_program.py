# SPDX-License-Identifier: BSD-3-Clause
"""Writes one program of the blocks of C++ in docs/user: a function for each page.

    python3 write_program.py PROGRAM.cc

A later block of a page sees the names of those before it and may use them again. A block with a
main() stands by itself.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

from pages import blocks_of  # noqa: E402

# Compiled elsewhere: by the test of the installed package, tests/pipeline and examples/backend.
ELSEWHERE = {"tutorial-cpp", "pipeline", "how-to-add-a-backend"}
HEADERS = ["checkpoint", "device_mesh", "distributed", "elastic", "parallel", "rpc"]
HEADERS += ["tensor_parallel"]
HEAD = """// SPDX-License-Identifier: BSD-3-Clause
// The blocks of docs/user, written by tests/pages/write_program.py.
"""
MAIN = """
int main(int, char** names) {
  for (++names; *names; ++names) {
    const auto page = pages.find(*names);
    if (page == pages.end()) return 1;
    page->second();
    if (muster::is_initialized()) muster::destroy_process_group();
    if (!std::getenv("RANK") || *std::getenv("RANK") == '0') std::printf("%s: ran\\n", *names);
  }
}
"""


def of_page(name, blocks, includes):
    """The text of a page's function."""
    outside, inside, depth = "", "", 0
    if not any("init_process_group(" in block or "init_rpc(" in block for block in blocks):
        inside += "muster::init_process_group();\n"
    for number, block in enumerate(blocks, 1):
        includes.update(re.findall(r"^#include .*$", block, re.M))
        block = re.sub(r"^#include .*\n", "", block, flags=re.M)
        if "int main() {" in block:
            outside += block.replace("int main() {", "static void whole() {")
            inside = "whole();\n"
            if number < len(blocks):
                inside += "muster::init_process_group();\n"
            continue
        # A local class has no templates.
        if found := re.search(r"^struct (?:.*\n)*?};\n", block, re.M):
            outside += found[0]
            block = block.replace(found[0], "")
        inside += "{\n" + block
        depth += 1
    space = "page_" + name.replace("-", "_")
    return (
        f"\nnamespace {space} {{\n{outside}\nstatic void run() {{\n{inside}{'}' * depth}\n}}\n"
        f"}}  // namespace {space}\n"
    )


def program():
    includes, text, table = {"#include <cstdio>", "#include <cstdlib>", "#include <map>"}, "", ""
    includes |= {"#include <string>", "#include <torch/torch.h>"}
    includes |= {f"#include <muster/{header}.h>" for header in HEADERS}
    for page in sorted((ROOT / "docs/user").glob("*.md")):
        blocks = blocks_of(page.read_text(encoding="utf-8"))
        blocks = [block for language, block in blocks if language == "cpp"]
        if blocks and page.stem not in ELSEWHERE:
            text += of_page(page.stem, blocks, includes)
            table += f'    {{"{page.stem}", page_{page.stem.replace("-", "_")}::run}},\n'
    includes = {line.replace('"', "<", 1).replace('"', ">") for line in includes}
    table = f"\nstatic const std::map<std::string, void (*)()> pages = {{\n{table}}};\n"
    return HEAD + "\n".join(sorted(includes)) + "\n" + text + table + MAIN


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(program(), encoding="utf-8")

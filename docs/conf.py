# SPDX-License-Identifier: BSD-3-Clause
"""`make docs`: these pages, the references of C++, Python and the commands, by Sphinx, in
build/docs.

The C++ reference is read from the public headers by doxygen, into build/doxygen. The reference of
the commands is what `muster COMMAND --help` prints.
"""

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from commands import commands, notes_of  # noqa: E402

MUSTER = pathlib.Path(os.environ.get("MUSTER_COMMAND", ROOT / "build/release/bin/muster"))
DOXYGEN = ROOT / "build/doxygen"

project = "muster"
extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe"]
# Single backticks in docstrings.
default_role = "code"
highlight_language = "none"
html_theme = "furo"
html_title = "muster"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_docstring_signature = True
breathe_projects = {"muster": str(DOXYGEN / "xml")}
breathe_default_project = "muster"
breathe_show_include = False
# Namespaces are declared in every header.
suppress_warnings = ["misc.highlighting_failure", "duplicate_declaration.cpp"]
exclude_patterns = []

DOXYFILE = """
PROJECT_NAME = muster
INPUT = {source}
RECURSIVE = YES
FILE_PATTERNS = *.h
STRIP_FROM_PATH = {source}
OUTPUT_DIRECTORY = {output}
GENERATE_XML = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
JAVADOC_AUTOBRIEF = YES
EXTRACT_ALL = YES
MARKDOWN_SUPPORT = YES
AUTOLINK_SUPPORT = NO
INPUT_FILTER = "sed -f {filter}"
EXCLUDE_SYMBOLS = torch torch::* at at::* c10 c10::*
QUIET = YES
WARNINGS = NO
"""


def read_headers():
    source = ROOT / "include"
    DOXYGEN.mkdir(parents=True, exist_ok=True)
    settings = DOXYFILE.format(source=source, output=DOXYGEN, filter=ROOT / "docs/headers.sed")
    subprocess.run(["doxygen", "-"], input=settings, text=True, check=True)
    name_files_by_path(DOXYGEN / "xml")


def name_files_by_path(xml):
    """Doxygen's index has the last part of a file's name; breathe looks for what stands there."""
    index = ElementTree.parse(xml / "index.xml")
    for compound in index.iterfind("compound[@kind='file']"):
        page = ElementTree.parse(xml / (compound.get("refid") + ".xml"))
        compound.find("name").text = page.find("compounddef/location").get("file")
    index.write(xml / "index.xml", encoding="utf-8", xml_declaration=True)


def in_columns(text, columns=88):
    """Wraps long lines of a command's help below the start of their description."""
    lines = []
    for line in text.splitlines():
        start = re.match(r"\s*\S.*?\s{2,}|\s*", line).end()
        indent = " " * (start if start < columns * 2 // 3 else 4)
        lines += textwrap.wrap(line, columns, subsequent_indent=indent, drop_whitespace=True) or [
            ""
        ]
    return "\n".join(lines)


def help_block(program, words=()):
    """What the program prints with these words and --help."""
    # Some benchmarks are Python programs, which need this Python's torch.
    environment = os.environ | {"MUSTER_PYTHON": sys.executable}
    done = subprocess.run(
        [str(program), *words, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    block = nodes.literal_block(text := in_columns(done.stdout), text)
    block["language"] = "none"
    return block


class CommandReference(SphinxDirective):
    """```{command-reference}```: a section for each command that `muster --help` lists, with its
    help; the lines of the directive, `run: text`, stand above it.
    """

    has_content = True

    def run(self):
        names = commands(MUSTER)
        notes = notes_of([line for line in self.content if line], names)
        sections = [help_block(MUSTER)]
        for name in names:
            section = nodes.section(ids=[f"muster-{name}"], names=[f"muster {name}"])
            section += nodes.title(text=f"muster {name}")
            if name in notes:
                self.state.nested_parse(StringList([notes[name]], "notes"), 0, section)
            section += help_block(MUSTER, [name])
            sections.append(section)
        return sections


class CommandHelp(SphinxDirective):
    """```{command-help} lab ddp```: what `muster-lab ddp --help` prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        lab, *words = self.arguments[0].split()
        assert lab == "lab", self.arguments
        return [help_block(MUSTER.with_name("muster-lab"), words)]


def without_signature(_app, _what, _name, _thing, _options, lines):
    """Of a function of the binding that has a second name, under which autodoc leaves it."""
    if lines and re.match(r"\w+\(.*\) -> \S", lines[0]):
        del lines[0]


def setup(app):
    app.connect("autodoc-process-docstring", without_signature)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("command-reference", CommandReference)
    read_headers()

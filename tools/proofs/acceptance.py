# SPDX-License-Identifier: BSD-3-Clause
"""docs/acceptance.md, and the lines of it that are known not to be proved."""

import pathlib
import re

LISTED = re.compile(r"^- \*\*([A-Z]\d+)\*\* (.*)")
HEADING = re.compile(r"^## ([A-Z])\. (.*)")
CLAUSES = re.compile(r" Clauses: ([a-z][a-z0-9_, -]*)\.$")
NAME = r"[A-Z]\d+(?:\.[a-z][a-z0-9_-]*)?"
REFUSAL = "refusal"  # a clause that every line has: what it does not do is said by name


class Wrong(Exception):
    """A file cannot be what is meant; the text says where and why."""


class Line:
    """A promise: its id, its words, and the clauses that need a test each."""

    def __init__(self, line_id, text):
        match = CLAUSES.search(text)
        self.line_id, self.text = line_id, text[: match.start()] if match else text
        self.clauses = match[1].split(", ") if match else []

    def demands(self):
        """The names that tests must give for the line to be proved whole."""
        return [f"{self.line_id}.{clause}" for clause in self.clauses] or [self.line_id]


class AcceptanceList:
    """`lines` ({id: Line}) and `headings` ({letter: text}), in the order of the page."""

    def __init__(self, root):
        self.lines, self.headings = {}, {}
        texts, current = {}, None
        for text in (root / "docs" / "acceptance.md").read_text(encoding="utf-8").splitlines():
            if match := HEADING.match(text):
                self.headings[match[1]] = match[2]
                current = None
            elif match := LISTED.match(text):
                current = match[1]
                if current in texts:
                    raise Wrong(f"{current} stands twice in docs/acceptance.md")
                texts[current] = match[2]
            elif current and text.startswith("  "):
                texts[current] += " " + text.strip()
            else:
                current = None
        for line_id, text in texts.items():
            self.lines[line_id] = Line(line_id, text)

    def has(self, name):
        line_id, _, clause = name.partition(".")
        line = self.lines.get(line_id)
        return line is not None and (clause in ("", REFUSAL) or clause in line.clauses)

    def of_letter(self, letter):
        return [line for line_id, line in self.lines.items() if line_id[0] == letter]

    def words(self, name):
        """The name, and what its line promises."""
        return f"{name}: {self.lines[name.partition('.')[0]].text}"

    def demands(self, arguments, whole=True):
        """The names meant by ids, clauses, ranges (F1-F17), letters, and files of such; unless the
        lines are to be `whole`, these themselves and not their clauses.
        """
        names = []
        for argument in arguments:
            if pathlib.Path(argument).is_file():
                text = pathlib.Path(argument).read_text(encoding="utf-8")
                names += self.demands(re.sub(r"#.*", "", text).replace(",", " ").split(), whole)
                continue
            if re.fullmatch(r"[A-Z]", argument):
                meant = [line.line_id for line in self.of_letter(argument)]
            elif match := re.fullmatch(r"([A-Z])(\d+)-\1?(\d+)", argument):
                meant = [f"{match[1]}{n}" for n in range(int(match[2]), int(match[3]) + 1)]
            else:
                meant = [argument]
            for name in meant:
                if not self.has(name):
                    raise Wrong(f"{name} is not in docs/acceptance.md")
                names += self.lines[name].demands() if whole and "." not in name else [name]
        return names


def read_table(path):
    """[(first word, the rest)] of a file whose lines may be empty or comments; [] without it."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = (line.split(None, 1) for line in lines if line.strip() and line[0] != "#")
    return [(row[0], row[1].strip() if len(row) > 1 else "") for row in rows]


def read_unproved(path, accepted):
    """({name: why}, errors) of the lines and clauses that are known not to be proved."""
    unproved, errors = {}, []
    for name, why in read_table(path):
        if not why:
            errors.append(f"{path.name}: {name} stands there without a reason")
        try:
            unproved |= dict.fromkeys(accepted.demands([name]), why)
        except Wrong as wrong:
            errors.append(f"{path.name}: {wrong}")
    return unproved, errors

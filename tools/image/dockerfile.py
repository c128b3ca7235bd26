# SPDX-License-Identifier: BSD-3-Clause
"""Reads a Dockerfile and a .dockerignore, as far as this tree's need it. What is not known here is
an error with its line, never skipped.
"""

import dataclasses
import json
import re
import shlex

STEPS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE"),
    *("LABEL", "RUN", "STOPSIGNAL", "USER", "WORKDIR"),
}
FLAGS = {"COPY": {"from", "chown"}}
VARIABLE = re.compile(r"\\(\$)|\$(?:(\w+)|\{(\w+)(?:(:[-+])([^}]*))?\})")


class Fault(Exception):
    """A line that cannot be read, or a step that cannot be taken."""


@dataclasses.dataclass(frozen=True)
class Step:
    line: int
    name: str
    text: str  # without flags
    flags: dict

    @property
    def words(self):
        """The words of its form in JSON, or None if it has another form."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except json.JSONDecodeError as error:
            raise Fault(f"line {self.line}: {self.name}: {error}") from None
        if not words or not all(isinstance(word, str) for word in words):
            raise Fault(f"line {self.line}: {self.name} has no list of words: {self.text}")
        return words

    def pairs(self):
        """NAME=VALUE of ENV, ARG and LABEL; the value is None where there is none."""
        for word in shlex.split(self.text):
            name, equals, value = word.partition("=")
            if not equals and self.name != "ARG":
                raise Fault(f"line {self.line}: {self.name} without '=': {word}")
            yield name, value if equals else None


@dataclasses.dataclass(frozen=True)
class Stage:
    line: int
    base: str
    name: str  # its number where it has none
    steps: tuple

    def all(self, name):
        return [step for step in self.steps if step.name == name]

    def last(self, name):
        found = self.all(name)
        return found[-1] if found else None


def instructions(text):
    """(line, name, rest) of each: lines that end with a backslash are joined, comments left out."""
    first, pending = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        name, _, rest = (pending + line).strip().partition(" ")
        yield first, name.upper(), rest.strip()
        pending = ""
    if pending:
        raise Fault(f"line {first}: it ends with a backslash at the end of the file")


def read_step(line, name, rest):
    if name not in STEPS:
        raise Fault(f"line {line}: {name} is not known here")
    flags = {}
    while found := re.match(r"--([\w-]+)=(\S+)\s+", rest):
        if found[1] not in FLAGS.get(name, ()):
            raise Fault(f"line {line}: --{found[1]} of {name} is not known here")
        flags[found[1]] = found[2]
        rest = rest[found.end() :]
    if rest.startswith("--") or "<<" in rest:
        raise Fault(f"line {line}: this form of {name} is not known here: {rest}")
    if not rest:
        raise Fault(f"line {line}: {name} of nothing")
    return Step(line, name, rest, flags)


def read(text):
    """The stages, in order."""
    stages = []
    for line, name, rest in instructions(text):
        if name == "FROM":
            found = re.fullmatch(r"(\S+)(?:\s+[Aa][Ss]\s+(\S+))?", rest)
            if not found:
                raise Fault(f"line {line}: FROM {rest}")
            stages.append((line, found[1], found[2] or str(len(stages)), []))
        elif not stages:
            raise Fault(f"line {line}: {name} before FROM is not known here")
        else:
            stages[-1][3].append(read_step(line, name, rest))
    if not stages:
        raise Fault("no FROM")
    return [Stage(line, base, name, tuple(steps)) for line, base, name, steps in stages]


def substitute(text, values):
    """`text` with $NAME, ${NAME}, ${NAME:-other} and ${NAME:+other}; what has no value is empty."""

    def value(found):
        dollar, plain, braced, sign, other = found.groups()
        if dollar:
            return "$"
        given = values.get(plain or braced) or ""
        if sign == ":-":
            return given or other
        return (other if given else "") if sign == ":+" else given

    return VARIABLE.sub(value, text)


def _pattern(text):
    """A .dockerignore's pattern as a regular expression for it and all that lies below."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", text.strip("/"))
    return re.compile("".join(parts.get(t) or re.escape(t) for t in tokens) + "(?:/.*)?")


class Ignored:
    """Which paths, relative to the context, `docker build` does not send."""

    def __init__(self, text):
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        self._rules = [(not line.startswith("!"), _pattern(line.lstrip("!"))) for line in lines]

    def __contains__(self, path):
        verdict = False
        for ignores, pattern in self._rules:
            if pattern.fullmatch(str(path)):
                verdict = ignores
        return verdict

# SPDX-License-Identifier: BSD-3-Clause
"""The versions of torch and Python that the wheel is for: matrix.toml, read."""

import dataclasses
import pathlib

import tomllib

FILE = pathlib.Path(__file__).with_name("matrix.toml")


@dataclasses.dataclass(frozen=True)
class Torch:
    built: str  # the version that the extension is compiled with: "2.15.0"
    tested: dict  # {Python: the day}

    @property
    def order(self):
        return tuple(map(int, self.built.split(".")))

    @property
    def minor(self):
        return "{}.{}".format(*self.order)


@dataclasses.dataclass(frozen=True)
class Matrix:
    torch: tuple  # oldest first
    python: tuple  # "3.11"

    @property
    def requirement(self):
        """What a wheel with all these extensions asks for: `torch>=2.13,<2.16`."""
        major, minor = self.torch[-1].order[:2]
        return f"torch>={self.torch[0].minor},<{major}.{minor + 1}"


def read(file=FILE):
    told = tomllib.loads(file.read_text(encoding="utf-8"))
    torch = [Torch(row["built"], row.get("tested", {})) for row in told["torch"]]
    return Matrix(tuple(sorted(torch, key=lambda each: each.order)), tuple(told["python"]))


def faults(matrix):
    """A sentence for each rule that the table breaks."""
    minors = [each.order[:2] for each in matrix.torch]
    if len(minors) != 3 or any(b[1] - a[1] != 1 for a, b in zip(minors, minors[1:])):
        yield f"not three minors of torch in a row: {', '.join(t.minor for t in matrix.torch)}"
    for each in matrix.torch:
        for python in sorted(set(each.tested) - set(matrix.python)):
            yield f"torch {each.built} is tested with Python {python}, which is not listed"


def table(matrix):
    """The lines of the page."""
    rows = [["torch", "extension built with", *(f"tested, Python {p}" for p in matrix.python)]]
    rows.append(["---"] * len(rows[0]))
    for each in matrix.torch:
        days = [each.tested.get(python, "not yet") for python in matrix.python]
        rows.append([each.minor, each.built, *days])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

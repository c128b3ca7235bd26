# SPDX-License-Identifier: BSD-3-Clause
"""The commands of `muster`, as the program itself lists them."""

import re
import subprocess


def commands(program):
    """Their names, in the order of `muster --help`."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    listed = done.stdout.partition("\nOptions:\n")[0]
    return re.findall(r"^  ([a-z][a-z-]*) {2,}\S", listed, re.M)


def notes_of(lines, names):
    """{name: text} of lines such as `run: what a reader should know beside its help`."""
    notes = {}
    for line in lines:
        name, colon, text = line.partition(": ")
        if not colon or name not in names:
            raise ValueError(f"not a note about a command of muster: {line}")
        notes[name] = text
    return notes

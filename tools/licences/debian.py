# SPDX-License-Identifier: BSD-3-Clause
"""Licences of Debian's packages, by their copyright files; and what their libraries load."""

import dataclasses
import functools
import pathlib
import re
import subprocess

from .libraries import ONLY_LIBRARY

DOCUMENTS = pathlib.Path("/usr/share/doc")
COMMON = pathlib.Path("/usr/share/common-licenses")
# manylinux takes them for granted on every machine, and auditwheel does not copy them.
EVERYWHERE = {"libc6", "libgcc-s1", "libstdc++6", "zlib1g"}
SPDX = {
    "boost": "BSL-1.0",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd-c3": "BSD-3-Clause",
    "expat": "MIT",
    "expat with embedded exception": "MIT, with an exception for object code",
}


class Missing(Exception):
    """A package is not there, or does not say its licence; the text says which."""


@dataclasses.dataclass
class Licence:
    name: str  # by SPDX
    holders: str  # the lines of the copyright
    text: str


def copyright_file(package):
    path = DOCUMENTS / package / "copyright"
    if not path.is_file():
        raise Missing(f"{path} does not exist: tools/setup installs {package} on Debian")
    return path


def paragraphs(text):
    """The fields of each paragraph of a machine-readable copyright file; {name: text}."""
    for block in re.split(r"\n\s*\n(?=\S)", text):
        fields, name = {}, None
        for line in block.splitlines():
            match = re.match(r"([A-Za-z-]+):[ \t]*(.*)", line)
            if match:
                name = match[1]
                fields[name] = match[2].strip()
            elif name:
                fields[name] += "\n" + ("" if line.strip() == "." else line.rstrip())
        yield fields


def dedented(text):
    """A licence's text without the indentation of its field, or of the whole."""
    lines = text.strip("\n").splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    least = min(indents, default=0)
    return "\n".join(line[least:].rstrip() for line in lines).strip("\n")


def licence_of(package, licence=""):
    """The Licence of most of the package's files. `licence`: its name where the copyright file is
    not machine-readable; its text is then kept whole.
    """
    text = copyright_file(package).read_text(encoding="utf-8")
    if licence:
        holders = re.findall(r"^[ \t]*(Copyright (?:©|\(c\)) .*)$", text, re.M)
        return Licence(licence, "\n".join(holders), text.strip())
    parts = list(paragraphs(text))
    main = next((part for part in parts if part.get("Files", "").split() == ["*"]), None)
    if main is None or "License" not in main:
        raise Missing(f"{copyright_file(package)} does not say the licence of `Files: *`")
    name, _, words = main["License"].partition("\n")
    for part in parts:  # of the paragraph that has the licence's text for all files
        if not words.strip() and "Files" not in part:
            other, _, words_there = part.get("License", "").partition("\n")
            words = words_there if other == name else words
    if not words.strip():
        raise Missing(f"{copyright_file(package)} has no text of {name}")
    holders = [line.strip() for line in main.get("Copyright", "").splitlines() if line.strip()]
    common = re.search(r"/usr/share/common-licenses/(Apache-[\d.]+\d)", words)
    words = dedented(words)
    if common:
        words += "\n\n" + (COMMON / common[1]).read_text(encoding="utf-8").strip("\n")
    holders = "\n".join(re.sub(r"^(?:Copyright:? )?(?:\(c\) )?", "Copyright ", h) for h in holders)
    return Licence(SPDX.get(name.lower(), name), holders, words)


def owners_of(paths):
    """{path: its package}. Debian knows some files by paths from before /lib became a link."""
    plain = [path.removeprefix("/usr") for path in paths]
    names = [f"{usr}{path}" for path in plain for usr in ("", "/usr")]
    done = subprocess.run(["dpkg-query", "-S", *names], capture_output=True, text=True)
    owners = {
        path.removeprefix("/usr"): package
        for package, path in re.findall(r"^([\w.+-]+)(?::\w+)?: (/.*)", done.stdout, re.M)
    }
    for path in plain:
        if path not in owners:
            raise Missing(f"no Debian package has {path}")
    return {path: owners[name] for path, name in zip(paths, plain)}


@functools.cache
def shared_libraries(package):
    """The files that the links `lib*.so` of a development package lead to."""
    done = subprocess.run(["dpkg-query", "-L", package], capture_output=True, text=True)
    only = re.escape(ONLY_LIBRARY[package]) if package in ONLY_LIBRARY else r"lib[^/]+\.so"
    links = [line for line in done.stdout.splitlines() if re.search(rf"/{only}$", line)]
    if not links:
        raise Missing(f"{package} has no shared library: tools/setup installs it on Debian")
    return [str(pathlib.Path(link).resolve()) for link in links]


@functools.cache
def runtime_package(package):
    """The package with the shared library of a development package."""
    return " and ".join(sorted(set(owners_of(shared_libraries(package)).values())))


@functools.cache
def loaded_libraries(packages):
    """Two tables, {library: its package}: the libraries of these development packages, and those
    that they load, without what is on every machine.
    """
    own = owners_of([library for each in packages for library in shared_libraries(each)])
    loaded = set()
    for library in own:
        done = subprocess.run(["ldd", library], capture_output=True, text=True, check=True)
        loaded |= set(re.findall(r"=> (/\S+)", done.stdout))
    others = {
        library: package
        for library, package in owners_of(sorted(loaded)).items()
        if package not in EVERYWHERE and package not in own.values()
    }
    return own, others


def indirect_packages(packages):
    """The packages of what the libraries of these development packages load, sorted."""
    return sorted(set(loaded_libraries(packages)[1].values()))

# SPDX-License-Identifier: BSD-3-Clause
"""The libraries' table held against the source tree."""

import re

from .libraries import LIBRARIES, OTHER_HEADERS, OTHER_PACKAGES

SOURCES = ("src", "include", "python")
INCLUDE = re.compile(r"^\s*#\s*include <([\w.+-]+/|[\w+-]+\.h)", re.M)
LOOKED_FOR = re.compile(r"^\s*(?:find_package|pkg_check_modules)\((\w+)", re.M)
INSTALLED = re.compile(r"^packages=\((.*?)\)", re.M | re.S)
# The headers of POSIX, glibc and the compiler.
SYSTEM = re.compile(
    r"(?:unistd|signal|fcntl|poll|pthread|cxxabi|dlfcn|stdlib|time|sched|link|ifaddrs|string|netdb"
    r"|execinfo|errno|dirent|ucontext|stdio|stdint|pwd|malloc|limits|grp|\w+intrin|elf)\.h"
)


def included(root):
    """{what a system include begins with: a file that has it}"""
    found = {}
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc", ".inc"):
                for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
                    found.setdefault(name, path.relative_to(root))
    return found


def looked_for(root):
    """{the name of a library in CMake: a file that looks for it}"""
    found = {}
    for folder in ("cmake", *SOURCES):
        paths = (*(root / folder).rglob("CMakeLists.txt"), *(root / folder).rglob("*.cmake"))
        for path in sorted(paths):
            for name in LOOKED_FOR.findall(path.read_text(encoding="utf-8")):
                found.setdefault(name, path.relative_to(root))
    return found


def faults(root):
    """A sentence for each difference."""
    text = INSTALLED.search((root / "tools/setup").read_text(encoding="utf-8"))[1]
    installed = {word for word in text.split() if word.endswith("-dev")} - {"libclang-rt-dev"}
    rows = {library.package for library in LIBRARIES}
    where = "tools/licences/libraries.py"
    for package in sorted(installed - rows):
        yield f"tools/setup installs {package}, which has no row in {where}"
    for package in sorted(rows - installed):
        yield f"tools/setup does not install {package}, which has a row in {where}"
    names = {library.cmake for library in LIBRARIES} | set(OTHER_PACKAGES)
    for name, path in looked_for(root).items():
        if name not in names:
            yield f"{path} looks for {name}, which has no row in {where}"
    headers, found = {library.includes for library in LIBRARIES}, included(root)
    for name, path in found.items():
        if name not in headers and name not in OTHER_HEADERS and not SYSTEM.fullmatch(name):
            yield f"{path} includes <{name}...>, which has no row in {where}"
    for library in LIBRARIES:
        if library.includes and library.includes not in found:
            yield f"nothing includes <{library.includes}...>: {library.name} has a row in {where}"

# SPDX-License-Identifier: BSD-3-Clause
"""The licences in a wheel, held against the libraries in it."""

import re
import zipfile

from . import debian


def library_name(file):
    """`libldap-2.5` for libldap-2.5.so.0.1.8, and for the name with a hash by auditwheel."""
    name = re.sub(r"-[0-9a-f]{8}(?=\.)", "", file.rpartition("/")[2], count=1)
    return name.partition(".so")[0]


def faults(path, packages):
    """A sentence for each licence that the wheel lacks. `packages`: the development packages of the
    shared libraries that muster is linked with.
    """
    names = zipfile.ZipFile(path).namelist()
    licences = {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name}
    for name in ("LICENSE", "THIRD_PARTY.md"):
        if name not in licences:
            yield f"{path.name} has no {name} among its licences"
    own, others = debian.loaded_libraries(packages)
    known = {library_name(file): package for file, package in (own | others).items()}
    for name in names:
        if not re.match(r"[^/]+\.libs/[^/]+$", name):
            continue
        package = known.get(library_name(name))
        if package is None:
            yield f"{path.name} contains {name}, which is no library of THIRD_PARTY.md"
        elif f"{package}.txt" not in licences:
            yield f"{path.name} contains {name} and not {package}.txt of tools/third_party --texts"

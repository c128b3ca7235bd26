# SPDX-License-Identifier: BSD-3-Clause
"""Finds the extension module `_C` that fits the torch of this process.

A package that was built by `make` or from the sources has one, beside this file, for exactly the
torch that it was built against. The wheel of `make wheel` has one for each of several minors of
torch, in `_extensions/torch_<major>_<minor>`, with the `_build` that belongs to it; it takes every
release of these. Extension and torch share C++ classes, whose layout a minor may change.
"""

import importlib
import importlib.machinery
import pathlib
import re


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def fitting(extensions: pathlib.Path, torch_version: str) -> pathlib.Path:
    """The folder of the extension for this torch; raises ImportError if there is none."""
    found = {}
    for folder in extensions.glob("torch_*_*"):
        major, minor = map(int, folder.name.split("_")[1:])
        found[major, minor] = folder
    # A build before the release (2.16.0a0, 2.16.0.dev20261201) may have other classes.
    release = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)*(?:\+.*)?", torch_version)
    folder = found.get((int(release[1]), int(release[2]))) if release else None
    there = [f"{major}.{minor}" for major, minor in sorted(found)]
    if folder is None:
        raise ImportError(
            f"this muster has extensions for torch {_listed(there)}, and torch {torch_version} is "
            "installed: the two share C++ classes and must fit. Install a torch that fits (pip "
            f'install "torch=={there[-1]}.*"), or build muster from its sources with this torch '
            "(pip install --force-reinstall --no-deps . in a clone)."
        )
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any((folder / f"_C{suffix}").exists() for suffix in suffixes):
        built = _listed(sorted(file.name for file in folder.glob("_C.*"))) or "nothing"
        raise ImportError(
            f"this muster was built for another Python: {folder} has {built}, and this one loads "
            f"_C{suffixes[0]}. Install muster with the pip of this Python."
        )
    return folder


def prepare(search_path: list[str], torch_version: str) -> None:
    """Makes `muster._C` and `muster._build` those that fit. `search_path`: that of the package."""
    extensions = pathlib.Path(search_path[0]) / "_extensions"
    if extensions.is_dir():
        search_path.append(str(fitting(extensions, torch_version)))
        return
    built_for = importlib.import_module("muster._build").TORCH_VERSION
    if torch_version.split("+")[0] != built_for:
        raise ImportError(
            f"this muster was built for torch {built_for}, and torch {torch_version} is "
            "installed: the two share C++ classes and must fit. "
            f"Install torch {built_for}, or build muster again with this torch (pip install "
            "--force-reinstall --no-deps . in a clone)."
        )

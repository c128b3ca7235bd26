# SPDX-License-Identifier: BSD-3-Clause
"""Lays out the wheel: one package, an extension for each torch, the programs, and the licences.

    muster/                              what every torch shares
    muster/_extensions/torch_2_15/       _C, _build and the benchmarks' worker for torch 2.15
    muster/_extensions/bin/              the command `muster`, free of torch
    muster/_extensions/muster/           plugins for MPI, where the extensions look for them
    muster_dist-<version>.data/scripts/  starts the command with the libraries of the wheel

`python/muster/_loader.py` chooses among the folders.
"""

import os
import pathlib
import re
import shutil

SHIMS = pathlib.Path(__file__).parent / "shims"


def folder_of(version):
    return "torch_" + version.minor.replace(".", "_")


def move(files, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.move(file, folder / file.name)


def place_shim(name, folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(SHIMS / name, folder / name)
    os.chmod(folder / name, 0o644 if name.endswith(".py") else 0o755)


def add_extension(installed, tree, version):
    """Moves what was installed for one torch into the tree; what all share is the last one's."""
    extensions = tree / "muster/_extensions"
    own = extensions / folder_of(version)
    package = installed / "muster"
    move([*package.glob("_C.*.so"), package / "_build.py"], own)
    move([installed / "scripts/muster_bench_worker"], own)
    move(package.glob("libmuster_mpi_*.so"), extensions / "muster")
    move([installed / "scripts/muster"], extensions / "bin")
    shutil.copytree(package, tree / "muster", dirs_exist_ok=True)


def add_metadata(tree, metadata, requirement, texts):
    """The .dist-info that the build backend makes for one torch, with the requirement of all and
    the licences of the libraries that auditwheel will copy. `texts(folder)` writes these.
    """
    folder = tree / metadata.name
    shutil.copytree(metadata, folder)
    texts(folder / "licenses")
    head, _, readme = (folder / "METADATA").read_text(encoding="utf-8").partition("\n\n")
    head, changed = re.subn(
        r"(?m)^Requires-Dist: torch==.*$", f"Requires-Dist: {requirement}", head
    )
    assert changed == 1, head
    named = set(re.findall(r"(?m)^License-File: (.*)$", head))
    for file in sorted((folder / "licenses").iterdir()):
        if file.name not in named:
            head += f"\nLicense-File: {file.name}"
    (folder / "METADATA").write_text(f"{head}\n\n{readme}", encoding="utf-8")


def add_programs(tree, metadata_name):
    programs = tree / "muster/_extensions/bin"
    place_shim("muster_bench_worker", programs)
    place_shim("bench_worker.py", programs)
    place_shim("muster", tree / metadata_name.replace(".dist-info", ".data") / "scripts")

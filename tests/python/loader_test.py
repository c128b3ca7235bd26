# SPDX-License-Identifier: BSD-3-Clause
"""muster/_loader.py: which extension a wheel with several loads. The wheel here is links to this
build's files, its extension for the torch that is there, and for others files that no Python loads.
"""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from scratch import LIMIT_S

import muster

PACKAGE = pathlib.Path(muster.__file__).parent
MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])
HERE = (MAJOR, MINOR)
OLDER, NEWER = (MAJOR, MINOR - 1), (MAJOR, MINOR + 1)
(EXTENSION,) = PACKAGE.glob("_C.*.so")


@pytest.fixture
def wheel(tmp_path):
    """Makes the package `muster` with an extension for each of these minors; its folder."""

    def make(*minors, suffix=EXTENSION.name):
        package = tmp_path / "muster"
        package.mkdir()
        for entry in PACKAGE.iterdir():
            if entry.name not in {"_build.py", EXTENSION.name, "__pycache__"}:
                (package / entry.name).symlink_to(entry)
        for major, minor in minors:
            folder = package / f"_extensions/torch_{major}_{minor}"
            folder.mkdir(parents=True)
            if (major, minor) == HERE:
                (folder / suffix).symlink_to(EXTENSION)
                (folder / "_build.py").symlink_to(PACKAGE / "_build.py")
            else:
                (folder / EXTENSION.name).write_text("not for this torch")
        return tmp_path

    return make


def run(path, program, *words):
    return subprocess.run(
        [sys.executable, *words, "-c", program],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def imported_as(path, torch_version):
    """What a process says of importing muster with a torch of this version."""
    return run(path, f"import torch; torch.__version__ = {torch_version!r}; import muster")


# spec: V1 of several extensions the one that fits the installed torch is loaded, by any release of
# its minor; it is muster._C for every module, and works
def test_the_extension_that_fits_is_loaded(wheel):
    path = wheel(OLDER, HERE, NEWER)
    done = run(
        path,
        f"import torch; torch.__version__ = '{MAJOR}.{MINOR}.7+cpu'\n"
        "import sys, muster, muster.rpc, muster.checkpoint\n"
        "store = muster.HashStore(); store.set('key', 'value')\n"
        "assert muster.HashStore is sys.modules['muster._C'].HashStore and muster.__version__\n"
        "print(store.get('key'), [n for n in sys.modules if n.split('.')[-1] == '_C'],\n"
        "      muster._C.__file__)",
    )
    assert done.returncode == 0, done.stderr
    folder = path / f"muster/_extensions/torch_{MAJOR}_{MINOR}"
    assert done.stdout.split("'")[1] == "value" and str(folder / EXTENSION.name) in done.stdout
    assert "'muster._C'" in done.stdout and done.stdout.count("muster._C'") == 1


# spec: V1 without one that fits, the error names the torch found, the versions there are and what
# to type; so too for a build before the release
@pytest.mark.parametrize("version", [f"{MAJOR}.{MINOR - 2}.1+cu130", f"{MAJOR}.{MINOR}.0a0+git1"])
def test_without_one_that_fits(wheel, version):
    done = imported_as(wheel(OLDER, HERE, NEWER), version)
    assert done.returncode == 1
    there = f"{MAJOR}.{MINOR - 1}, {MAJOR}.{MINOR} and {MAJOR}.{MINOR + 1}"
    assert f"ImportError: this muster has extensions for torch {there}" in done.stderr
    assert f"torch {version} is installed" in done.stderr
    assert f'pip install "torch=={MAJOR}.{MINOR + 1}.*"' in done.stderr


# spec: V1 the loader's error for another Python names what there is
def test_another_python(wheel):
    done = run(wheel(HERE, suffix="_C.cpython-399-x86_64-linux-gnu.so"), "import muster")
    assert done.returncode == 1 and "built for another Python" in done.stderr
    assert "_C.cpython-399-x86_64-linux-gnu.so" in done.stderr and EXTENSION.name in done.stderr

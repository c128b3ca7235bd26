# SPDX-License-Identifier: BSD-3-Clause
"""A LibTorch of a given version to compile with: the installed one, or part of a wheel from PyPI.

Of a downloaded wheel only the headers and the libraries that muster is linked with are kept, half a
GB; nothing that it depends on is fetched.
"""

import pathlib
import re
import shutil
import subprocess
import zipfile

LIBRARIES = {f"torch/lib/lib{name}.so" for name in ("c10", "torch", "torch_cpu", "torch_python")}


def version_in(folder):
    """The version of the package `torch` in `folder`, without what follows `+`; "" if none."""
    file = folder / "version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r"^__version__ = '([^'+]+)", text, re.M)
    return found[1] if found else ""


def is_needed(name):
    return name.startswith("torch/include/") or name == "torch/version.py" or name in LIBRARIES


def download(version, python, folder):
    """Leaves in `folder` what is needed of the wheel of torch `version` for this `python`."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fetch = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [python, *fetch, "--only-binary", ":all:", "--dest", part, f"torch=={version}"], check=True
    )
    (wheel,) = part.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(part, filter(is_needed, archive.namelist()))
    wheel.unlink()
    part.rename(folder)  # whole, or not there


def libtorch(version, python, cache):
    """The folder of torch `version`, fetched into `cache` unless `python` has it installed."""
    ask = "import sysconfig; print(sysconfig.get_path('platlib'))"
    said = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    installed = pathlib.Path(said.stdout.strip()) / "torch"
    if version_in(installed) == version:
        return installed
    folder = cache / f"torch-{version}"
    if version_in(folder / "torch") != version:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"wheel: fetching LibTorch {version} (0.5 GB)", flush=True)
        download(version, python, folder)
    return folder / "torch"

# SPDX-License-Identifier: BSD-3-Clause
"""tools/wheel/try in a clean Debian 12 with Python: no compiler, and a user who is not root."""

import pathlib
import shutil
import tempfile
import time

from . import root

TREE = pathlib.Path(__file__).resolve().parents[2]
TAKEN = ("tools/wheel/try", "examples/digits/digits.py", "examples/data/digits.csv")
USER = "user"


def say(text):
    print(f"try: {text}", flush=True)


def prepare(folder, wheel):
    """The root, with the wheel and what is tried with it below /trial."""
    start = time.monotonic()
    debian = root.Root.debian(folder, ["python3", "python3-venv"])
    status, said = debian.run(["useradd", "--create-home", USER], root.Process(), timeout=60)
    if status != 0:
        raise RuntimeError(f"useradd: {said}")
    for name in TAKEN:
        place = debian.path("trial") / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, place)
    shutil.copy(wheel, debian.path("trial"))
    took, size = time.monotonic() - start, debian.megabytes()
    say(f"Debian 12 with Python: {took / 60:.1f} minutes, {size} MB")
    return debian


def files_of_muster(debian):
    """What a trial must not leave. The traces of its jobs stay in /tmp, as everywhere."""
    found = (path.relative_to(debian.folder) for path in debian.folder.rglob("*"))
    return {p for p in found if p.parts[0] not in ("trial", "tmp") and "muster" in str(p)}


def run(wheel, options, site):
    """The exit status, or what went wrong. `site`: site-packages of this machine, or None."""
    if reason := root.missing("debootstrap"):
        return f"try: --debian {reason}"
    (TREE / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wheel-trial-", dir=TREE / "build") as folder:
        pathlib.Path(folder).chmod(0o755)  # the user looks through it
        debian = prepare(pathlib.Path(folder) / "root", wheel)
        if there := debian.compilers():
            return f"try: Debian with Python has {', '.join(there)}"
        before = files_of_muster(debian)
        variables, binds = root.pip_settings()
        if site:
            binds[str(site.resolve())] = "site"
            options = [*options, "--site", "/dev/host/site"]
        process = root.Process(user=USER, folder=f"/home/{USER}", variables=variables, binds=binds)
        command = ["python3", "/trial/tools/wheel/try", "--wheel", f"/trial/{wheel.name}"]
        status = debian.start([*command, *options], process).wait()
        if status == 0 and (left := files_of_muster(debian) - before):
            return f"try: the root has {sorted(map(str, left))[:9]} left"
    return status

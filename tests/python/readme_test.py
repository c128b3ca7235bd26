# SPDX-License-Identifier: BSD-3-Clause
"""README's program in Python: under muster run, under torchrun, and on threads."""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import packaging.requirements
import pytest
from scratch import LIMIT_S

import muster as dist

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAM = re.search(r"```python\n(import torch\nimport muster as dist\n.*?)```", README, re.DOTALL)[
    1
]
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
PRINTED = [f"rank {rank} of 4: 10" for rank in range(4)]
MUSTER = pathlib.Path(dist.__file__).parents[2] / "bin/muster"


def printed_lines(text):
    """The lines of the program's ranks, in order."""
    return sorted(re.findall(r"rank \d of 4: \d+", text))


# spec: J3 the README's program under muster run and torchrun, J5 their environment
@pytest.mark.sampled(1)
@pytest.mark.parametrize("launcher", ["muster run", "torchrun"])
def test_readme_program_by_launcher(launcher, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    start = (
        [MUSTER, "run"]
        if launcher == "muster run"
        else [sys.executable, "-m", "torch.distributed.run"]
    )
    program = [sys.executable] if launcher == "muster run" else []
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MUSTER_SECRET")
    }
    ended = subprocess.run(
        [*start, "--standalone", "--nproc-per-node", "4", *program, tmp_path / "program.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert printed_lines(ended.stdout) == PRINTED


# spec: J3 the README's command from the tree, in an environment that says nothing of any Python
def test_readme_program_from_the_tree(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (command,) = [words for words in COMMANDS if "build/release/bin/muster" in words]
    places = {"build/release": str(MUSTER.parents[1]), "program.py": str(tmp_path / "program.py")}
    words = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in command]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if not (
        ROOT / ".venv/bin/python3"
    ).exists():  # built with another torch: MUSTER_PYTHON, then as now
        environment["MUSTER_PYTHON"] = sys.executable
    ended = subprocess.run(
        ["env", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert printed_lines(ended.stdout) == PRINTED


# spec: J3 what `pip install .` builds is built against the torch that is there, which an isolated
# build finds too: pip fetches no other
# spec: V1 the wheel of `make wheel` is what the README installs
def test_readme_installs_without_fetching_torch_again(tmp_path):
    needs = re.search(r"requires = \[(.*?)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert re.findall(r'"([\w-]+)', needs) == ["scikit-build-core"]
    installed = [words for words in COMMANDS if words[:2] == ["pip", "install"]]
    assert installed == [["pip", "install", "dist/muster_dist-*.whl"]]
    assert ["make", "wheel"] in COMMANDS and "`pip install .`" in README
    installs = ["pip", "install", "--no-build-isolation", "."]
    if importlib.util.find_spec(
        "scikit_build_core"
    ):  # tools/setup brings it; an environment of somebody's own may lack it
        # Without torch's own needs: tools/setup leaves out what CPUs have no use for.
        dry = [
            sys.executable,
            "-m",
            *installs[:-1],
            "--dry-run",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            f"--report={tmp_path / 'report'}",
            str(ROOT),
        ]
        done = subprocess.run(dry, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"Would install muster[-_]dist-[\d.]+$", done.stdout.strip()), done.stdout
        (wheel,) = json.loads((tmp_path / "report").read_text())["install"]
        for text in wheel["metadata"]["requires_dist"]:
            needs = packaging.requirements.Requirement(text)
            assert needs.specifier.contains(importlib.metadata.version(needs.name)), text


# spec: J3 a build that pip isolates, whose paths lack the environment's packages, takes the torch
# of that environment; without any, it says at once what to type
@pytest.mark.parametrize("there", [True, False])
def test_isolated_build(there):
    program = (
        "import sys, sysconfig\n"
        "sys.path = [each for each in sys.path if 'site-packages' not in each]\n"
        f"if not {there}: sysconfig.get_path = lambda name: '/nonexistent'\n"
        "import fitting_torch\n"
        "print(fitting_torch.dynamic_metadata('dependencies', {}))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "tools/wheel")},
    )
    if there:
        version = importlib.metadata.version("torch").split("+")[0]
        assert done.stdout.strip() == f"['torch=={version}']", done.stderr
    else:
        assert done.returncode == 1 and "pip install torch\n    pip install .\n" in done.stderr


# spec: V1 the program that the page on installing runs learns the digits
def test_digits():
    start = [MUSTER, "run", "--standalone", "--nproc-per-node", "2", sys.executable]
    done = subprocess.run(
        [*start, ROOT / "examples/digits/digits.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    verdict = re.search(r"2 ranks, held-out accuracy ([\d.]+) %", done.stdout)
    assert done.returncode == 0 and verdict and float(verdict[1]) > 95, done.stdout + done.stderr


# spec: J2 the README's program on threads
def test_readme_program_on_threads():
    names = {"__name__": "program"}
    exec(compile(PROGRAM, "program.py", "exec"), names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        dist.spawn(names["main"], nprocs=4, threads=True)
    assert printed_lines(printed.getvalue()) == PRINTED

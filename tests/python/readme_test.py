"""README's program in Python, as it stands there: under muster run, under torchrun, and on threads."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

import muster as dist

README = pathlib.Path(__file__).parents[2] / "README.md"
PROGRAM = re.search(r"```python\n(import torch\nimport muster as dist\n.*?)```", README.read_text(), re.DOTALL)[1]
PRINTED = [f"rank {rank} of 4: 10" for rank in range(4)]
MUSTER = pathlib.Path(dist.__file__).parents[2] / "bin/muster"


def printed_lines(text):
    """What the program's ranks have said, in order."""
    return sorted(re.findall(r"rank \d of 4: \d+", text))


# spec: J3 the README's program under muster run and torchrun, J5 their environment
@pytest.mark.parametrize("launcher", ["muster run", "torchrun"])
def test_readme_program_by_launcher(launcher, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    start = [MUSTER, "run"] if launcher == "muster run" else [sys.executable, "-m", "torch.distributed.run"]
    program = [sys.executable] if launcher == "muster run" else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_SECRET")}
    ended = subprocess.run([*start, "--standalone", "--nproc-per-node", "4", *program, tmp_path / "program.py"], capture_output=True, text=True,
                           timeout=240, env=environment | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    assert printed_lines(ended.stdout) == PRINTED


# spec: J2 the README's program on threads
def test_readme_program_on_threads():
    names = {"__name__": "program"}
    exec(compile(PROGRAM, "program.py", "exec"), names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        dist.spawn(names["main"], nprocs=4, threads=True)
    assert printed_lines(printed.getvalue()) == PRINTED

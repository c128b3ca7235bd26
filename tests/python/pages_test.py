# SPDX-License-Identifier: BSD-3-Clause
"""The pages of docs/user do what they say: tutorials are followed, programs run."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from pages import blocks_of, matches, run_tutorial, undefined_names
from scratch import LIMIT_S

import muster as dist

ROOT = pathlib.Path(__file__).parents[2]
MUSTER = pathlib.Path(dist.__file__).parents[2] / "bin/muster"
sys.path.insert(0, str(ROOT / "docs"))

from commands import commands, notes_of  # noqa: E402


# spec: V9.tutorial from an empty folder to a model that was killed and resumed, in Python
def test_tutorial(tmp_path):
    shutil.copy(ROOT / "examples/data/digits.csv", tmp_path)
    path = f"{MUSTER.parent}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "MUSTER_PYTHON": sys.executable}
    page = (ROOT / "docs/user/tutorial-python.md").read_text()
    assert run_tutorial(page, tmp_path, environment, LIMIT_S) == 4


PAGES = {
    page.stem: "".join(
        text for language, text in blocks_of(page.read_text()) if language == "python"
    )
    for page in sorted((ROOT / "docs/user").glob("*.md"))
}
# How many ranks run the blocks of a page, one after another, as one program. The others need what a
# machine may lack (an etcd server, GPUs, MPI), are pieces of a backend, or have tests elsewhere.
RANKS = {
    "checkpoints": 2,
    "ddp": 2,
    "ddp-hooks": 2,
    "ddp-more": 2,
    "dtensor": 4,
    "fsdp": 2,
    "fully-shard": 4,
    "functional": 2,
    "local-sgd": 4,
    "quantized": 2,
    "shared-memory": 2,
}
# Those whose processes the launcher starts, with its options.
LAUNCHED = {
    "dist-autograd": [],
    "elastic-keep": ["--elastic", "keep", "--max-restarts", "1"],
    "elastic-sharded": ["--elastic", "keep", "--max-restarts", "1"],
    "migration": [],
    "rpc": [],
}


# spec: V9.blocks every block of Python compiles and names nothing that its page does not make
@pytest.mark.parametrize("name", [name for name, program in PAGES.items() if program])
def test_complete(name):
    compile(PAGES[name], name, "exec")
    assert undefined_names(PAGES[name]) == set()


# spec: V9.blocks those that are whole run, on threads as ranks
@pytest.mark.parametrize("name", RANKS)
def test_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = compile(PAGES[name], name, "exec")

    def run(_rank):
        if "init_process_group(" not in PAGES[name]:
            dist.init_process_group()
        exec(program, {"__name__": "page"})
        if dist.is_initialized():
            dist.destroy_process_group()

    dist.spawn(run, nprocs=RANKS[name], threads=True)


# spec: V9.blocks those that are whole run, started by `muster run`
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAUNCHED)
def test_runs_by_launcher(name, tmp_path):
    (tmp_path / "page.py").write_text(PAGES[name])
    start = [MUSTER, "run", "--standalone", "--nproc-per-node", "2", *LAUNCHED[name]]
    ended = subprocess.run(
        [*start, sys.executable, "page.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


# spec: V9.tutorial what a page shows is compared, but for what it leaves out
@pytest.mark.parametrize(
    ("expected", "said", "good"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a", "c"], False),
        (["a"], ["a", "b"], False),
        (["a", "...", "d"], ["a", "b", "c", "d"], True),
        (["...", "d"], ["d"], True),
        (["...", "d"], ["c", "e"], False),
        (["at ... s"], ["at 1.5 s"], True),
        (["at ... s"], ["at 1.5 min"], False),
        (["1.5"], ["105"], False),
    ],
)
def test_compared(expected, said, good):
    assert bool(matches(expected, said)) == good


# spec: V9.generated the reference has every command that there is: those with a manual page
def test_reference_of_commands(tmp_path):
    subprocess.run([MUSTER, "man-pages", tmp_path], check=True, timeout=LIMIT_S)
    names = commands(MUSTER)
    assert "run" in names
    assert {page.stem for page in tmp_path.iterdir()} == {"muster"} | {f"muster-{x}" for x in names}
    page = (ROOT / "docs/reference/command-line.md").read_text()
    (block,) = re.findall(r"```{command-reference}\n(.*?)```", page, re.DOTALL)
    assert notes_of(block.splitlines(), names)
    with pytest.raises(ValueError, match="not a note about a command of muster: rum: text"):
        notes_of(["rum: text"], names)


# spec: V9.generated these pages are what the command prints
@pytest.mark.parametrize("name", ["environment", "tunables"])
def test_printed_page(name):
    done = subprocess.run(
        [MUSTER, name, "--markdown"], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout == (ROOT / f"docs/user/{name}.md").read_text()

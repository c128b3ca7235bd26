# SPDX-License-Identifier: BSD-3-Clause
"""The wheel that `pip install .` makes, and the one of `make wheel`, installed beside nothing of
this tree. Builds the package once more, and once for each minor of torch, so only where tests may
take long.
"""

import email
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest
import tomllib
import torch
from readme_test import PRINTED, PROGRAM, printed_lines
from scratch import LIMIT_S

ROOT = pathlib.Path(__file__).parents[2]
MATRIX = ROOT / "tools/wheel/matrix.toml"
pytestmark = pytest.mark.skipif(
    not os.environ.get("MUSTER_TEST_LONG"),
    reason="builds the package, which takes minutes (MUSTER_TEST_LONG=1)",
)

STOCK = """
import torch, torch.distributed as dist  # muster is found by torch itself
dist.init_process_group("muster")
tensor = torch.full((2,), dist.get_rank() + 1)
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {tensor[0]}")
dist.destroy_process_group()
"""
ON_THREADS = "dist.spawn(main, nprocs=4, threads=True)"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what the wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--wheel-dir",
        folder,
        "--config-settings",
        f"build-dir={folder}/build",
        ROOT,
    ]
    made = subprocess.run(build, capture_output=True, text=True, timeout=10 * LIMIT_S)
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    (wheel,) = folder.glob("muster_dist-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--quiet", "--target", folder / "site", wheel],
        check=True,
        timeout=LIMIT_S,
    )
    return folder / "site"


def run(site, *command):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")
    }
    path = (
        os.path.dirname(sys.executable) + os.pathsep + environment["PATH"]
    )  # as where the environment is activated
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=site,
        env=environment | {"PATH": path, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# spec: J3 `pip install .` in isolation builds against the torch that is installed
def test_wheel_asks_for_the_torch_that_it_was_built_against(site):
    (metadata,) = site.glob("muster_dist-*.dist-info/METADATA")
    told = email.message_from_string(metadata.read_text())
    assert told["Name"] == "muster-dist"
    assert told.get_all("Requires-Dist") == ["torch==" + torch.__version__.split("+")[0]]
    assert (site / "muster/py.typed").exists() and (site / "muster/_C.pyi").exists()


# spec: V11.licences the wheel carries the licences of all that is compiled into it
def test_wheel_carries_the_licences(site):
    (licences,) = site.glob("muster_dist-*.dist-info/licenses")
    for name in ("LICENSE", "THIRD_PARTY.md"):
        assert (licences / name).read_bytes() == (ROOT / name).read_bytes()


# spec: J3 the README's program from the wheel, by every launcher
@pytest.mark.parametrize("launcher", ["muster run", "torchrun", "threads"])
def test_readme_program(site, launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM if launcher != "threads" else PROGRAM.replace("    main()", "    " + ON_THREADS)
    )
    four = ["--standalone", "--nproc-per-node", "4"]
    start = {
        "muster run": [site / "bin/muster", "run", *four, sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", *four],
        "threads": [sys.executable],
    }[launcher]
    assert printed_lines(run(site, *start, program)) == PRINTED


def test_bench_is_whole(site):
    rows = site / "rows.jsonl"
    small = ["--sizes", "8", "--seconds", "0.01", "--json", rows]
    said = run(site, site / "bin/muster", "bench", *small)
    assert "engine alone" not in said
    row = json.loads(rows.read_text())
    assert row["op"] == "all_reduce" and row["loop_us"] > 0 and row["p50_us"] > 0
    assert {path.name for path in (site / "bin").glob("muster*")} == {
        "muster",
        "muster_bench_worker",
    }


# spec: A1 stock torch finds the backend by itself
def test_stock_torch_finds_the_backend(site, tmp_path):
    (tmp_path / "program.py").write_text(STOCK)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert printed_lines(run(site, *start, tmp_path / "program.py")) == PRINTED


def wheel_tool(name, *options, limit=LIMIT_S):
    return subprocess.run(
        [sys.executable, ROOT / "tools/wheel" / name, *options],
        capture_output=True,
        text=True,
        timeout=limit,
    )


@pytest.fixture(scope="module")
def manylinux():
    """The file that `make wheel` leaves in dist/."""
    made = wheel_tool("build", limit=6 * LIMIT_S)
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    (wheel,) = (ROOT / "dist").glob("muster_dist-*.whl")
    return wheel


# spec: V1 `make wheel`: one manylinux wheel with an extension for each of three minors of torch
def test_one_wheel_for_three_minors(manylinux):
    assert re.search(r"-manylinux_2_\d+_x86_64\.whl$", manylinux.name), manylinux.name
    names = zipfile.ZipFile(manylinux).namelist()
    minors = {name.split("/")[2] for name in names if re.match(r"muster/_extensions/torch_", name)}
    built = [row["built"] for row in tomllib.loads(MATRIX.read_text())["torch"]]
    assert minors == {"torch_" + "_".join(each.split(".")[:2]) for each in built}
    assert len([name for name in names if "/_C.cpython-" in name]) == 3
    assert not [name for name in names if re.search(r"libtorch|libc10|libgomp", name)]


# spec: V11.licences the wheel has the copyright file of every library that was copied into it
def test_copied_libraries_have_their_licences(manylinux):
    checked = subprocess.run(
        [sys.executable, ROOT / "tools/third_party", "--wheel", manylinux],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr


# spec: V1 installed with no compiler on the PATH it trains the digits, and pip takes all of it away
def test_tried_without_a_compiler(manylinux):
    torch_site = pathlib.Path(torch.__file__).parents[1]
    tried = wheel_tool("try", "--wheel", manylinux, "--site", torch_site)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "held-out accuracy" in tried.stdout and "nothing is left" in tried.stdout

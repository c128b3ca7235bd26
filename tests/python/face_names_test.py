# SPDX-License-Identifier: BSD-3-Clause
"""`import muster as dist`: torch.distributed's names and signatures, and what stands around the
package.
"""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from scratch import LIMIT_S
from thread_ranks import on_threads, row, same

import muster as dist


def arguments(function):
    """As "name=default" in order, "name" without one, those of ReduceOp as muster shows them; those
    that torch gives no name as None.
    """
    try:
        found = [
            each.name if each.default is each.empty else f"{each.name}={each.default!r}"
            for each in inspect.signature(function).parameters.values()
        ]
    except ValueError:  # the extension's
        texts = re.findall(r"^(?:\d+\. )?\w+\((.*)\) ->", function.__doc__, re.M)
        found = re.split(
            r", (?=\*|\w+: )", max(texts, key=len)
        )  # of overloads that which takes most
        found = [re.sub(r": .*?(?= = |$)", "", each).replace(" = ", "=") for each in found]
    found = [
        re.sub(r"<(?:RedOpType|ReduceOp)\.(\w+)(?:: \d+)?>", r"\1", each)
        for each in found
        if each not in ("", "*", "self")
    ]
    return [None if re.fullmatch(r"arg\d+", each) else each for each in found]


def shared_functions():
    """Functions, methods and constructors that both have, as the page names them."""
    import torch.distributed as theirs

    for name in dist.__all__:
        here, there = getattr(dist, name), getattr(theirs, name, None)
        if name == "ProcessGroup":
            continue  # whose overloads tools/face compares
        if not inspect.isclass(here):
            if callable(here) and callable(there):
                yield name, here, there
            continue
        if name in (
            "TCPStore",
            "FileStore",
            "HashStore",
            "PrefixStore",
            "DeviceMesh",
            "P2POp",
            "ReduceOp",
        ):
            yield name, here.__init__, there.__init__
        for method in vars(here) if inspect.isclass(there) else ():
            each, other = getattr(here, method), getattr(there, method, None)
            if (
                (not method.startswith("_") or method == "_flatten")
                and callable(each)
                and callable(other)
                and not inspect.isclass(each)
            ):
                yield f"{name}.{method}", each, other


def names_in(texts):
    return {each.partition("=")[0] for each in texts}


# spec: F20 signatures and defaults as torch's, but for the table of docs/user/python.md, which is
# whole
def test_signatures():
    differ = {}
    compared = set()
    for name, here, there in shared_functions():
        compared.add(name)
        mine, wanted = arguments(here), arguments(there)
        if wanted and all(each is None for each in wanted):
            assert len(mine) == len(wanted), name
            continue
        shared = set(mine) & set(wanted)
        assert [each for each in mine if each in shared] == [
            each for each in wanted if each in shared
        ], name
        if set(mine) != set(wanted):
            differ[name] = names_in(set(mine) - shared), names_in(set(wanted) - shared)
    page = pathlib.Path(__file__).parents[2].joinpath("docs/user/python.md").read_text()
    rows = re.findall(r"^  \| (`[\w.`, ]+`) \|(.*)\|(.*)\|$", page, re.M)
    told = {
        name: (set(re.findall(r"`(\w+)`", here)), set(re.findall(r"`(\w+)`", there)))
        for names, here, there in rows
        for name in re.findall(r"`([\w.]+)`", names)
    }
    assert differ == told
    assert compared >= {
        "all_reduce",
        "new_group",
        "breakpoint",
        "set_timeout",
        "shrink_group",
        "TCPStore",
        "Work.wait",
    }
    assert len(compared) > 100


def test_every_public_function_says_what_it_does():
    silent = []
    for name in dir(dist):
        each = getattr(dist, name)
        if name.startswith("_") or inspect.ismodule(each) or not callable(each):
            continue
        text = each.__doc__ or ""
        if inspect.isbuiltin(each):
            text = text.partition("\n")[2]
        if len(text.split()) < 3:
            silent.append(name)
    assert not silent


# Those that talk to nobody: what they can raise is a TypeError, or that there is no such group.
SILENT = {
    "_make_nccl_premul_sum",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "in_shared_memory",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "record_comm",
    "set_debug_level",
    "shared_allocator_stats",
    "supports_complex",
    "trim_shared_allocator",
    "use_shared_allocator",
}


def test_what_communicates_says_what_it_raises():
    all_of_them = ((name, getattr(dist, name)) for name in dist.__all__)
    functions = {
        name: each.__doc__
        for name, each in all_of_them
        if callable(each) and not inspect.isclass(each)
    }
    assert {
        name for name, text in functions.items() if not re.search(r"\braises\b", text, re.I)
    } == SILENT


def test_every_name_is_used_in_a_test():
    files = [file.read_text() for file in pathlib.Path(__file__).parent.glob("*.py")]
    tests = "".join(text for text in files if "import muster as dist" in text)
    assert [
        name
        for name in dist.__all__
        if callable(getattr(dist, name)) and not re.search(rf"\bdist\.{name}\b", tests)
    ] == []


# spec: A9 in Python
def test_little_calls(monkeypatch):
    assert (
        dist.is_backend_available("GLOO")
        and dist.is_backend_available("nccl") == dist.is_nccl_available()
        and not dist.is_backend_available("nonsense")
    )
    assert (
        dist.get_default_backend_for_device("cpu") == "native"
        and dist.get_default_backend_for_device(torch.device("cuda", 1)) == "nccl"
    )
    with pytest.raises(ValueError, match="meta"):
        dist.get_default_backend_for_device("meta")
    assert dist.supports_complex(dist.ReduceOp.SUM) and not dist.supports_complex(dist.ReduceOp.MAX)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(3) == 3
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert dist.get_node_local_rank() == 5
    assert not dist.is_torchelastic_launched() or "TORCHELASTIC_RUN_ID" in os.environ

    def body(rank, size):
        assert dist.get_backend_config() == "cpu:native"
        together = torch.empty(size, 4, dtype=torch.int64) if rank == 0 else None
        dist.gather_into_tensor(row(rank), together)
        if rank == 0:
            same(together, torch.stack([row(r) for r in range(size)]))
        joined = torch.empty(size * 4, dtype=torch.int64) if rank == 1 else None
        dist.gather_single(row(rank), joined, dst=1)
        if rank == 1:
            same(joined, torch.cat([row(r) for r in range(size)]))
        if rank == 0:
            with pytest.raises(ValueError, match="gather_into_tensor"):
                dist.gather_into_tensor(row(rank), torch.empty(3))
        with dist.record_comm("together"):
            dist.barrier()

    on_threads(2, body)


def test_package_is_typed():
    package = pathlib.Path(dist.__file__).parent
    assert (package / "py.typed").is_file() and (package / "_C.pyi").is_file()
    tool = pathlib.Path(__file__).parents[2] / "tools/python_stubs"
    checked = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    public = {
        name
        for name in dir(dist)
        if not name.startswith("_") and not inspect.ismodule(getattr(dist, name))
    }
    assert set(dist.__all__) | {"__version__"} >= public and all(
        hasattr(dist, name) for name in dist.__all__
    )
    kinds = re.findall(r": ([^:=]+) = None", (package / "_C.pyi").read_text())
    assert (
        len(kinds) > 100
        and [kind for kind in kinds if "None" not in kind and kind != "object"] == []
    )
    for name in dist.__all__:
        each = getattr(dist, name)
        if inspect.isfunction(each):
            signature = inspect.signature(each)
            untyped = [
                one.name for one in signature.parameters.values() if one.annotation is one.empty
            ]
            assert not untyped and signature.return_annotation is not signature.empty, name


# spec: J3 muster run starts a script with the Python of the environment that it is installed in
def test_command_knows_its_environments_python(tmp_path):
    built = pathlib.Path(dist.__file__).parents[2] / "bin/muster"
    (tmp_path / "bin").mkdir()
    shutil.copy2(built, tmp_path / "bin/muster")
    (tmp_path / "bin/python3").write_text(
        '#!/bin/sh\necho "own python: $RANK of $WORLD_SIZE ${2##*/}"\n'
    )
    (tmp_path / "bin/python3").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_EXEC"}

    def lines():
        run = subprocess.run(
            [
                tmp_path / "bin/muster",
                "run",
                "--standalone",
                "--nproc-per-node",
                "2",
                tmp_path / "train.py",
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
        )
        return sorted(
            line.partition("own python: ")[2]
            for line in run.stdout.splitlines()
            if "own python" in line
        )

    (tmp_path / "train.py").write_text("")
    assert lines() == []
    (tmp_path / "pyvenv.cfg").write_text("")
    assert lines() == ["0 of 2 train.py", "1 of 2 train.py"]


def test_another_torch_is_refused_by_name(tmp_path):
    package = tmp_path / "muster"
    package.mkdir()
    for file in pathlib.Path(dist.__file__).parent.iterdir():
        if file.is_file() and file.name != "_build.py":
            (package / file.name).symlink_to(file.resolve())
    (package / "_build.py").write_text('VERSION = "0"\nTORCH_VERSION = "1.2.3"\n')
    run = subprocess.run(
        [sys.executable, "-c", "import muster"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (
        run.returncode == 1
        and "built for torch 1.2.3" in run.stderr
        and f"torch {torch.__version__} is installed" in run.stderr
    )


def test_import_is_lazy():
    program = (
        "import sys, muster; muster.optim, muster.nn; assert not {'muster.rpc', 'muster.autograd'} "
        "& set(sys.modules);"
        "muster.rpc; muster.autograd; muster.nn.RemoteModule; muster.optim.DistributedOptimizer; "
        "muster.nn.api.RemoteModule"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)

# SPDX-License-Identifier: BSD-3-Clause
"""Jobs as in the image of the Dockerfile: with the /dev/shm and the rights that an engine gives,
and as the pods of examples/kubernetes. Long runs build the image in roots of Debian and use it.
"""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest
from scratch import LIMIT_S

import muster

TREE = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(TREE / "tools"))
sys.path += map(str, TREE.glob(".cache/checks/lib/python3.*/site-packages"))

from image import pods, root  # noqa: E402

MUSTER = pathlib.Path(muster.__file__).parents[2] / "bin/muster"
NEEDS_MOUNTS = pytest.mark.skipif(bool(root.missing()), reason=root.missing())
LONG = pytest.mark.skipif(
    not os.environ.get("MUSTER_TEST_LONG"),
    reason="brings a Debian and torch, and compiles (MUSTER_TEST_LONG=1)",
)
# The mounts of one container, then the command as its process 1, without any capability.
CONTAINER = [
    *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c"),
    """set -eu
mount -t tmpfs -o mode=1777,size=64m shm /dev/shm
if [ -n "$2" ]; then mount --bind "$1" /etc/hosts; hostname "$2"; fi
shift 2
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
""",
    "sh",
]
LARGE = """
import os

import torch
import muster as dist

assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
dist.init_process_group()
large = torch.full((32 << 20,), float(dist.get_rank() + 1))  # 128 MiB
dist.all_reduce(large)
assert large.eq(10).all()
print("reduced by", dist.get_rank(), "below", os.getppid(), flush=True)
dist.destroy_process_group()
"""
PROGRAM = """
import os

print("pod {RANK} of {WORLD_SIZE}, {LOCAL_RANK} of node {GROUP_RANK}".format(**os.environ))
"""


# spec: V2.dockerfile four ranks reduce 128 MiB each with a /dev/shm of 64 MiB, below process 1
@NEEDS_MOUNTS
def test_small_shared_memory(tmp_path):
    program = tmp_path / "large.py"
    program.write_text(LARGE)
    job = [MUSTER, "run", "--standalone", "--nproc-per-node", "4", sys.executable, program]
    ended = subprocess.run(
        [*CONTAINER, "", "", *job], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(re.findall(r"reduced by (\d) below 1$", ended.stdout, re.M)) == list("0123")


# spec: V2.dockerfile the engine's SIGTERM reaches the launcher, process 1, and all ranks end
@NEEDS_MOUNTS
def test_stop(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho up\nexec sleep 4321\n")
    program.chmod(0o755)
    job = [MUSTER, "run", "--standalone", "--nproc-per-node", "2", program]
    with subprocess.Popen([*CONTAINER, "", "", *job], stdout=subprocess.PIPE, text=True) as outer:
        try:
            up = [outer.stdout.readline() for _ in range(2)]
            assert sorted(line.rstrip()[-2:] for line in up) == ["up", "up"], up
            children = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text()
            (launcher,) = map(int, children.split())
            os.kill(launcher, signal.SIGTERM)
            outer.stdout.read()  # ends once no process of the container has the pipe
            assert outer.wait(timeout=LIMIT_S) != 0
        finally:
            outer.kill()


# spec: V2.dockerfile the pods of the example for Kubernetes meet by their service's names
@NEEDS_MOUNTS
def test_pods_of_the_example(tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML (MUSTER_CHECKS=ON tools/setup)")
    text = (TREE / "examples/kubernetes/digits.yaml").read_text()
    (job,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "Job"]
    wanted = pods.pods(job, "0123456789 abcdefghij")
    (tmp_path / "hosts").write_text(pods.hosts(wanted))
    program = tmp_path / "digits.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    running = []
    for pod in wanted:
        *arguments, last = pod.arguments
        assert last.endswith(program.name)
        variables = {"PATH": os.environ["PATH"], "MUSTER_PYTHON": sys.executable}
        variables |= {"HOSTNAME": pod.hostname, "PET_MASTER_PORT": port}
        running.append(
            subprocess.Popen(
                [*CONTAINER, tmp_path / "hosts", pod.hostname, MUSTER, *arguments, program],
                env=variables | pod.variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [each.communicate(timeout=LIMIT_S)[0] for each in running]
    assert [each.returncode for each in running] == [0] * len(wanted), outputs
    workers = int(job["spec"]["template"]["spec"]["containers"][0]["args"][4])
    for node, output in enumerate(outputs):
        said = sorted(line.partition("pod ")[2] for line in output.splitlines() if "pod " in line)
        ranks = [(node * workers + each, each) for each in range(workers)]
        total = workers * len(wanted)
        assert said == [f"{rank} of {total}, {each} of node {node}" for rank, each in ranks]


# spec: V2.dockerfile the Dockerfile's steps, each in a root of Debian; then its jobs, as its user
@LONG
@pytest.mark.skipif(bool(root.missing("debootstrap")), reason=root.missing("debootstrap"))
def test_image(tmp_path):
    tried = subprocess.run(
        [sys.executable, TREE / "tools/image/try", "--work", tmp_path / "image"],
        capture_output=True,
        text=True,
    )
    assert tried.returncode == 0, tried.stdout[-4000:] + tried.stderr[-4000:]
    assert "4 ranks, held-out accuracy" in tried.stdout
    assert "8 ranks, held-out accuracy" in tried.stdout

# SPDX-License-Identifier: BSD-3-Clause
"""`muster run` in the pods of Kubernetes' operators: the command that docs/user/kubernetes.md
gives, with the variables that the operator sets.
"""

import os
import pathlib
import re
import socket
import subprocess

import pytest
from scratch import LIMIT_S

import muster

TREE = pathlib.Path(__file__).parents[2]
MUSTER = pathlib.Path(muster.__file__).parents[2] / "bin/muster"
PODS, WORKERS = 2, 2
PROGRAM = "#!/bin/sh\necho pod $RANK of $WORLD_SIZE, $LOCAL_RANK of node $GROUP_RANK\n"


def trainer(pod, port):
    """The variables that Kubeflow Trainer sets."""
    return {
        "PET_NNODES": PODS,
        "PET_NPROC_PER_NODE": WORKERS,
        "PET_NODE_RANK": pod,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }


def pytorch_job(pod, port):
    """The variables that the operator of PyTorchJobs sets; WORLD_SIZE and RANK count pods."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": PODS,
        "RANK": pod,
        "PYTHONUNBUFFERED": 1,
        "PET_NNODES": PODS,
        "PET_N_PROC_PER_NODE": WORKERS,
        "PET_NODE_RANK": pod,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }


def command_on_the_page(kind):
    """The words of `command:` in the page's object of this kind."""
    page = (TREE / "docs/user/kubernetes.md").read_text()
    (block,) = [text for text in page.split("```yaml")[1:] if f"kind: {kind}\n" in text]
    return re.search(r"command: \[(.*)\]", block.partition("```")[0])[1].split(", ")


# spec: R3.trainer[trainer] R3.pytorch_job[pytorch_job] the page's command starts every rank
@pytest.mark.parametrize(
    "kind, sets",
    [
        pytest.param("TrainJob", trainer, id="trainer"),
        pytest.param("PyTorchJob", pytorch_job, id="pytorch_job"),
    ],
)
def test_pods_of_an_operator(kind, sets, tmp_path):
    program = tmp_path / "digits"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    words = command_on_the_page(kind)
    assert words[0] == "muster" and words[-1] == "./digits"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pods = [
        subprocess.Popen(
            [MUSTER, *words[1:]],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "MUSTER_SECRET": "0123456789 abcdefghij"}
            | {name: str(value) for name, value in sets(pod, port).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for pod in range(PODS)
    ]
    outputs = [pod.communicate(timeout=LIMIT_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * PODS, outputs
    for pod, output in enumerate(outputs):
        said = sorted(line.partition("pod ")[2] for line in output.splitlines() if "pod " in line)
        first = pod * WORKERS
        assert said == [
            f"{first + worker} of {PODS * WORKERS}, {worker} of node {pod}"
            for worker in range(WORKERS)
        ]

# SPDX-License-Identifier: BSD-3-Clause
"""Jobs under a real Slurm of three nodes."""

import pathlib
import re
import shlex
import sys
import time

import pytest
from scratch import LIMIT_S, reserve_port
from slurm_cluster import slurm_cluster

import muster as dist

BIN = pathlib.Path(dist.__file__).parents[2] / "bin"
DIGITS = BIN / "digits"
MUSTER = BIN / "muster"
DATA = pathlib.Path(__file__).parents[2] / "examples/data"

# Says who it is and what all ranks' numbers are together.
PROGRAM = """
import os, sys
import torch
import muster as dist
dist.init_process_group()
ranks = torch.tensor([1 << dist.get_rank()])
dist.all_reduce(ranks)
rank, world, node = dist.get_rank(), dist.get_world_size(), os.environ["SLURMD_NODENAME"]
print("rank", rank, "of", world, "on", node, "sum", ranks.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def slurm():
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def program(slurm):
    path = slurm.folder / "program.py"
    path.write_text(PROGRAM)
    return path


# spec: R1.program srun ./program (rank, size and address from SLURM_*, no other setting), on three
# slurmd
def test_srun_program(slurm):
    out, status = slurm.run("srun", "-N2", "-n4", "--overcommit", DIGITS)
    assert status == 0, out + slurm.logs()
    assert "FAILED" not in out and "held-out accuracy" in out, out


# spec: R1 srun ./program: several tasks on a node, and two steps at once
def test_srun_several_tasks(slurm, program):
    steps = " & ".join(
        f"srun -N3 -n6 --overcommit --overlap {sys.executable} {program}" for _ in range(2)
    )
    out, status = slurm.run("salloc", "-N3", "-n6", "--overcommit", "sh", "-c", f"{steps} & wait")
    assert status == 0, out + slurm.logs()
    found = re.findall(r"rank (\d) of 6 on (n\d) sum (\d+)", out)
    assert sorted(rank for rank, _, _ in found) == sorted("012345" * 2), out
    assert {node for _, node, _ in found} == {"n1", "n2", "n3"}
    assert {total for _, _, total in found} == {"63"}


# spec: R1.run srun muster run ./program (one task a node)
def test_srun_muster_run(slurm):
    out, status = slurm.run("srun", "-N2", "-n2", MUSTER, "run", "--nproc-per-node", "2", DIGITS)
    assert status == 0, out + slurm.logs()
    assert "FAILED" not in out and "held-out accuracy" in out, out
    out, status = slurm.run("srun", "-N1", "-n2", "--overcommit", MUSTER, "run", "/bin/true")
    assert status == 0, "two tasks of one node are two jobs of their own"


# Stays in its first epoch until a node's launcher is killed, one that does not serve the store (the
# first node, which has rank 0, does), and ends in the next.
LEAVING = """
import os, signal
import torch
import muster as dist
dist.init_process_group()
ranks = torch.tensor([1 << dist.get_rank()])
dist.all_reduce(ranks)
world, node = dist.get_world_size(), os.environ["SLURMD_NODENAME"]
print("rank", dist.get_rank(), "of", world, "on", node, "sum", ranks.item(), flush=True)
dist.barrier()
if world == 3:
    if dist.get_rank() == 2:
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        dist.barrier()
dist.destroy_process_group()
"""


# spec: L1.slurm nodes of an allocation are members by the agent of its first node: the others go on
# without one that dies
def test_srun_members(slurm):
    program = slurm.folder / "leaving.py"
    program.write_text(LEAVING)
    endpoint = f"n1:{reserve_port()}"
    out, _ = slurm.run(
        *("srun", "-N3", "-n3", "--kill-on-bad-exit=0", MUSTER, "run", "--nnodes=2:3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=members"),
        *("--rdzv-conf=last_call_timeout=60", "--max-restarts=1", sys.executable, program),
    )
    found = re.findall(r"rank (\d) of (\d) on (n\d) sum (\d+)", out)
    # The last words of a launcher that is killed may be lost.
    first = {node: rank for rank, world, node, total in found if (world, total) == ("3", "7")}
    then = {node: rank for rank, world, node, total in found if (world, total) == ("2", "3")}
    assert sorted(then.values()) == ["0", "1"], out + slurm.logs()
    assert then == {node: rank for node, rank in first.items() if rank != "2"}, out + slurm.logs()


# spec: R1.signal --signal: a warning of Slurm's reaches the program through the launcher
def test_signal(slurm):
    script = slurm.folder / "warned.sh"
    script.write_text(
        "#!/bin/sh\ntrap 'echo warned; exit 0' USR1\necho waiting\nwhile :; do sleep 0.1; done\n"
    )
    script.chmod(0o755)
    step = slurm.start("srun", "-N2", "-n2", "--job-name=warned", MUSTER, "run", script)
    out = ""
    for line in step.stdout:
        out += line
        if out.count("waiting") == 2:
            break
    slurm.run("scancel", "--signal=USR1", "--name=warned")
    rest, _ = step.communicate(timeout=LIMIT_S)
    # Slurm signals all processes of a step, so the program may get both that and the launcher's.
    assert {"[0] warned", "[1] warned"} <= set((out + rest).splitlines()), out + rest
    assert step.returncode == 0, out + rest


# spec: R1.arrays array jobs: each task of the array is a job of its own
def test_array(slurm, program):
    script = slurm.folder / "array.sh"
    script.write_text(
        f"#!/bin/sh\nsrun -N1 -n2 --overcommit {shlex.quote(sys.executable)} {program}\n"
    )
    out, status = slurm.run(
        "sbatch",
        "--wait",
        "--array=1-3",
        "-N1",
        "-n2",
        "--overcommit",
        "-o",
        "array.%a.out",
        script,
    )
    assert status == 0, out + slurm.logs()
    for task in (1, 2, 3):
        text = (slurm.folder / f"array.{task}.out").read_text()
        assert sorted(re.findall(r"rank (\d) of 2", text)) == ["0", "1"], text


# Trains with a checkpoint after each step. With REQUEUE, its first life asks Slurm in the middle to
# requeue the job, and waits for its end.
TRAINING = """
import os, signal, subprocess, sys
import torch
import muster as dist
from muster import checkpoint
folder, again = sys.argv[1], sys.argv[2] == "requeue" and "SLURM_RESTART_COUNT" not in os.environ
dist.init_process_group()
torch.manual_seed(7)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters())
state = {"model": model, "optimizer": optimizer, "step": 0}
if newest := checkpoint.latest(folder):
    checkpoint.load(state, checkpoint_id=newest)
print("begins at step", state["step"], flush=True)
while state["step"] < 8:
    torch.manual_seed(100 * state["step"] + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    state["step"] += 1
    checkpoint.save(state, checkpoint_id=f"{folder}/step-{state['step']}")
    if again and state["step"] == 5:
        if dist.get_rank() == 0:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        signal.pause()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("ends with", weights.hex(), flush=True)
dist.destroy_process_group()
"""


# spec: R1.requeue requeue continues from the last commit, and ends with the weights of a job
# without
def test_requeue(slurm):
    program = slurm.folder / "training.py"
    program.write_text(TRAINING)
    said = {}
    for kind in ("undisturbed", "requeue"):
        script = slurm.folder / f"{kind}.sh"
        words = shlex.join([sys.executable, str(program), str(slurm.folder / f"run-{kind}"), kind])
        script.write_text(f"#!/bin/sh\nsrun -N2 -n2 {words}\n")
        out, status = slurm.run(
            *("sbatch", "--parsable", "--requeue", "-N2", "-n2", "--open-mode=append"),
            *("-o", f"{kind}.out", script),
        )
        assert status == 0, out + slurm.logs()
        limit, shown = time.monotonic() + LIMIT_S, ""
        while "JobState=COMPLETED" not in shown:
            shown, _ = slurm.run("scontrol", "show", "job", out.strip())
            ended = re.search("JobState=(FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", shown)
            text = (slurm.folder / f"{kind}.out").read_text() if ended else ""
            assert not ended and time.monotonic() < limit, shown + text + slurm.logs()
            time.sleep(0.2)
        said[kind] = (slurm.folder / f"{kind}.out").read_text()
    begun = {kind: re.findall(r"begins at step (\d)", text) for kind, text in said.items()}
    assert begun == {"undisturbed": ["0"] * 2, "requeue": ["0"] * 2 + ["5"] * 2}, said
    ends = {each for text in said.values() for each in re.findall("ends with (\\w+)", text)}
    assert len(ends) == 1, said

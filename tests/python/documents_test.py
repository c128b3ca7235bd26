"""Programs of torch's documents with only their import changed (examples/documents): what they print is what the documents print."""

import ast
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
from datetime import timedelta

import pytest
import torch
from ranks import meeting_file, reserve_port, run_ranks

import muster as dist
import muster.torch

PROGRAMS = pathlib.Path(__file__).parents[2] / "examples/documents"
MUSTER = pathlib.Path(dist.__file__).parents[2] / "bin/muster"


def each(what, *values):
    return [f"Rank  {rank}  has {what}  {value}" for rank, value in enumerate(values)]


ALL = "[tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]"
NUMBERS = [f"tensor([{rank}.])" for rank in range(4)]
OPERATIONS = {
    "group": each("data", "tensor([2.])", "tensor([2.])", "tensor([1.])", "tensor([1.])"),
    "send": each("data", "tensor([1.])", "tensor([1.])", "tensor([0.])", "tensor([0.])"),
    "isend": ["Rank 0 started sending", "Rank 1 started receiving"]
    + each("data", "tensor([1.])", "tensor([1.])", "tensor([0.])", "tensor([0.])"),
    "broadcast": each("data", *["tensor([1.])"] * 4),
    # The documents show a ring's intermediate sums off dst; here the tensors stay as they were.
    "reduce": each("data", "tensor([6.])", *NUMBERS[1:]),
    "all_reduce": each("data", *["tensor([6.])"] * 4),
    "gather": each("data", *NUMBERS) + each("list", ALL, "[]", "[]", "[]"),
    "all_gather": each("data", *NUMBERS) + each("list", *[ALL] * 4),
    # The documents have an error here: Gloo had no all_to_all.
    "all_to_all": each(
        "input list",
        *("[" + ", ".join(f"tensor([{4 * r + i}.])" for i in range(4)) + "]" for r in range(4)),
    )
    + each(
        "output list",
        *("[" + ", ".join(f"tensor([{4 * i + r}.])" for i in range(4)) + "]" for r in range(4)),
    ),
    "scatter": each("data", *NUMBERS) + each("list", ALL, "[]", "[]", "[]"),
}


# spec: P1 the guide's programs for four ranks
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name):
    store, printed = dist.HashStore(), []
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"operations/{name}.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.print = lambda *words: printed.append(" ".join(map(str, words)))

    def run(rank, size):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        program.run(rank, size)
        dist.destroy_process_group()

    dist.spawn(run, args=(4,), nprocs=4, threads=True)
    assert sorted(printed) == sorted(OPERATIONS[name])


def blocks_of(session):
    """(code, answer) of each: the lines that are typed, and those that come."""
    block = ([], [])
    for line in session:
        typed = re.match(r"(?:>>>|\.\.\.) ?(.*)", line)
        if typed and block[1] or not line.strip():
            yield block
            block = ([], [])
        if typed:
            block[0].append(typed[1])
        elif line.strip():
            block[1].append(line)
    yield block


def answer_for(rank, lines):
    """What of these lines is this rank's: all of them, or those that end with its number."""
    if not any("# Rank" in line for line in lines):
        return "".join(lines)
    return "".join(line.split("# Rank")[0] for line in lines if line.endswith(f"# Rank {rank}"))


def replay(session, rank, names):
    for code, lines in blocks_of(session):
        tree, expected = ast.parse("\n".join(code)), answer_for(rank, lines)
        last = ast.Expression(tree.body.pop().value) if expected else None
        exec(compile(tree, "session", "exec"), names)
        if not expected:
            continue
        try:
            given = repr(eval(compile(last, "session", "eval"), names))
        except dist.DistError as error:
            given = "Traceback (most recent call last): " + type(error).__name__
        assert re.sub(r"\s", "", given) == re.sub(r"\s", "", expected), code


# spec: P1 the reference's examples: collectives of int64 and complex tensors, objects, a ring of messages, stores, meshes
@pytest.mark.parametrize("name", ["two_ranks", "three_ranks", "four_ranks", "stores", "mesh"])
def test_session(name):
    head, *session = (PROGRAMS / f"sessions/{name}.txt").read_text().splitlines()
    size = int(head.removeprefix("ranks: "))
    assert any("# Rank" in line or not line.startswith((">>>", "...")) for line in session if line)
    store = dist.HashStore()

    def run(rank):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        known = {
            "torch": torch,
            "dist": dist,
            "ReduceOp": dist.ReduceOp,
            "timedelta": timedelta,
            "tempfile": tempfile,
        }
        replay(session, rank, known | {"rank": rank, "world_size": size})
        dist.destroy_process_group()

    dist.spawn(run, nprocs=size, threads=True)


ONES = [[1.0] * 3] * 3
CALLED = (
    ["tensor([4., 4.])"] * 2
    + ["tensor([6., 6.])", "torch.Size([2, 2])"]
    + ["tensor([[1., 1., 1., 1.]])"] * 2
    + ["torch.Size([2, 2])", "torch.Size([128, 30])", f"{ONES} {ONES}"]
)
LAUNCHED = [
    line
    for rank in range(2)
    for line in (
        f"Initializing process group with: {{'MASTER_ADDR': 'here', 'MASTER_PORT': '#', 'RANK': '{rank}', 'WORLD_SIZE': '2'}}",
        f"world_size = 2, rank = {rank}, backend=gloo",
        f"rank = {rank}, world_size = 2",
    )
]
# How each starts, and what its two processes say together.
STARTED = {
    "ddp": (
        None,
        [
            f"Running {what} example on rank {rank}."
            for what in ("basic DDP", "DDP checkpoint")
            for rank in range(2)
        ],
    ),
    "model_parallel": (
        None,
        [f"Running DDP with model parallel example on rank {rank}." for rank in range(2)],
    ),
    "spmd_main": ("launch", LAUNCHED),
    "elastic_ddp": (
        "run",
        [f"Start running basic DDP example on rank {rank}." for rank in range(2)],
    ),
    "two_layer_net": (None, ["init model", "init ddp", "train", "True"] * 2),
    "join": (
        None,
        [f"Rank {rank} has exhausted all {5 + rank} of its inputs!" for rank in range(2)],
    ),
    "calls": ("run", CALLED),
}


def printed_by(name, launcher, *arguments):
    """What the program says, line by line, without the launcher's marks, numbers of processes, addresses and ports."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
    }  # whole lines, then
    if launcher is None:
        environment["MASTER_PORT"] = str(reserve_port())
    start = [MUSTER, launcher, "--standalone", "--nproc-per-node", "2"] if launcher else []
    environment["PATH"] = (
        f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # `launch` looks for python there
    )
    python = [] if launcher == "launch" else [sys.executable]
    ended = subprocess.run(
        [*start, *python, PROGRAMS / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    plain = re.sub(r"(?m)^(\[\d+\] )+", "", ended.stdout)
    plain = re.sub(
        r"'MASTER_ADDR': '[^']*', 'MASTER_PORT': '\d+'",
        "'MASTER_ADDR': 'here', 'MASTER_PORT': '#'",
        plain,
    )
    return [line for line in plain.splitlines() if line]


# spec: P1 the tutorial's demo_basic, demo_checkpoint, demo_model_parallel, spmd_main, elastic_ddp and Join, the reference's net of two layers,
# spec: P1 the guide's calls to another worker
@pytest.mark.parametrize("name", STARTED)
def test_program(name):
    launcher, said = STARTED[name]
    assert sorted(printed_by(name, launcher)) == sorted(said)


# spec: P1 gradients averaged by hand: the loss falls, on both ranks
def test_averaged_sgd():
    said = [
        re.fullmatch(r"Rank  (\d) , epoch  (\d) :  (\S+)", line).groups()
        for line in printed_by("averaged_sgd", "run")
    ]
    for rank in "01":
        losses = [float(loss) for its_rank, _, loss in said if its_rank == rank]
        assert len(losses) == 10 and losses[-1] < losses[0] / 4, losses


# spec: P1 FSDP save: every rank asks for the state, rank 0 saves the whole model
# spec: M2 what it saves is a plain model's
def test_fsdp_save(tmp_path):
    saved = tmp_path / "mnist_cnn.pt"
    losses = [float(line.split()[-1]) for line in printed_by("fsdp", "run", "--save-model", saved)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 3
    fsdp = runpy.run_path(str(PROGRAMS / "fsdp.py"))
    model = fsdp["Net"]()
    model.load_state_dict(torch.load(saved))
    images, labels = fsdp["digits"]().tensors
    assert (model(images).argmax(1) == labels).float().mean() > 0.9


# spec: P1 the reference's monitored barrier names the rank that did not come
def test_monitored_barrier():
    first, *_ = printed_by("monitored_barrier", None)
    assert first == "Rank 1 failed to pass monitoredBarrier in 2000 ms"


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = torch.nn.Linear(10, 10)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


# spec: P1 demo_basic and demo_checkpoint on stock torch with its gloo replaced
def test_demo_basic_and_checkpoint():
    path = meeting_file()
    name = meeting_file()

    def demo(rank):
        import torch.distributed as stock
        from torch.nn.parallel import DistributedDataParallel as DDP

        muster.torch.replace_gloo()
        stock.init_process_group("gloo", init_method="file://" + name, rank=rank, world_size=2)
        ddp_model = DDP(ToyModel())
        if rank == 0:
            torch.save(ddp_model.state_dict(), path)
        stock.barrier()
        ddp_model.load_state_dict(torch.load(path))
        loss_fn = torch.nn.MSELoss()
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        loss_fn(outputs, labels).backward()
        optimizer.step()
        if rank == 0:
            os.remove(path)
        stock.destroy_process_group()
        return [parameter.tolist() for parameter in ddp_model.parameters()]

    first, second = run_ranks(2, demo)
    assert first == second

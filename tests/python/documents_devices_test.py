# SPDX-License-Identifier: BSD-3-Clause
"""Programs of torch's documents that run on accelerators: on one that tests make up
(tests/accelerator).
"""

import re
import subprocess
import sys

import pytest
from document_programs import (
    LANGUAGES,
    LAUNCH,
    MUSTER,
    PROGRAMS,
    RUN,
    environment_of,
    lines_of,
    run_program,
    said_by,
)
from ranks import LIMIT_S, reserve_port

ONES = [[1.0] * 3] * 3
CALLED = (
    ["tensor([4., 4.])"] * 2
    + ["tensor([6., 6.])", "torch.Size([2, 2])"]
    + ["tensor([[1., 1., 1., 1.]])"] * 2
    + ["torch.Size([2, 2])", "torch.Size([128, 30])", f"{ONES} {ONES}"]
)


def spmd(world_size):
    return [
        line
        for rank in range(world_size)
        for line in (
            f"Initializing process group with: {{'MASTER_ADDR': 'here', 'MASTER_PORT': '#', "
            f"'RANK': '{rank}', 'WORLD_SIZE': '{world_size}'}}",
            f"world_size = {world_size}, rank = {rank}, backend=gloo",
            f"rank = {rank}, world_size = {world_size}, n = 1, device_ids = [{rank}]",
        )
    ]


# How each starts (program, its line, its arguments, how many accelerators there are), and what its
# processes say together.
STARTED = {
    "ddp": (
        ("ddp", {"devices": 2}),
        [
            f"Running {what} example on rank {rank}."
            for what in ("basic DDP", "DDP checkpoint")
            for rank in range(2)
        ],
    ),
    "model_parallel": (
        ("model_parallel", {"devices": 4}),
        [f"Running DDP with model parallel example on rank {rank}." for rank in range(2)],
    ),
    "one process": (
        (
            "spmd_main",
            {"line": (*LAUNCH, "--nproc_per_node=1"), "devices": 1},
            "--local_world_size=1",
        ),
        spmd(1),
    ),
    "two processes": (
        (
            "spmd_main",
            {"line": (*LAUNCH, "--nproc_per_node=2"), "devices": 2},
            "--local_world_size=2",
        ),
        spmd(2),
    ),
    "elastic_ddp": (
        ("elastic_ddp", {"line": RUN, "devices": 2}),
        [f"Start running basic DDP example on rank {rank}." for rank in range(2)],
    ),
    "join": (
        ("join", {"devices": 2}),
        [f"Rank {rank} has exhausted all {5 + rank} of its inputs!" for rank in range(2)],
    ),
    "calls": (("calls", {"line": RUN}), CALLED),
    "device_maps": (
        ("device_maps", {"line": RUN, "devices": 3}),
        [
            "tensor([1., 1.], device='deferred:1')",
            "tensor([2., 2.], device='deferred:0')",
            "tensor([2., 2.], device='deferred:1')",
        ],
    ),
    "streams": (("streams", {"devices": 2}), ["tensor([101], device='deferred:0')"]),
    "data_parallel": (("data_parallel", {}), ["True (20, 5)"]),
}


# spec: P1 in Python and in C++: the tutorial's demo_basic, demo_checkpoint, demo_model_parallel,
# spmd_main, elastic_ddp and Join on accelerators, its launch lines
# spec: P1 in Python and in C++, on one node: DataParallel, the reference's streams; the guide's
# calls to another worker, options and device map
@pytest.mark.sampled(5)
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", STARTED)
def test_program(name, language):
    (program, options, *arguments), said = STARTED[name]
    assert sorted(said_by(program, *arguments, language=language, **options)) == sorted(said)


# spec: P1 in C++ DataParallel has the tutorial's three devices
def test_data_parallel_on_three_devices():
    assert said_by("data_parallel", devices=3, language="C++") == ["True (20, 5)"]


def run_two_nodes(program, *lines, devices):
    """Both launchers' output, line by line."""
    nodes = [
        subprocess.Popen(
            [*map(str, line), PROGRAMS / f"{program}.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_of(devices) | {"MUSTER_INSECURE": "1"},
        )
        for line in lines
    ]
    said = []
    try:
        for node in nodes:
            output, errors = node.communicate(timeout=LIMIT_S)
            assert node.returncode == 0, errors
            said += lines_of(output)
    finally:
        for node in nodes:
            node.kill()
    return said


# spec: P1 the documents' launch lines of two nodes: torchrun's and torch.distributed.launch's
@pytest.mark.sampled(1)
@pytest.mark.parametrize("launcher", ["run", "launch"])
def test_two_nodes(launcher):
    port = reserve_port()
    if launcher == "run":
        line = (MUSTER, "run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=100")
        line += ("--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}")
        lines = [line, line]
    else:
        lines = [
            (sys.executable, "-m", "muster.launch", "--nproc-per-node=1", "--nnodes=2")
            + (f"--node-rank={node}", "--master-addr=localhost", f"--master-port={port}")
            + ("--use-env=True",)
            for node in range(2)
        ]
    said = run_two_nodes("elastic_ddp", *lines, devices=2)
    assert sorted(said) == [f"Start running basic DDP example on rank {rank}." for rank in range(2)]


# The documents' block, in their order. Theirs is of nccl, whose variables are set there.
BLOCK = """broadcast_buffers: 1
bucket_cap_bytes: 26214400
find_unused_parameters: 0
gradient_as_bucket_view: 0
is_multi_device_module: 0
iteration: 0
num_parameter_tensors: 2
output_device: 0
rank: 0
total_parameter_size_bytes: 440
world_size: 2
backend_name: gloo
bucket_sizes: 440
cuda_visible_devices: N/A
device_ids: 0
dtypes: float
master_addr: localhost
master_port: PORT
module_name: TwoLinLayerNet
nccl_async_error_handling: N/A
nccl_blocking_wait: N/A
nccl_debug: N/A
nccl_ib_timeout: N/A
nccl_nthreads: N/A
nccl_socket_ifname: N/A
torch_distributed_debug: DETAIL"""
TIMES = (
    r"\[Rank {rank} / 2\] Training TwoLinLayerNet unused_parameter_size=0\s+Avg forward compute "
    r"time: \d+"
    r"\s+Avg backward compute time: \d+\s+Avg backward comm\. time: \d+\s+Avg backward comm/comp "
    r"overlap time: \d+"
)


# spec: P1 the reference's net of two layers logs the documents' block and times
# spec: H3 H12 the block, field by field; H4 the times of both ranks
def test_what_two_layers_log():
    ended = run_program("two_layer_net", devices=2)
    assert sorted(lines_of(ended.stdout)) == sorted(["init model", "init ddp", "train"] * 2)
    said = ended.stderr
    block = re.search(
        r"\[Rank 0\]: DDP Initialized with:\s*\n((?:.*\n)*?.*torch_distributed_debug.*)", said
    )
    assert block, said
    fields = [line.strip() for line in block[1].splitlines()]
    assert [re.sub(r"(master_port: )\d+", r"\1PORT", each) for each in fields] == BLOCK.splitlines()
    for rank in range(2):
        assert re.search(TIMES.replace("{rank}", str(rank)), said), said


# spec: P1 the reference's error text of parameters that no loss has used
def test_what_unused_parameters_say():
    ended = run_program("two_layer_net", "unused", devices=2)
    assert ended.returncode != 0
    said = " ".join(ended.stderr.split())
    rank = re.search(r"did not receive grad for rank (\d)", said)[1]  # either may be first
    for sentence in (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your module has "
        "parameters that were not used in producing loss. You can enable unused parameter "
        "detection by passing the keyword argument "
        "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by "
        "making sure all `forward` function outputs "
        "participate in calculating loss. If you already have done the above, then the distributed "
        "data parallel module wasn't able to "
        "locate the output tensors in the return value of your module's `forward` function. Please "
        "include the loss function and the "
        "structure of the return value of `forward` of your module when reporting this issue (e.g. "
        "list, dict, iterable).",
        f"Parameters which did not receive grad for rank {rank}: a.weight",
        f"Parameter indices which did not receive grad for rank {rank}: 0",
    ):
        assert sentence in said, ended.stderr


# spec: P1 the reference's all_reduce of 10 and 20 elements at DETAIL says the documents' words
def test_mismatched_shapes():
    ended = run_program("mismatched_shapes", devices=2)
    assert ended.returncode != 0
    said = " ".join(ended.stderr.split())
    for rank, size in ((0, 10), (1, 20)):
        words = (
            f"Error when verifying shape tensors for collective ALLREDUCE on rank {rank}. This "
            "likely indicates that input shapes into the "
            f"collective are mismatched across ranks. Got shapes: {size}"
        )
        if words in said:
            break
    else:
        pytest.fail(ended.stderr)

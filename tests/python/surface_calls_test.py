# SPDX-License-Identifier: BSD-3-Clause
"""Clauses of the acceptance list's letters A to H that the other files leave out, from Python."""

import contextlib
import datetime
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest
import torch
from ranks import LIMIT_S, meeting_file, run_ranks
from thread_ranks import SECONDS, on_processes, on_threads

import muster as dist

# ---- groups


# spec: D2 only members call in Python, D8 peers are ranks of the default group, group_src and
# group_dst of the group
def test_groups_of_members():
    def body(rank, size):
        if rank != 1:
            pair = dist.new_group([2, 0], use_local_synchronization=True)
            assert dist.get_process_group_ranks(pair) == [0, 2]
            x = torch.tensor([rank])
            dist.broadcast(x, src=2, group=pair)
            assert x.item() == 2
            dist.broadcast(y := torch.tensor([rank]), group_src=0, group=pair)
            assert y.item() == 0
            if rank == 0:
                dist.send(x, group=pair, group_dst=1)
            else:
                assert dist.recv(x, group=pair, group_src=0) == 0
            with pytest.raises(dist.DistError, match="exclude"):
                dist.broadcast(x, src=0, group_src=0, group=pair)
        dist.barrier()

    on_threads(3, body)


# spec: D3 overlapping groups from several threads at once in Python
def test_groups_in_threads():
    def body(rank):
        groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1])]
        failures = []

        def work(group):
            try:
                for _ in range(100):
                    x = torch.ones(3)
                    dist.all_reduce(x, group=group)
                    assert x.tolist() == [float(group.size())] * 3
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups if group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        return len(threads)

    name = meeting_file()
    assert sorted(on_processes(3, body, lambda _: "file://" + name, world_size=3)) == [1, 2, 2]


# ---- messages and collectives


# spec: E4 a message that does not fit is an error on the receiver, naming both, E6 non-contiguous
# tensors in Python
def test_messages_that_do_not_fit():
    def body(rank, size):
        strided = torch.arange(6.0).view(2, 3).t()
        if rank == 0:
            dist.send(strided, 1)
            dist.send(torch.ones(3), 1)
        else:
            got = torch.zeros(3, 2).t().contiguous().t()
            dist.recv(got, 0)
            assert torch.equal(got, strided)
            with pytest.raises(dist.DistError, match="(?s)float64.*float32"):
                dist.recv(torch.empty(5, dtype=torch.float64), 0)

    on_threads(2, body)


# spec: F1 synchronous by default, no Work for a non-member, E6 F16 scalars, nothing, one rank,
# strides in Python
def test_edges_of_collectives():
    def body(rank, size):
        alone = dist.new_group([0])
        work = dist.all_reduce(torch.ones(2), group=alone, async_op=True)
        assert (work is None) == (rank != 0)
        for x in (torch.tensor(2.0), torch.empty(0), torch.ones(3, 4)[:, 1]):
            expected = x * size
            assert dist.all_reduce(x) is None
            assert torch.equal(x, expected)
        out = torch.zeros(2, 2 * size).t()
        dist.all_gather_into_tensor(out, torch.full((2, 2), float(rank)))
        assert torch.equal(out[2 * rank : 2 * rank + 2], torch.full((2, 2), float(rank)))

    for size in (1, 2):
        on_threads(size, body)


# ---- debugging


@contextlib.contextmanager
def debug_level(level):
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(before)


# spec: H2 debug levels in Python
def test_debug_levels(monkeypatch):
    before = dist.get_debug_level()
    for text, level in [
        ("INFO", dist.DebugLevel.INFO),
        ("DETAIL", dist.DebugLevel.DETAIL),
        ("OFF", dist.DebugLevel.OFF),
    ]:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() == level
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD")
    with pytest.raises(dist.DistError, match="TORCH_DISTRIBUTED_DEBUG"):
        dist.set_debug_level_from_env()
    dist.set_debug_level(before)


def two_layers():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(10, 10, bias=False)
            self.b = torch.nn.Linear(10, 1, bias=False)

        def forward(self, x):
            return self.b(self.a(x))

    return Net()


# spec: H3 H12 the block at INFO, H4 the line of times at DETAIL, in Python
def test_what_ddp_logs(capfd):
    name = meeting_file()

    def body(rank):
        dist.init_process_group(
            init_method="file://" + name, world_size=2, rank=rank, timeout=SECONDS
        )
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        model = dist.nn.parallel.DistributedDataParallel(two_layers())
        model._set_ddp_runtime_logging_sample_rate(1)
        for _ in range(12):
            model(torch.randn(4, 10)).sum().backward()
        dist.destroy_process_group()

    import muster.nn.parallel  # noqa: F401

    os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
    try:
        run_ranks(2, body)
    finally:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    said = capfd.readouterr().err
    assert "[Rank 0]: DDP Initialized with:" in said
    for field in (
        "bucket_cap_bytes: 26214400",
        "num_parameter_tensors: 2",
        "total_parameter_size_bytes: 440",
        "bucket_sizes: 440",
        "dtypes: float",
        "nccl_debug: N/A",
    ):
        assert field in said, (field, said)
    for label in (
        "[Rank 0 / 2] Training",
        "unused_parameter_size=",
        "Avg forward compute time",
        "Avg backward compute time",
        "Avg backward comm. time",
        "Avg backward comm/comp overlap time",
    ):
        assert label in said, (label, said)


# spec: H6 H10 shapes and the call stack at DETAIL in Python
def test_mismatched_shapes_at_detail():
    def body(rank, size):
        with pytest.raises(dist.DistError) as caught:
            dist.all_reduce(torch.ones(10 if rank == 0 else 11))
        text = str(caught.value)
        assert f"Error when verifying shape tensors for collective ALLREDUCE on rank {rank}" in text
        assert (
            "input shapes into the collective are mismatched across ranks" in text
            and f"Got shapes: {10 if rank == 0 else 11}" in text
        )
        # Both sides say where the program has called, with its source.
        place = (
            re.escape(f'File "{__file__}", line ')
            + r"\d+, in body\n    dist\.all_reduce\(torch\.ones\(10 if rank == 0 else 11\)\)"
        )
        for side in (0, 1):
            assert re.search(
                rf"Rank {side}: all_reduce with shapes {10 + side}, called from\n  {place}", text
            ), text
        assert "unknown function" not in text

    with debug_level(dist.DebugLevel.DETAIL):
        on_threads(2, body)


stopped = []


def remember():
    """In the debugger's place."""
    stopped.append(dist.get_rank())


# spec: H8 breakpoint in Python, H13 breakpoint honours PYTHONBREAKPOINT; monitored_barrier's
# default timeout is the group's
def test_breakpoint(monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", f"{__name__}.remember")

    def body(rank, size):
        dist.breakpoint(1)
        dist.barrier()
        dist.set_timeout(datetime.timedelta(milliseconds=700))
        if rank == 0:
            with pytest.raises(
                dist.DistBackendError,
                match="failed to pass monitoredBarrier in 700 ms(?s:.*)Original exception:",
            ):
                dist.monitored_barrier()
        dist.set_timeout(SECONDS)
        dist.barrier()

    stopped.clear()
    on_threads(2, body)
    assert stopped == [1]


# spec: H9 collectives and messages are ranges of torch's profiler in Python
def test_profiler():
    def body(rank):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(2))
            if rank == 0:
                dist.send(torch.ones(2), 1)
            else:
                dist.recv(torch.ones(2), 0)
        return rank, sorted({event.name for event in profile.events() if "native" in event.name})

    name = meeting_file()
    ranges = dict(on_processes(2, body, lambda _: "file://" + name, world_size=2))
    assert ranges == {
        0: ["native:all_reduce", "native:send"],
        1: ["native:all_reduce", "native:recv"],
    }


# spec: P1 without torch the import says what to install
def test_without_torch_the_import_says_what_to_do():
    package = pathlib.Path(dist.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(package)!r}); import muster"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd="/", timeout=LIMIT_S
    )
    assert ended.returncode == 1
    assert "muster needs torch" in ended.stderr and "make build" in ended.stderr, ended.stderr

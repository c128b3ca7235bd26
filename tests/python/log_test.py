# SPDX-License-Identifier: BSD-3-Clause
"""The lines of a job on stderr with MUSTER_LOG_LEVEL, by running one."""

import fcntl
import os
import re
import socket
import struct
import subprocess
import textwrap

import forked
import pytest
import torch
from ranks import LIMIT_S, meeting_file, reserve_port, sampled

PROGRAM = textwrap.dedent("""
    import ctypes, os, sys, time
    import torch
    import muster as dist

    rank = int(sys.argv[1])
    how = {"rank": rank, "world_size": 2}
    if sys.argv[2].startswith("tcp"):
        how["init_method"] = sys.argv[2]
    else:
        how["init_method"] = "file://" + sys.argv[2]
    if sys.argv[3] == "late" and rank == 1:
        sys.stdin.readline()
    dist.init_process_group(None if sys.argv[3] != "sockets" else "tcp", **how)
    pair = dist.new_group([0, 1])
    if sys.argv[3] == "waits" and rank == 1:
        sys.stdin.readline()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), group=pair)
    dist.destroy_process_group()
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    if "NCCL_DEBUG" in os.environ:
        print("of NCCL:", getenv(b"NCCL_SOCKET_IFNAME"), getenv(b"NCCL_DEBUG"), file=sys.stderr)
""")


def started(rank, where, how, level, **variables):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MUSTER_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG")
    }
    environment.update(variables)
    if level:
        environment["MUSTER_LOG_LEVEL"] = level
    return forked.start(
        PROGRAM,
        str(rank),
        where,
        how,
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(how, level, **variables):
    """The standard error of two ranks."""
    where = meeting_file()
    ranks = [started(rank, where, how, level, **variables) for rank in (0, 1)]
    texts = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    return texts


# spec: H2 the default level is quiet
def test_nothing_is_said_by_default():
    assert said("plain", None) == ["", ""]


# spec: H2 info: version, who is reached how, groups with ranks, backend and what they cost
def test_info_says_what_a_job_runs_on():
    asked = forked.start("import muster; print(muster.__version__)", stdout=subprocess.PIPE)
    version = asked.communicate(timeout=LIMIT_S)[0].decode().strip()
    for rank, text in enumerate(said("plain", "info")):
        start = (
            rf"muster {re.escape(version)} with torch "
            rf"{re.escape(torch.__version__.split(chr(43))[0])}: "
            rf"rank {rank} of 2 of job job-\w+ on 1 host"
        )
        assert re.search(start, text), text
        assert re.search(
            rf" rank {rank}\] links to rank {1 - rank} through shared memory of host \S+ \(2 ranks "
            r"on \d+ cores?\)",
            text,
        ), text
        for name in ("default", r"\[0, 1\]"):
            assert re.search(
                rf"group {name} of ranks \[0, 1\]: this is its rank {rank}, backend cpu:native "
                r"over shared memory, "
                r"timeout 30 min; made in [\d.]+ (us|ms|s)",
                text,
            ), text
        assert "debug" not in text


# spec: H2 debug: algorithms by size, and links as they come up; over sockets with address and
# interface
def test_debug_says_what_runs_over_what():
    for rank, text in enumerate(said("plain", "debug")):
        assert re.search(
            r"group default, algorithms over shared memory:\n(  \w+: .*\n)*  all_reduce: \w+ below "
            r"\d+ bytes, then",
            text,
        ), text
    for rank, text in enumerate(said("sockets", "debug")):
        assert re.search(
            rf"links to rank {1 - rank} over TCP \(shared memory is off\), "
            r"encrypted \(TLS 1.3\), from [\d.]+:\d+ \(\w+\)",
            text,
        ), text
        assert re.search(
            r"connected to rank \d \(pid \d+ on \S+\) over TCP, from [\d.]+:\d+ to [\d.]+:\d+", text
        ), text
        assert "group default, algorithms over links:" in text


# spec: W1 what MUSTER_TLS leaves unencrypted stands in the log
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "setting, words",
    [
        ("full", ", encrypted (TLS 1.3), from"),
        (
            "control-plain",
            "which anybody on the way can read and change (MUSTER_TLS=control-plain)",
        ),
    ],
)
def test_info_says_what_is_not_encrypted(setting, words):
    for text in said("sockets", "info", MUSTER_TLS=setting):
        assert words in text, text


CALLER = textwrap.dedent("""
    import sys
    import torch
    from muster import rpc

    rank = int(sys.argv[1])
    options = rpc.RpcBackendOptions(init_method="file://" + sys.argv[2], shared_memory=rank != 2)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        large = torch.ones(3 << 20)
        futures = [rpc.rpc_async(f"worker{each}", torch.add, (large, each)) for each in (1, 2)]
        for each in (1, 2):
            assert rpc.rpc_sync(f"worker{each}", torch.add, (1, 2)) == 3
        assert [future.wait()[-1].item() for future in futures] == [2, 3]
    rpc.shutdown()
""")


# spec: N12 each pipe picks its transport: one worker's goes through shared memory, another's over
# TCP
def test_pipes_of_rpc_pick_their_transports():
    where = meeting_file()
    workers = [
        forked.start(
            CALLER,
            str(rank),
            where,
            env=os.environ | {"MUSTER_LOG_LEVEL": "debug"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    texts = [worker.communicate(timeout=LIMIT_S)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], texts
    assert re.search(r"linked to rank 1 \(pid \d+ on \S+\) through shared memory", texts[0]), texts
    assert re.search(r"connected to rank 2 \(pid \d+ on \S+\) over TCP", texts[0]), texts


def interfaces():
    """Names of those that have an address of IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                yield name
            except OSError:
                pass


# spec: A10.names A10.nccl GLOO_SOCKET_IFNAME and MUSTER_SOCKET_IFNAME choose the interface, NCCL_*
# variables stay as they are and choose none of ours
@pytest.mark.sampled(1)
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "MUSTER_SOCKET_IFNAME"])
def test_variables_choose_the_interface(variable):
    name = list(interfaces())[-1]  # of several not the loopback, which comes first
    of_nccl = {"NCCL_SOCKET_IFNAME": "nobody0", "NCCL_DEBUG": "WARN"}
    for rank, text in enumerate(said("sockets", "debug", **{variable: name}, **of_nccl)):
        assert re.search(
            rf"links to rank {1 - rank} over TCP.*, from [\d.]+:\d+ \({name}\)", text
        ), text
        assert "of NCCL: b'nobody0' b'WARN'" in text, text


def read_until(process, pattern):
    """Lines of stderr up to one that fits; the process is told to go on then."""
    seen = ""
    for line in process.stderr:
        seen += line
        if re.search(pattern, line):
            return seen
    pytest.fail(f"it ended without {pattern!r}:\n{seen}")


# spec: H2 info: a call that waits for more than ten seconds, and for whom
def test_a_long_wait_is_told():
    where = meeting_file()
    ranks = [started(rank, where, "waits", "info") for rank in (0, 1)]
    try:
        text = read_until(ranks[0], "has waited for")
        assert re.search(
            r"all_reduce #\d+ on group default has waited for 1\d(\.\d+)? s; rank 1 has not "
            r"entered this call",
            text,
        ), text
        ranks[1].stdin.write("\n")
        for rank in reversed(ranks):
            rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()


# spec: H2 info: rank 0 says for whom the initialisation waits
def test_who_has_not_come_is_told():
    where = f"tcp://127.0.0.1:{reserve_port()}"
    ranks = [started(rank, where, "late", "info") for rank in (0, 1)]
    try:
        text = read_until(ranks[0], "the store has waited")
        assert re.search(
            r"the store has waited 1\d(\.\d+)? s for member 1 of 2, in all_gather\(.muster/join",
            text,
        ), text
        ranks[1].stdin.write("\n")
        for rank in reversed(ranks):
            rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()


# A wrong MUSTER_TUNE of any rank ends the job on all ranks, with what is wrong and whose it is.
@pytest.mark.parametrize("whose, how", sampled(3, [(0,), (1,), (0, 1)], ["native", "sockets"]))
def test_a_wrong_tunable_fails_every_rank(whose, how):
    where = meeting_file()
    ranks = [
        started(
            rank, where, how, None, **({"MUSTER_TUNE": "link_spun=1us"} if rank in whose else {})
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        text = rank.communicate(timeout=LIMIT_S)[1]
        assert rank.returncode == 1
        assert (
            f'rank {whose[0]} cannot take part: MUSTER_TUNE holds "link_spun=1us": "link_spun" is '
            "no"
            " tunable; there are link_spin, link_yield" in text
        ), text

# SPDX-License-Identifier: BSD-3-Clause
"""`import muster as dist`: a rank that ends without destroy_process_group, and what the others are
told of it.
"""

import datetime
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch
from ranks import LIMIT_S, fork, meeting_file, run_ranks
from scratch import reserve_port

import muster as dist
from muster import _failure

LONG = os.environ.get("MUSTER_TEST_LONG")
RUNS = 100 if LONG else 3
TIMEOUT = datetime.timedelta(seconds=300)  # of the groups: nobody may wait for it
SOON_S = 60


def init(where, rank, size, backend=None):
    dist.init_process_group(
        backend, init_method="file://" + where, rank=rank, world_size=size, timeout=TIMEOUT
    )
    dist.all_reduce(torch.ones(4))


def told(call):
    """The text of the call that fails, the ranks that it names, and its time."""
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value), caught.value.ranks, time.monotonic()


def reduce_for_ever():
    while True:
        dist.all_reduce(torch.ones(4))


def survivors_of(end, culprit, size, call, backend=None):
    """`end(rank)` is how the culprit ends; what `call` tells each of the others, and how long
    after.
    """
    where = meeting_file()
    results = fork.Queue()
    ended = fork.Value("d", 0.0)
    through = fork.Semaphore(0)

    def main(rank):
        torch.set_num_threads(1)
        init(where, rank, size, backend)
        if rank != culprit:
            through.release()
        else:
            for _ in range(size - 1):
                assert through.acquire(timeout=LIMIT_S)
            ended.value = time.monotonic()
            end()
            return
        results.put((rank, *told(call)))

    ranks = [fork.Process(target=main, args=(rank,)) for rank in range(size)]
    try:
        for rank in ranks:
            rank.start()
        found = [results.get(timeout=LIMIT_S) for _ in range(size - 1)]
        return [(text, named, at - ended.value) for _, text, named, at in sorted(found)]
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()
            rank.join()


def bad_batch():
    raise ValueError("bad batch")


LINE = bad_batch.__code__.co_firstlineno + 1


def judge(survivors, culprit, reason):
    for text, named, after in survivors:
        assert f"rank {culprit} failed: {reason}" in text, text
        assert named == [culprit], (named, text)
        assert after < SOON_S


def destroys_in_finally(rank, name):
    dist.init_process_group(init_method="file://" + name, rank=rank, world_size=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(
            LookupError if rank == 1 else dist.DistBackendError, match="no data|rank 1 skipped"
        ):
            try:
                dist.all_reduce(torch.ones(1))
                if rank == 1:
                    raise LookupError("no data")
                dist.all_reduce(torch.ones(1))
            finally:
                dist.destroy_process_group()
    assert any("rank 1 skipped a call" in str(each.message) for each in told) or rank == 0
    assert not dist.is_initialized()


# spec: B10 H7 destroy_process_group in `finally` leaves the exception that is under way, and warns
def test_destroy_keeps_the_exception_that_is_under_way():
    run_ranks(2, destroys_in_finally, meeting_file())


# spec: H7 an exception that ends a rank's process stands in the errors of all others, at once
@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["native", "tcp"])
def test_the_exception_of_a_process_is_told(backend):
    worst = 0.0
    for run in range(RUNS):
        culprit = run % 4
        survivors = survivors_of(bad_batch, culprit, 4, reduce_for_ever, backend)
        judge(survivors, culprit, f"ValueError: bad batch (ending_test.py:{LINE})")
        worst = max(worst, *(after for _, _, after in survivors))
    print(f"{backend}: {RUNS} runs, the last survivor knew after {worst * 1e3:.1f} ms at worst")


# spec: H7 J2 an exception that ends a rank that is a thread stands in the errors of all others; the
# spawn names that rank
def test_the_exception_of_a_thread_is_told():
    worst = 0.0
    for run in range(RUNS if not LONG else 1000):
        culprit = run % 4
        texts, ended, through = [], [], threading.Barrier(4)

        def body(rank, culprit=culprit, texts=texts, ended=ended, through=through):
            dist.init_process_group(timeout=TIMEOUT)
            dist.all_reduce(torch.ones(4))
            through.wait(LIMIT_S)
            if rank == culprit:
                ended.append(time.monotonic())
                bad_batch()
            texts.append(told(reduce_for_ever))
            raise RuntimeError("gave up")

        with pytest.raises(
            dist.SpawnError, match=f"(?s)rank {culprit}.*ValueError: bad batch"
        ) as caught:
            dist.spawn(body, nprocs=4, threads=True)
        assert caught.value.ranks == [culprit], run
        assert len(texts) == 3
        judge(
            [(text, named, at - ended[0]) for text, named, at in texts],
            culprit,
            f"ValueError: bad batch (ending_test.py:{LINE})",
        )
        worst = max(worst, *(at - ended[0] for _, _, at in texts))
    print(f"threads: the last survivor knew after {worst * 1e3:.1f} ms at worst")


# spec: H7 what does not need the lost rank fails too, and so does every later call
def test_all_calls_fail_after_an_exception():
    def receive():
        with pytest.raises(dist.DistBackendError, match="ValueError: bad batch"):
            dist.recv(torch.zeros(1), None)
        dist.all_reduce(torch.ones(4))

    judge(survivors_of(bad_batch, 1, 3, receive), 1, "ValueError: bad batch")


# spec: H7 ways to end a process, and what is told of them
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "end, reason",
    [
        (
            lambda: sys.exit(3),
            "its process ended with exit status 3 and had not called destroy_process_group",
        ),
        (lambda: sys.exit("no data"), "its process ended with exit status no data"),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt), "KeyboardInterrupt (ending_test.py:"),
    ],
)
def test_other_ends_are_told(end, reason):
    judge(survivors_of(end, 2, 3, reduce_for_ever), 2, reason)


# spec: H7 torch.multiprocessing.spawn, which catches the exception of a rank itself
def test_torch_multiprocessing_leaves_the_exception():
    def end():
        try:
            bad_batch()
        except Exception:
            sys.exit(1)

    judge(
        survivors_of(end, 0, 3, reduce_for_ever),
        0,
        f"ValueError: bad batch (ending_test.py:{LINE})",
    )


# spec: H7 a rank that gives up because of another's failure is not at fault
def test_who_gives_up_is_not_at_fault():
    where = meeting_file()
    results = fork.Queue()
    through = fork.Semaphore(0)

    def main(rank):
        torch.set_num_threads(1)
        init(where, rank, 4)
        pair = dist.new_group([0, 1])
        through.release()
        if rank == 3:
            for _ in range(4):
                assert through.acquire(timeout=LIMIT_S)
            bad_batch()
        if rank == 1:
            reduce_for_ever()  # its own exception ends it
        if rank == 2:
            told(reduce_for_ever)  # its end would come before that of rank 3
        if rank == 0:
            with pytest.raises(dist.DistBackendError) as caught:
                while True:
                    dist.all_reduce(torch.ones(4), group=pair)
                    dist.recv(torch.zeros(1), 1, group=pair)
            results.put((str(caught.value), caught.value.ranks))

    ranks = [fork.Process(target=main, args=(rank,)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    text, named = results.get(timeout=LIMIT_S)
    for rank in ranks:
        rank.join(LIMIT_S)
    assert (
        "rank 1 gave up after an earlier failure" in text
        and "rank 3 failed: ValueError: bad batch" in text
    ), text
    assert named == [3]


# spec: H7 B10 a child of multiprocessing that ends well has ended as any process, and is not dead
@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", [lambda: None, lambda: sys.exit(0)], ids=["returns", "exits"])
def test_child_that_ends_well(end):
    where = meeting_file()
    results = fork.Queue()

    def main(rank):
        torch.set_num_threads(1)
        init(where, rank, 2)
        if rank == 0:
            results.put(told(reduce_for_ever))
        end()

    ranks = [fork.Process(target=main, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    text, named, _ = results.get(timeout=LIMIT_S)
    for rank in ranks:
        rank.join(LIMIT_S)
        assert rank.exitcode == 0
    assert "rank 1's process has ended, and called no destroy_process_group before" in text, text
    assert named == [1]


PROGRAM = """
    import atexit, datetime, os, sys, threading, time
    import torch, {face} as dist
    {extra}
    def told(call):
        try:
            call()
        except Exception as error:
            print(f"told: {{error}}", flush=True)
    dist.init_process_group({backend}timeout=datetime.timedelta(seconds=300))
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(4))
"""


def run_program(body, size=2, face="muster", extra="", backend="", tmp=None):
    """Real programs with env://; what each printed, and its exit code."""
    file = os.path.join(tmp, "train.py")
    with open(file, "w") as out:
        out.write(textwrap.dedent(PROGRAM).format(face=face, extra=extra, backend=backend) + body)
    port = str(reserve_port())
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, file],
            env={**common, "RANK": str(rank)},
            cwd=tmp,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [(rank.communicate(timeout=LIMIT_S)[0], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


# spec: H7 an exception that ends the program, and later calls; hooks that were there before go on
# working
def test_program_that_raises(tmp_path):
    body = """
sys_hook = sys.excepthook
sys.excepthook = lambda *error: (print("my hook", flush=True), sys_hook(*error))
if rank == 1:
    raise ValueError("bad batch")
told(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10)])
"""
    (told_text, code), (culprit, failed) = run_program(body, tmp=tmp_path)
    assert code == 0 and failed == 1
    assert "rank 1 failed: ValueError: bad batch (train.py:" in told_text, told_text
    assert culprit.count("my hook") == 1 and culprit.count("Traceback") == 1, culprit


# spec: H7 a program that shows an exception by the hook, and goes on, has not failed
def test_program_that_shows_an_exception(tmp_path):
    body = """
if rank == 1:
    try:
        raise ValueError("mended")
    except ValueError:
        sys.excepthook(*sys.exc_info())
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
print("went on", flush=True)
"""
    (text, code), (shown, other) = run_program(body, tmp=tmp_path)
    assert (code, other) == (0, 0), (text, shown)
    assert text == "went on\n" and "ValueError: mended" in shown and shown.endswith("went on\n"), (
        text,
        shown,
    )


# spec: H7 an exception that a program has noted to be debugged, before it ended well, is no failure
@pytest.mark.sampled(1)
@pytest.mark.parametrize("status", [0, 3])
def test_program_that_ends_after_a_noted_exception(tmp_path, status):
    body = f"""
if rank == 1:
    try:
        raise ValueError("mended")
    except ValueError as error:
        sys.last_value = sys.last_exc = error
    sys.excepthook = lambda *error: None
    sys.exit({status})
told(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10)])
"""
    (told_text, code), (_, ended) = run_program(body, tmp=tmp_path)
    assert (code, ended) == (0, status)
    assert ("rank 1 failed: ValueError: mended (train.py:" in told_text) == (status != 0), told_text
    assert ("ValueError" in told_text) == (status != 0), told_text


# spec: H7 an exception is told and shown also where the working directory is gone
@pytest.mark.sampled(1)
@pytest.mark.parametrize("thread", [False, True])
def test_exception_where_the_working_directory_is_gone(tmp_path, thread):
    body = f"""
def fail():
    raise ValueError("bad batch")
if rank == 1:
    sys.stdout.flush()
    os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
    fail.__code__ = fail.__code__.replace(co_filename="relative.py")
    if {thread}:
        thread = threading.Thread(target=fail, name="loader")
        thread.start()
        thread.join()
        sys.exit(3)
    fail()
told(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10)])
"""
    (told_text, code), (text, _) = run_program(body, tmp=tmp_path)
    assert code == 0 and "Traceback" in text and "ValueError: bad batch" in text, text
    assert "rank 1 failed: ValueError: bad batch (relative.py:" in told_text, told_text


# spec: H7 exit with a status, which only the end of the process knows
def test_program_that_exits(tmp_path):
    body = """
if rank == 1:
    sys.exit(7)
told(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10)])
"""
    (told_text, code), (_, failed) = run_program(body, tmp=tmp_path)
    assert code == 0 and failed == 7
    assert (
        "rank 1 failed: its process ended with exit status 7 and had not called "
        "destroy_process_group" in told_text
    ), told_text


# spec: H7 B10 a program whose ranks just end works, also where others still close their groups
@pytest.mark.sampled(1)
@pytest.mark.parametrize("close", ["dist.destroy_process_group()", "pass"])
def test_program_that_just_ends(tmp_path, close):
    # The system closes rank 1's end of the pipe when its process is gone.
    os.mkfifo(tmp_path / "alive")
    body = f"""
alive = os.open("alive", os.O_WRONLY if rank == 1 else os.O_RDONLY)
if rank == 1:
    sys.exit(0)
assert os.read(alive, 1) == b""
told(lambda: dist.destroy_process_group() if {close != "pass"} else None)
"""
    for text, code in run_program(body, tmp=tmp_path):
        assert code == 0 and text == "", text


# spec: H7 of a rank that has just ended, a call that needs it says so at once
def test_call_that_needs_a_rank_that_has_ended(tmp_path):
    body = """
if rank == 1:
    sys.exit(0)
told(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10)])
"""
    (told_text, code), (text, ended) = run_program(body, tmp=tmp_path)
    assert code == 0 and ended == 0 and text == ""
    assert "rank 1's process has ended, and called no destroy_process_group before" in told_text, (
        told_text
    )


THREAD_THAT_RAISES = """
def work():
    raise ValueError("bad batch")
if rank == 1:
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()
    sys.exit({status})
{call}
"""
REDUCE = "told(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10)])"


# spec: H7 the exception of a thread, where the process then ends with a status other than 0
def test_program_whose_thread_raised(tmp_path):
    body = THREAD_THAT_RAISES.format(status=3, call=REDUCE)
    (told_text, code), (_, status) = run_program(body, tmp=tmp_path)
    assert (code, status) == (0, 3)
    assert (
        "rank 1 failed: ValueError: bad batch (train.py:" in told_text
        and "in its thread loader" in told_text
    ), told_text


# spec: H7 the exception of a thread is no failure of a rank that ends well, and told to those who
# need that rank
def test_program_that_ends_well_after_a_thread_raised(tmp_path):
    body = THREAD_THAT_RAISES.format(status=0, call=REDUCE)
    (told_text, code), (_, status) = run_program(body, tmp=tmp_path)
    assert (code, status) == (0, 0)
    assert "rank 1's process has ended, and called no destroy_process_group before" in told_text
    assert "before (ValueError: bad batch (train.py:" in told_text, told_text
    assert "in its thread loader)" in told_text and "rank 1 failed" not in told_text, told_text


# spec: H7 B10 the others close their groups without a rank that ended well, though a thread of it
# raised
def test_others_close_their_groups_after_a_thread_raised(tmp_path):
    body = THREAD_THAT_RAISES.format(status=0, call="told(dist.destroy_process_group)")
    (told_text, code), (_, status) = run_program(body, tmp=tmp_path)
    # On a busy machine the other's end may come later than rank 0 waits for it.
    alone = "rank 0 has destroyed group 'default' alone: it waited 5 s for rank 1"
    assert (code, status) == (0, 0) and (told_text == "" or alone in told_text), told_text


# spec: H7 in stock torch on backend muster
def test_program_of_stock_torch_that_raises(tmp_path):
    body = """
if rank == 1:
    raise ValueError("bad batch")
told(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10)])
"""
    extra = "import muster.torch"
    (told_text, code), _ = run_program(
        body, face="torch.distributed", extra=extra, backend="'muster', ", tmp=tmp_path
    )
    assert code == 0
    assert "rank 1 failed: ValueError: bad batch (train.py:" in told_text, told_text


def test_describe_names_type_text_and_place_of_the_users_code():
    def described(call):
        try:
            call()
        except BaseException as error:
            return _failure.describe(error)

    assert described(bad_batch) == f"ValueError: bad batch (ending_test.py:{LINE})"
    inside = described(lambda: torch.zeros(2).view(3))  # raised within torch
    assert (
        inside.startswith("RuntimeError: ") and "(ending_test.py:" in inside and "\n" not in inside
    )
    long = described(lambda: (_ for _ in ()).throw(ValueError("x" * 5000)))
    assert len(long) < 400
    assert described(lambda: (_ for _ in ()).throw(ValueError("first\nsecond"))).startswith(
        "ValueError: first ("
    )


def test_hooks_are_chained():
    seen = []
    before = threading.excepthook
    try:
        threading.excepthook = lambda args: (seen.append(args.exc_type), before(args))
        thread = threading.Thread(target=bad_batch)
        thread.start()
        thread.join()
    finally:
        threading.excepthook = before
    assert seen == [ValueError]

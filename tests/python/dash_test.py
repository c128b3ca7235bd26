# SPDX-License-Identifier: BSD-3-Clause
"""`muster dash` as people see it: a real Chromium shows real, simulated and dead ranks."""

import fcntl
import html
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request

import pytest
from scratch import LIMIT_S
from trace_files import Call, SimulatedJob

import muster.run

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Rank 2 stands in a function of its own while the others wait for it.
PROGRAM = """
import threading, torch, muster as dist
import muster.debug

def reads_its_data():
    print("late", flush=True)
    threading.Event().wait()

dist.init_process_group()
muster.debug.start_debug_server(port=0)
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 2:
    reads_its_data()
dist.all_reduce(torch.ones(1024))
"""
DYING = """
import os, signal, sys, torch, muster as dist
dist.init_process_group()
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    print("about to die <b>now</b>", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1024))
"""


@pytest.fixture
def browse(tmp_path):
    """A function of an address: the page's text as it stands after its scripts have run for some
    seconds, as HTML, and what the browser has complained of.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium; MUSTER_BROWSER=ON tools/setup as root")

    def load(url, *options):
        shown = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            + [f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1500,1100"]
            + ["--virtual-time-budget=8000", "--enable-logging=stderr", *options]
            + ["--dump-dom", url],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert shown.returncode == 0, shown.stderr
        assert "Refused to" not in shown.stderr, shown.stderr  # the policy forbids nothing of ours
        assert "Uncaught" not in shown.stderr, shown.stderr
        return shown.stdout

    return load


def ask(url, path):
    """What the page at this address, token and all, would be answered."""
    address, token = url.split("#")
    request = urllib.request.Request(
        address.rstrip("/") + path, headers={"Authorization": "Bearer " + token}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LIMIT_S) as reply:
        return json.load(reply)


class Dash:
    """`muster dash` with these arguments."""

    def __init__(self, *arguments):
        self._process = subprocess.Popen(
            [muster.run.command(), "dash", *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            pytest.skip("this muster has no cpp-httplib")
        self.url = line.split()[-1]

    def ask(self, path):
        return ask(self.url, path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()


def rows_of(dom):
    """[(rank, classes)] of the table, from the top."""
    body = dom[dom.index('<tbody id="ranks">') : dom.index("</tbody>")]
    return [
        (int(rank), classes.split())
        for rank, classes in re.findall(r'<tr data-rank="(\d+)" class="([^"]*)"', body)
    ]


def part(dom, name):
    """The text of the element with this id, up to the first tag in it."""
    return html.unescape(re.search(rf'id="{name}"[^>]*>([^<]*)', dom)[1])


def is_ready(dom, ranks):
    return f'data-ready="{ranks}"' in dom and re.search(r'data-painted="[1-9]', dom)


@pytest.fixture
def job(tmp_path):
    """Four real ranks, of which 2 is late: the address of the page that rank 0 has started."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = subprocess.Popen(
        [muster.run.command(), "run", "--standalone", "-n", "4", sys.executable, str(program)],
        env=os.environ | {"MUSTER_RUN_DIR": str(tmp_path / "run")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = None
        while url is None:
            line = launcher.stderr.readline()
            if "without cpp-httplib" in line:
                pytest.skip("this muster has no cpp-httplib")
            assert line, "the launcher has ended"
            url = re.search(r"http://127\.0\.0\.1:\d+/#[0-9a-f]{64}", line)
        assert "late" in launcher.stdout.readline()
        yield url[0]
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=LIMIT_S)


# spec: V8.debug_server, V8.stacks start_debug_server starts the page; ranks of a real job, the late
# one on top, what it does by the stacks of its Python threads
def test_four_ranks_in_a_browser(job, browse):
    limit = time.monotonic() + LIMIT_S
    calls = []
    while [call and call["bytes"] for call in calls].count(4096) < 3:
        calls = [rank["in_flight"] for rank in ask(job, "/api/state")["ranks"]]
        assert time.monotonic() < limit, "the others have not entered the call"
        time.sleep(0.05)
    dom = browse(job + "/rank/2/stacks")
    assert is_ready(dom, 4), dom
    assert part(dom, "headline").startswith(("rank 2 is behind", "no rank is behind yet")), dom
    rows = rows_of(dom)
    assert sorted(rank for rank, _ in rows) == [0, 1, 2, 3]
    table = re.sub("<[^>]*>", " ", dom[dom.index('<tbody id="ranks">') : dom.index("</tbody>")])
    assert re.search(r"all_reduce #\d+ of 4\.1KB", table), table
    assert "reads_its_data" in dom[dom.index('id="stacks"') :], "no stack of Python"
    assert part(dom, "chosen-title") == "Rank 2"


# spec: V8.ranks, V8.timeline 512 ranks: the late one on top, a row of the timeline for each, and
# texts of programs that are no part of the page
def test_512_simulated_ranks(tmp_path, browse):
    late = 300

    def calls_of(rank):
        done = [Call("all_reduce", number, 28 - 4 * number, 0.5) for number in range(1, 6)]
        return done if rank == late else [*done, Call("all_reduce", 6, 5)]

    words = {"job": "simulated", "group": "<img src=x onerror=alert(1)>", "run_id": "<b>job</b>"}
    simulated = SimulatedJob(tmp_path, 512, calls_of, **words)
    with Dash(simulated.folder) as dash:
        dom = browse(dash.url)
        assert is_ready(dom, 512), dom[:4000]
        rows = rows_of(dom)
        assert len(rows) == 512
        assert rows[0][0] == late and "late" in rows[0][1], rows[:3]
        assert all("late" not in classes for _, classes in rows[1:])
        assert part(dom, "headline").startswith(f"rank {late} is behind")
        assert "<img" not in dom and "&lt;img" in dom
        assert "<b>job" not in dom
        assert dash.ask("/api/timeline?columns=60")["ranks"][0]["columns"].endswith("w")
        simulated.end()


# spec: V8.ended live and after the end: the run directory of a job that died, with its logs and
# restarts
def test_a_dead_job(tmp_path, browse):
    program, run = tmp_path / "program.py", tmp_path / "run"
    program.write_text(DYING)
    run.mkdir(mode=0o700)
    ended = subprocess.run(
        [muster.run.command(), "run", "--standalone", "-n", "4", "--max-restarts", "1"]
        + ["--log-dir", run, "--redirects", "3", "--events", run / "events.jsonl"]
        + [sys.executable, str(program)],
        env=os.environ | {"MUSTER_RUN_DIR": str(run)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode != 0, ended.stderr
    with Dash(run) as dash:
        dom = browse(dash.url + "/rank/1")
        assert is_ready(dom, 4), dom
        assert "restarts 1" in dom and "ended" in dom
        assert all("gone" in classes for _, classes in rows_of(dom))
        assert "worker_failed" in dom and "workers_started" in dom
        logs = [each["name"] for each in dash.ask("/api/logs")["logs"]]
        name = next(each for each in logs if each.endswith("attempt_1/1/stderr.log"))
        assert name in dom
        assert "about to die" in dash.ask("/api/log?name=" + name)["text"]


# spec: V8.debug_server start_debug_server: torch's signature; what muster's page has not is refused
# by name
def test_start_debug_server_refuses_what_it_has_not():
    import muster.debug

    for options, name in (
        ({"dump_dir": "/tmp"}, "dump_dir"),
        ({"handlers": []}, "handlers"),
    ):
        with pytest.raises(NotImplementedError, match=name):
            muster.debug.start_debug_server(**options)
    with pytest.raises(ValueError, match="start_method|context"):
        muster.debug.start_debug_server(start_method="thread")
    with pytest.raises(ValueError, match="fetch_timeout"):
        muster.debug.start_debug_server(fetch_timeout=0)
    with pytest.raises(RuntimeError, match="init_process_group"):
        muster.debug.start_debug_server()
    with pytest.raises(AssertionError, match="not started"):
        muster.debug.stop_debug_server()


# In each the process gets the signal by which the page asks for stacks.
SIGNALS = {
    # The page has looked before the server was stopped.
    "is left": """
muster.debug._answer_for_stacks()
muster.debug._leave_stacks()
os.kill(os.getpid(), SIGNAL)
muster.debug._answer_for_stacks()
os.kill(os.getpid(), SIGNAL)
assert os.fstat(muster.debug._stacks).st_size > 0
""",
    # A handler that is none of Python's own.
    "is another's": """
own = tempfile.TemporaryFile()
faulthandler.register(SIGNAL, file=own)
muster.debug._answer_for_stacks()
assert muster.debug._stacks is None
os.kill(os.getpid(), SIGNAL)
assert os.fstat(own.fileno()).st_size > 0
""",
}


# spec: V8.debug_server, V8.stacks the signal of the page ends no process that has stopped its
# server, and takes no handler from the program
@pytest.mark.parametrize("case", SIGNALS)
def test_the_signal_for_stacks(case):
    head = "import faulthandler, os, tempfile, muster.debug\nSIGNAL = muster.debug._STACKS_SIGNAL\n"
    ended = subprocess.run(
        [sys.executable, "-c", head + SIGNALS[case]],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr


def on_terminal(command, **variables):
    """What a command prints on a terminal of 60 columns."""
    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
        subprocess.run(command, stdout=follower, env=os.environ | variables, timeout=LIMIT_S)
        return os.read(leader, 1 << 16).decode()
    finally:
        os.close(leader)
        os.close(follower)


# spec: V8.ranks top on a terminal: its width, colour for who is late, none with NO_COLOR
def test_top_fits_the_terminal(tmp_path):
    simulated = SimulatedJob(
        tmp_path,
        4,
        lambda rank: [] if rank == 3 else [Call("all_reduce", 1, 60)],
        job="terminal",
        group="a group of a name that is longer than the terminal is wide",
    )
    command = [muster.run.command(), "top", "--once", "--sort", "late", "--dir", simulated.folder]
    shown = on_terminal(command, TERM="xterm").split("\r\n")
    assert shown[2].startswith("\x1b[31m    3 "), shown
    plain = on_terminal(command, NO_COLOR="1")
    assert "\x1b" not in plain
    assert max(map(len, plain.split("\r\n"))) == 60

# SPDX-License-Identifier: BSD-3-Clause
"""`muster run --metrics` as a dashboard sees it: a real Prometheus fetches the numbers of a job,
and answers every question of examples/grafana/muster.json.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from scratch import LIMIT_S, reserve_port

import muster.run

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECRET = "metrics test: 0123456789abcdef, long enough?"
# Two ranks reduce, and send to each other, until they are told to end. Rank 1 is the late one.
PROGRAM = """
import signal, sys, time, torch, muster as dist
dist.init_process_group()
other, tensor, steps = 1 - dist.get_rank(), torch.ones(1000), 0
going = [True]
signal.signal(signal.SIGTERM, lambda *_: going.clear())
while True:
    tensor[:] = float(bool(going))
    if dist.get_rank() == 1:
        time.sleep(0.002)  # so that somebody is late
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    if tensor[0] == 0:
        break
    works = [dist.isend(tensor, other), dist.irecv(torch.empty(1000), other)]
    for work in works:
        work.wait()
    steps += 1
    if steps == 100:
        print("steps", flush=True)
dist.destroy_process_group()
"""
PROMETHEUS = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: muster
    authorization: {{type: Bearer, credentials_file: {token}}}
    static_configs: [{{targets: ["{address}"]}}]
"""


def get(url, **headers):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=LIMIT_S) as reply:
        return reply.read().decode()


@pytest.fixture
def job(tmp_path):
    """A job whose metrics any host may ask for: the URL on this one, and the token's file."""
    program, token = tmp_path / "program.py", tmp_path / "token"
    program.write_text(PROGRAM)
    environment = os.environ | {"MUSTER_SECRET": SECRET, "MUSTER_RUN_DIR": str(tmp_path / "run")}
    command = muster.run.command()
    subprocess.run([command, "secret", "--metrics", "-o", token], env=environment, check=True)
    launcher = subprocess.Popen(
        [command, "run", "--standalone", "-n", "2", "--metrics", "0.0.0.0:0", sys.executable]
        + [str(program)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        port = re.search(r"metrics are at http://0\.0\.0\.0:(\d+)/", launcher.stderr.readline())[1]
        for _ in range(2):
            assert "steps" in launcher.stdout.readline(), launcher.stderr.read()
        yield f"127.0.0.1:{port}", token
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=LIMIT_S)


@pytest.fixture
def page(job):
    address, token = job
    return get(f"http://{address}/metrics", Authorization=f"Bearer {token.read_text().strip()}")


class Prometheus:
    def __init__(self, folder, address, token):
        config = folder / "prometheus.yml"
        config.write_text(PROMETHEUS.format(address=address, token=token))
        self._url = f"http://127.0.0.1:{reserve_port()}"
        self._log = folder / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("prometheus", f"--config.file={config}"),
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def ask(self, question):
        """The series of the answer; asked again until there are any."""
        query = urllib.parse.urlencode({"query": question})
        limit, said = time.monotonic() + LIMIT_S, None
        while time.monotonic() < limit:
            try:
                said = json.loads(get(f"{self._url}/api/v1/query?{query}"))
                if said["data"]["result"]:
                    return said["data"]["result"]
            except urllib.error.HTTPError as error:
                if error.code == 400:  # it does not understand the question
                    pytest.fail(f"{question}: {error.read().decode()}")
            except OSError:  # it does not listen yet
                assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        pytest.fail(f"no series answers {question}: {said}\n{self._log.read_text()}")

    def close(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def prometheus(tmp_path, job):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed; MUSTER_SERVICES=ON tools/setup as root")
    server = Prometheus(tmp_path, *job)
    try:
        yield server
    finally:
        server.close()


def questions():
    """{title of the panel: what it asks}."""
    board = json.loads((ROOT / "examples/grafana/muster.json").read_text())
    return {
        (panel["title"], target["refId"]): target["expr"].replace("$__rate_interval", "1m")
        for panel in board["panels"]
        for target in panel["targets"]
    }


def names_in(text):
    return set(re.findall(r"\b(?:muster|process)_\w+|\btarget_info\b", text))


# spec: V7 a real Prometheus fetches the page with the token; each question of the dashboard has an
# answer
def test_prometheus_answers_the_dashboard(prometheus):
    prometheus.ask("up == 1")
    assert len(questions()) >= 15
    for question in questions().values():
        prometheus.ask(question)
    late = prometheus.ask("increase(muster_collective_late_seconds_total[1m])")
    seconds = {each["metric"]["rank"]: float(each["value"][1]) for each in late}
    assert seconds["1"] > seconds["0"], "rank 1 sleeps before each call"
    calls = prometheus.ask("muster_calls_total")
    assert {"all_reduce", "isend", "irecv"} <= {each["metric"]["operation"] for each in calls}


# spec: V7 promtool finds nothing to say about the page
def test_promtool_is_content(page):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed; MUSTER_SERVICES=ON tools/setup as root")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, ""), page


# spec: V7 the documentation lists every metric of the page and of the dashboard, and no other
def test_every_metric_is_documented(page):
    table = (ROOT / "docs/user/metrics.md").read_text().partition("| metric |")[2]
    documented = names_in("".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    shown = set(re.findall(r"^# TYPE (\w+) ", page, re.M))
    assert documented == shown
    for question in questions().values():
        assert names_in(question) <= documented, question


# spec: V7 without the token the page is refused
def test_the_page_is_refused_without_the_token(job):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"http://{job[0]}/metrics")

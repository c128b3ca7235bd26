"""`muster run --rdzv-backend kubernetes --elastic keep` against the tests' fake of the API."""

import pathlib
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from elastic_jobs import (
    LIMIT_S,
    STEPS,
    TRAINER,
    Launcher,
    rendezvous,
    replace_killed,
    train,
    weights,
)
from scratch import reserve_port

FAKE = pathlib.Path(__file__).parents[2] / "src/muster/testing/fake_kubernetes.py"


@pytest.fixture
def api(tmp_path):
    """The endpoint of the fake, and the variables with which launchers are served there."""
    endpoint, token = f"http://127.0.0.1:{reserve_port()}", tmp_path / "token"
    token.write_text("first")
    words = [sys.executable, FAKE, endpoint.rpartition(":")[2], tmp_path / "state", token]
    server = subprocess.Popen(words)
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            try:
                opener.open(f"{endpoint}/readyz", timeout=LIMIT_S).close()
                break
            except urllib.error.URLError:
                assert server.poll() is None, "the fake did not start"
        yield endpoint, {"MUSTER_KUBERNETES_TOKEN_FILE": str(token)}
    finally:
        server.kill()
        server.wait()


# spec: R3 Lease membership: the node of rank 0 dies in the middle of training, the others go on,
# and the weights are those of a run that nobody disturbs
def test_training_goes_on(api):
    endpoint, environment = api
    options = rendezvous("kubernetes", endpoint, "zero", "2")
    words = (TRAINER, str(STEPS), "9:0:update:10:host")

    def start():
        return Launcher(*words, ranks=2, options=options, environment=environment)

    nodes = replace_killed(start, 2)
    told = "".join(each.told() for each in nodes)
    out = "".join(each.out for each in nodes)
    assert [each.process.returncode for each in nodes] == [-signal.SIGKILL, 0, 0], told
    assert "LOST" not in out, told
    assert weights(out, 4) == weights(train(ranks=4).out, 4), told

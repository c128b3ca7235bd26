# SPDX-License-Identifier: BSD-3-Clause
"""The tests' fake of Kubernetes' API server."""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

from scratch import LIMIT_S, reserve_port

FAKE = pathlib.Path(__file__).parents[2] / "src/testing/fake_kubernetes.py"


@contextlib.contextmanager
def kubernetes_api():
    """Its endpoint, and the variables with which muster's processes are served there."""
    with tempfile.TemporaryDirectory(prefix="muster-kubernetes-") as name:
        folder = pathlib.Path(name)
        endpoint, token = f"http://127.0.0.1:{reserve_port()}", folder / "token"
        token.write_text("first")
        words = [sys.executable, FAKE, endpoint.rpartition(":")[2], folder / "state", token]
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

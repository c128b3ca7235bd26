# SPDX-License-Identifier: BSD-3-Clause
"""Libraries that train on torch.distributed, on muster's engine: their programs give what they give
on Gloo.

They live in .cache/clients, which `MUSTER_CLIENTS=ON tools/setup` fills; one of them runs each
time, all in long runs. Each asks for muster by the client's own option, or finds it in Gloo's
place.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import muster

TREE = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
MUSTER = pathlib.Path(muster.__file__).parents[2] / "bin/muster"
PYTHON = TREE / ".cache/clients/bin/python"

# Client -> how it gets muster's engine: "option" or "replace"; and whether it starts its workers by
# itself.
CLIENTS = {
    "accelerate": ("replace", False),
    "lightning": ("option", False),
    "transformers": ("replace", False),
    "deepspeed": ("option", False),
    "ray": ("option", True),
    "ignite": ("replace", False),
    "torchmetrics": ("option", False),
    "torchft": ("replace", False),
    "composer": ("replace", False),
}


def result(client, engine):
    """The last words of the program."""
    way, starts_workers = CLIENTS[client]
    environment = os.environ | {"CLIENT_ENGINE": engine, "MUSTER_PYTHON": str(PYTHON)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    replaced = engine == "muster" and way == "replace"
    if engine == "muster" and way == "option":
        environment["CLIENT_BACKEND"] = "muster"
    program = HERE / f"with_{client}.py"
    options = ["--nproc-per-node", "2", *(["--replace-gloo"] if replaced else [])]
    start = [PYTHON] if starts_workers else [MUSTER, "run", "--standalone", *options]
    line = [*start, program]
    ended = subprocess.run(
        [str(word) for word in line], capture_output=True, text=True, timeout=280, env=environment
    )
    said = [text for text in ended.stdout.splitlines() if "RESULT " in text]
    assert ended.returncode == 0 and len(said) == 1, (
        f"{client} on {engine}:\n{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    )
    return json.loads(said[0].partition("RESULT ")[2])


# spec: R4.accelerate[accelerate] R4.lightning[lightning] R4.deepspeed[deepspeed] R4.ray[ray] each
# client's program runs on muster by its option or in Gloo's place, and comes to what it comes to on
# Gloo; S3.transformers[transformers] (with_transformers.py) the unsharded export loads in
# transformers
@pytest.mark.parametrize(
    "client", CLIENTS if os.environ.get("MUSTER_TEST_LONG") else ["accelerate"]
)
def test_client(client):
    ours, theirs = result(client, "muster"), result(client, "gloo")
    assert len(ours) > 4 and ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


if __name__ == "__main__":
    print(result(*sys.argv[1:]))

# SPDX-License-Identifier: BSD-3-Clause
"""The protection of a job from unauthenticated peers, as programs of Python meet it."""

import os
import pathlib
import re

import pytest
from ranks import reserve_port, run_ranks

import muster as dist


# spec: W3 a store's file is this user's alone to write, and no link: else it is refused by name
def test_files_that_others_could_have_laid(tmp_path):
    file, link = tmp_path / "store", tmp_path / "link"
    dist.FileStore(str(file)).set("key", "value")
    link.symlink_to(file)
    with pytest.raises(dist.DistStoreError, match=f"{link}.*symbolic link"):
        dist.FileStore(str(link))
    file.chmod(0o622)
    with pytest.raises(dist.DistStoreError, match=f"{file}.*mode 0622"):
        dist.FileStore(str(file))
    file.chmod(0o644)  # others may read it
    assert dist.FileStore(str(file)).get("key") == b"value"


def refuse(rank, variable, value, words):
    os.environ[variable] = value
    with pytest.raises(dist.DistError, match=words):
        dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


# spec: W4 secrets of few characters are refused, and the message says what makes a good one
@pytest.mark.parametrize("weak", ["a" * 24, "12341234123412341234"])
def test_weak_secrets(weak):
    run_ranks(1, refuse, "MUSTER_SECRET", weak, "MUSTER_SECRET is made of.*muster secret")


# spec: W3 a secret's file that others can read is refused by name
def test_secrets_that_others_read(tmp_path):
    file = tmp_path / "secret"
    file.write_text("sixteen letters!")
    file.chmod(0o640)
    run_ranks(1, refuse, "MUSTER_SECRET_FILE", str(file), f"{file}.*mode 0640")


def listening():
    """The addresses at which this process listens for TCP, in the kernel's hexadecimal words."""
    own = set()
    for each in pathlib.Path("/proc/self/fd").iterdir():
        try:
            own.update(re.findall(r"socket:\[(\d+)\]", os.readlink(each)))
        except FileNotFoundError:
            continue  # the folder's own descriptor
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in own:
                found.add(words[1].partition(":")[0])
    return found


def listen_on_loopback(rank, port):
    os.environ.pop("MUSTER_SOCKET_IFNAME", None)
    dist.init_process_group(
        init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, group_name="here"
    )
    dist.barrier()
    everywhere = {"00000000", "0" * 32}
    found = listening()
    assert not found & everywhere
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert found <= loopback, found
    assert found or rank != 0  # the store, which rank 0 serves
    dist.destroy_process_group()


# spec: W7 a job on loopback listens nowhere else
def test_listens_where_it_is_asked():
    run_ranks(2, listen_on_loopback, reserve_port())

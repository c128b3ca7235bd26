# SPDX-License-Identifier: BSD-3-Clause
"""EtcdStore in Python, over a real etcd."""

import datetime

import pytest
import torch
from etcd_server import etcd_server
from ranks import run_ranks

import muster as dist

WAIT = datetime.timedelta(seconds=60)


@pytest.fixture(scope="module")
def endpoint():
    with etcd_server() as address:
        yield address


# spec: L11 EtcdStore in Python, with the operations of C
# spec: C1 EtcdStore
def test_store(endpoint):
    store = dist.EtcdStore(endpoint, prefix="python", timeout=WAIT)
    other = dist.EtcdStore(f"127.0.0.1:1,{endpoint}", prefix="python")
    store.set("key", b"\0\xff")
    assert other.get("key") == b"\0\xff"
    assert store.add("count", 1) == 1 and other.add("count", 6) == 7
    assert store.compare_set("slot", "", "first") == b"first"
    assert store.num_keys() == 3 and store.delete_key("key") and not store.check(["key"])
    store.append("text", "a"), other.append("text", "b")
    assert store.multi_get(["text", "count"]) == [b"ab", b"7"]
    store.queue_push("queue", "value")
    assert other.queue_pop("queue") == b"value"
    with pytest.raises(dist.QueueEmptyError):
        other.queue_pop("queue", block=False)
    store.set_timeout(datetime.timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match="nobody sets this"):
        store.get("nobody sets this")
    assert store.clone().get("text") == b"ab"
    assert dist.PrefixStore("below", other).num_keys() == 0


# spec: L11 a store that does not answer is named
def test_nobody_answers():
    with pytest.raises(dist.DistStoreError, match=r"127\.0\.0\.1:1"):
        dist.EtcdStore("127.0.0.1:1", timeout=datetime.timedelta(milliseconds=100))


def _sums(rank, endpoint, prefix):
    dist.init_process_group(
        store=dist.EtcdStore(endpoint, prefix=prefix), rank=rank, world_size=3, timeout=WAIT
    )
    values = torch.full((1000,), float(rank))
    dist.all_reduce(values)
    dist.destroy_process_group()
    return values[0].item()


# spec: L11 a job over EtcdStore, and a second one under the same prefix
def test_job(endpoint, monkeypatch):
    monkeypatch.setenv("MUSTER_SECRET", "a secret that etcd does not know")
    for _ in range(2):
        assert run_ranks(3, _sums, endpoint, "job") == [3.0] * 3

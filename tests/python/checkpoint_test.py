# SPDX-License-Identifier: BSD-3-Clause
"""`muster.checkpoint`: states of every kind, saved by some ranks and loaded by others, here and by
stock torch.
"""

import concurrent.futures
import json
import os
import pickle
import random
import resource

import pytest
import torch
import torch.distributed as theirs
import torch.distributed.checkpoint as dcp
from scratch import meeting_file
from sharded_models import Block, Net, assert_same, loss_of
from training import on_ranks

import muster as dist
import muster.torch
from muster import checkpoint, fsdp
from muster.checkpoint import FileSystemWriter, HuggingFaceStorageReader, RandomState, Shard
from muster.fsdp import FSDP, fully_shard
from muster.nn.parallel import DistributedDataParallel
from muster.optim import ZeroRedundancyOptimizer
from muster.utils.data.distributed import DistributedSampler


def fully_sharded(net):
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net) or net


WRAPS = {
    "plain": lambda net: net,
    "ddp": lambda net: DistributedDataParallel(net),
    "zero": lambda net: DistributedDataParallel(net),
    "fsdp": lambda net: FSDP(net, auto_wrap_policy={Block}),
    "fully_shard": fully_sharded,
}


def trained(way, seed=1, steps=0):
    model = WRAPS[way](Net(seed))
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        if way == "zero"
        else torch.optim.Adam(model.parameters(), lr=0.01)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, scheduler, 0, steps)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, first, steps):
    """The same data on all ranks, so that every wrapping trains alike."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, 0, step)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def state_of(model, optimizer, scheduler, **more):
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, **more}


def whole_tensors(path):
    """All of a checkpoint's tensors, by one process."""
    index = dist._C._CheckpointIndex.open(path, False)
    flat = {
        name: torch.empty(size, dtype=checkpoint.shard.DTYPES[dtype])
        for name, (dtype, size) in index.tensors.items()
    }
    checkpoint.load(flat, checkpoint_id=path, no_dist=True)
    return flat


def write(rank, size, way, path):
    model, optimizer, scheduler = trained(way, steps=3)
    checkpoint.save(state_of(model, optimizer, scheduler, step=3), checkpoint_id=path)
    return train(model, optimizer, scheduler, 3, 2)


def read(rank, size, way, path, again):
    model, optimizer, scheduler = trained(way, seed=5)
    state = state_of(model, optimizer, scheduler, step=0)
    checkpoint.load(state, checkpoint_id=path)
    assert state["step"] == 3
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert scheduler.last_epoch == 3
    checkpoint.save(state, checkpoint_id=again)
    return train(model, optimizer, scheduler, 3, 2)


# spec: S1 modules, optimizers, FSDP, ZeRO, schedulers, S2 any wrapping reads what another wrote:
# the same bits, and the losses go on
def test_any_wrapping_reads_any_other(tmp_path):
    ways = [(1, "plain"), (2, "ddp"), (3, "zero"), (4, "fsdp"), (3, "fully_shard"), (2, "fsdp")]
    for number, (size, way) in enumerate(ways):
        path, again = str(tmp_path / way / str(size)), str(tmp_path / "again")
        expected = on_ranks(size, write, way, path)[0]
        tensors = whole_tensors(path)
        for other_size, other in ways[number + 1 :] + ways[:1]:
            losses = on_ranks(other_size, read, other, path, again)[0]
            assert losses == pytest.approx(expected, rel=1e-4), (way, size, other, other_size)
            assert_same(whole_tensors(again), tensors, 0)


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def values():
    module = Extra(2, 2)
    module.calls = 3
    module.register_buffer("lost", torch.ones(2), persistent=False)
    return {
        "module": module,
        "numbers": {"int": 3, "float": float("inf"), "none": None, 5: "five", "flag": True},
        "text": 'a "quoted" \n line é',
        "bytes": b"\x00\xff",
        "tuple": (1, (2.5, "x")),
        "list": [torch.arange(3), {"deep": torch.ones(2, 2, dtype=torch.complex128)}],
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "set": {1, 2},
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(6).view(2, 3).t(),
    }


# spec: S1 any nested dictionary of tensors and values, S6 nothing is pickled
def test_values_of_every_kind_come_back_without_pickle(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something is pickled")

    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    saved, path = values(), str(tmp_path / "c")
    checkpoint.save(saved, checkpoint_id=path)
    loaded = values()
    loaded["module"].calls = 0
    for each in loaded["module"].parameters():
        each.data.zero_()
    for each in (loaded["list"][0], loaded["list"][1]["deep"], loaded["strided"], loaded["scalar"]):
        each.zero_()
    tensors = [loaded["list"][0], loaded["strided"]]
    loaded |= {"text": "", "bytes": b"", "tuple": (), "dtype": None, "size": None, "set": None}
    loaded["numbers"] = dict.fromkeys(loaded["numbers"], 0)
    checkpoint.load(loaded, checkpoint_id=path)
    assert loaded["list"][0] is tensors[0] and loaded["strided"] is tensors[1]  # in place
    assert loaded["module"].calls == 3
    assert torch.equal(loaded["module"].weight, saved["module"].weight)
    assert torch.equal(loaded["list"][0], torch.arange(3))
    assert torch.equal(loaded["list"][1]["deep"], torch.ones(2, 2, dtype=torch.complex128))
    assert torch.equal(loaded["strided"], saved["strided"])
    for name in ("numbers", "text", "bytes", "tuple", "dtype", "size", "set"):
        assert loaded[name] == saved[name] and type(loaded[name]) is type(saved[name]), name
    assert "module.lost" not in whole_tensors(path)


def samplers_and_random(rank, size, path):
    numpy = pytest.importorskip("numpy")
    sampler = DistributedSampler(range(20), num_replicas=size, rank=rank)
    sampler.set_epoch(4)
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    random.gauss(0, 1)
    state = {"sampler": sampler, "random": RandomState()}
    checkpoint.save(state, checkpoint_id=path)

    def draw():
        return torch.rand(2).tolist(), random.gauss(0, 1), random.random(), numpy.random.rand()

    drawn = draw()
    sampler.set_epoch(0)
    checkpoint.load(state, checkpoint_id=path)
    assert sampler.epoch == 4
    assert draw() == drawn


# spec: S1 samplers and random states, of each rank its own
def test_samplers_and_random_states_go_on(tmp_path):
    on_ranks(2, samplers_and_random, str(tmp_path / "c"))


def asynchronous(rank, size, folder):
    model, optimizer, scheduler = trained("fsdp", steps=2)
    state = state_of(model, optimizer, scheduler)
    futures = []
    for number in range(3):
        writer = FileSystemWriter(f"{folder}/{number}", keep_last=2, step=number)
        futures.append(checkpoint.async_save(state, storage_writer=writer))
        train(model, optimizer, scheduler, 2 + number, 1)
    checkpoint.save(state, checkpoint_id=f"{folder}/3")
    for future in futures:
        assert future.result(60) is None
    assert sorted(os.listdir(folder)) == ["1", "2", "3"]
    for number, steps in ((1, 3), (2, 4)):
        mine, fresh = trained("fsdp", steps=steps), trained("fsdp", seed=3)
        checkpoint.load(state_of(*fresh), checkpoint_id=f"{folder}/{number}")
        assert train(*fresh, steps, 2) == train(*mine, steps, 2)


# spec: S5.content the step goes on when async_save has returned, and what is saved is what was
# there, S7 keep the last n
def test_asynchronous_saves_have_what_was_there(tmp_path):
    on_ranks(3, asynchronous, str(tmp_path))


def failures(rank, size, folder):
    good = {"t": torch.ones(3), "n": 1}
    with pytest.raises(dist.DistError, match="'odd'.*has no form as JSON|rank 1: .*'odd'"):
        checkpoint.save(
            {**good, "odd": object()} if rank == 1 else good, checkpoint_id=folder + "/c"
        )
    checkpoint.save(good, checkpoint_id=folder + "/c")
    with pytest.raises(dist.DistError, match="'lost'"):
        wanted = {"t": torch.ones(3), "lost": torch.ones(1)} if rank == 0 else {"t": torch.ones(3)}
        checkpoint.load(wanted, checkpoint_id=folder + "/c")
    with pytest.raises(dist.DistError, match=r"F32 \[3\]"):
        checkpoint.load({"t": torch.ones(4)}, checkpoint_id=folder + "/c")
    with pytest.raises(dist.DistError, match="no value 'm'"):
        checkpoint.load({"m": 1}, checkpoint_id=folder + "/c")
    with pytest.raises(dist.DistError, match="planner"):
        checkpoint.load(good, checkpoint_id=folder + "/c", planner=1)
    shard = Shard(torch.full((2,), float(rank)), (2 * size,), (2 * rank,))
    checkpoint.save({"s": shard}, checkpoint_id=folder + "/s")
    whole = {"s": torch.zeros(2 * size)}
    checkpoint.load(whole, checkpoint_id=folder + "/s")
    assert whole["s"].tolist() == [float(each // 2) for each in range(2 * size)]
    with pytest.raises(dist.DistError, match="'s'.*overlap|'s'.*elements"):
        checkpoint.save(
            {"s": Shard(torch.ones(2), (2 * size,), (rank,))}, checkpoint_id=folder + "/bad"
        )
    assert not os.path.exists(folder + "/bad")


# spec: S4 what one rank cannot do fails on all, by name, and the ranks go on together
def test_failures_are_everybodys(tmp_path):
    on_ranks(3, failures, str(tmp_path))


def written_by_fsdp(rank, size, path):
    model, optimizer, scheduler = trained("fsdp", steps=2)
    checkpoint.save(state_of(model, optimizer, scheduler), checkpoint_id=path)


# spec: S3.reader torch's HuggingFaceStorageReader reads ours, also what FSDP has cut in the middle
# of rows
def test_stock_torch_reads_ours(tmp_path):
    pytest.importorskip("safetensors")
    path = str(tmp_path / "c")
    on_ranks(4, written_by_fsdp, path)
    expected = whole_tensors(path)
    found = {name: torch.zeros_like(each) for name, each in expected.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)
    assert_same(found, expected, 0)


def written_by_torch(rank, size, path):
    from torch.distributed.tensor import Shard as Rows
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).view(7, 5)
    state = {"w": distribute_tensor(whole, mesh, [Rows(0)]), "step": torch.tensor(9)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True))
    theirs.barrier()
    for columns in (0, 1):  # of stock DTensors, under stock torch's group
        mine = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Rows(columns)])}
        checkpoint.load(mine, storage_reader=HuggingFaceStorageReader(path))
        assert torch.equal(mine["w"].full_tensor(), whole)
        checkpoint.save(mine, checkpoint_id=path + "-ours")
        checkpoint.async_save(mine, checkpoint_id=path + "-ours").result(60)
        again = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Rows(0)])}
        checkpoint.load(again, checkpoint_id=path + "-ours")
        assert torch.equal(again["w"].full_tensor(), whole)
        again = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Rows(1 - columns)])}
        dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(path + "-ours"))
        assert torch.equal(again["w"].full_tensor(), whole)
    dcp.save(state, checkpoint_id=path + "-distcp")
    again = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Rows(1)]), "step": torch.tensor(0)}
    dcp.load(again, checkpoint_id=path + "-distcp")
    assert torch.equal(again["w"].full_tensor(), whole) and again["step"] == 9


def stock_rank(rank, size, backend, name, path):
    theirs.init_process_group(
        backend, store=theirs.FileStore(name, size), rank=rank, world_size=size
    )
    written_by_torch(rank, size, path)
    theirs.destroy_process_group()


# spec: S3.writer we read what torch's HuggingFaceStorageWriter wrote, and its reader what we wrote,
# S1 DTensors, and `.distcp` folders by a convert; on Gloo and on torch's backend muster
@pytest.mark.parametrize("backend", ["gloo", "muster"])
def test_ours_reads_stock_torchs(tmp_path, backend):
    pytest.importorskip("safetensors")
    from ranks import run_ranks

    path, name = str(tmp_path / "hf"), meeting_file()
    run_ranks(2, lambda rank: stock_rank(rank, 2, backend, name, path))
    found = {"w": torch.zeros(7, 5), "step": torch.tensor(0)}
    checkpoint.load(found, storage_reader=HuggingFaceStorageReader(path))
    assert torch.equal(found["w"], torch.arange(35.0).view(7, 5)) and found["step"] == 9
    with pytest.raises(dist.DistError, match="pickle.*trust"):
        checkpoint.from_torch_dcp(path + "-distcp", path + "-converted")
    checkpoint.from_torch_dcp(path + "-distcp", path + "-converted", trust=True)
    found = {"w": torch.zeros(7, 5), "step": torch.tensor(0)}
    checkpoint.load(found, checkpoint_id=path + "-converted")
    assert torch.equal(found["w"], torch.arange(35.0).view(7, 5)) and found["step"] == 9


# spec: S7 convert to and from torch.save's files, S3 the export has the module's names and loads as
# safetensors
def test_conversions(tmp_path):
    path, file = str(tmp_path / "c"), str(tmp_path / "c.pt")
    model, optimizer, scheduler = trained("plain", steps=2)
    checkpoint.save(state_of(model, optimizer, scheduler), checkpoint_id=path)
    checkpoint.to_torch_save(path, file)
    checkpoint.from_torch_save(file, path + "-again")
    assert_same(whole_tensors(path + "-again"), whole_tensors(path), 0)
    fresh = trained("plain", seed=4)
    checkpoint.load(state_of(*fresh), checkpoint_id=path + "-again")
    assert train(*fresh, 2, 2) == train(model, optimizer, scheduler, 2, 2)
    checkpoint.export_safetensors(path, str(tmp_path / "out"), file_bytes=5000)
    weights = json.load(open(tmp_path / "out/model.safetensors.index.json"))["weight_map"]
    assert len(set(weights.values())) > 1
    safetensors = pytest.importorskip("safetensors.torch")
    loaded = {}
    for name in set(weights.values()):
        loaded |= safetensors.load_file(tmp_path / "out" / name)
    other = Net(seed=9)
    other.load_state_dict(loaded)
    exported = {"model": Net(seed=10)}
    checkpoint.load(exported, checkpoint_id=path)
    assert_same(other.state_dict(), exported["model"].state_dict(), 0)


def saved_by_rank_zero(rank, size, folder):
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="all ranks of the group must call save"):
            checkpoint.save({"t": torch.ones(3)}, checkpoint_id=folder + "/c")
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0 called"):
            dist.barrier()


# spec: S4 a save of some ranks only is told what is wrong
def test_a_save_of_one_rank(tmp_path):
    on_ranks(2, saved_by_rank_zero, str(tmp_path))


def one_saver(rank, size):
    def saver_of(group):
        return checkpoint.saving._saver(checkpoint.ranks.Members(group))

    first, other = saver_of(None), dist.new_group([0, 1])
    assert saver_of(dist.group.WORLD) is first
    assert saver_of(other) is saver_of(other) is not first


# spec: S5 what writes in the background lives as long as the group, whose object in Python ends
# with the call
def test_a_group_has_one_saver():
    on_ranks(2, one_saver)


def unheard(rank, size, folder):
    state = {"t": torch.ones(1000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        state = {"u": torch.ones(1000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    future = checkpoint.async_save(state, checkpoint_id=f"{folder}/lost")
    concurrent.futures.wait([future])
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if rank == 0:
        assert isinstance(future.exception(), dist.DistError)
    with pytest.raises(dist.DistError, match="the save before this one"):
        checkpoint.save(state, checkpoint_id=f"{folder}/c")
    checkpoint.save(state, checkpoint_id=f"{folder}/c")
    assert sorted(whole_tensors(f"{folder}/c")) == ["t", "u"]


# spec: S4 a failure that one rank has not asked for is thrown on all by the next save
def test_the_failure_of_an_asynchronous_save_is_heard(tmp_path):
    on_ranks(2, unheard, str(tmp_path))


def wrong_on_one(rank, size, folder):
    for number in range(2):
        checkpoint.save({"t": torch.full((4,), float(number))}, checkpoint_id=f"{folder}/{number}")
    loaded = {"t": torch.zeros(4)}
    with pytest.raises(dist.DistError, match="different checkpoints.*/0 saved.*rank 1 .*/1 saved"):
        checkpoint.load(loaded, checkpoint_id=f"{folder}/{rank}")
    assert loaded["t"].tolist() == [0, 0, 0, 0]
    for size_of, offsets in (((4,), (0, 0)), ("four", (0,)), ((4,), None)):
        shard = Shard(torch.ones(4), size_of, offsets) if rank == 1 else torch.ones(4)
        for call in (checkpoint.save, checkpoint.async_save, checkpoint.load):
            with pytest.raises(Exception, match="'t'|not iterable"):
                call({"t": shard}, checkpoint_id=f"{folder}/0")
    checkpoint.load(loaded, checkpoint_id=f"{folder}/0")


# spec: S4 what the ranks would load differs, or one of them has it wrong: refused on all
def test_what_one_rank_has_wrong_is_refused_on_all(tmp_path):
    on_ranks(2, wrong_on_one, str(tmp_path))


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    path = str(tmp_path / "c")
    model, optimizer, _ = trained("plain", steps=1)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    with pytest.raises(dist.DistError, match="go by number"):
        checkpoint.load({"optimizer": optimizer}, checkpoint_id=path)
    fewer = torch.optim.Adam(model.blocks.parameters(), lr=0.01)
    with pytest.raises(dist.DistError, match="'scale'"):
        checkpoint.load({"model": model, "optimizer": fewer}, checkpoint_id=path)
    checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def dictionaries_of_shards(rank, size, path):
    model, optimizer, _ = trained("fsdp", steps=1)
    with pytest.raises(dist.DistError, match="give the optimizer itself"):
        checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
    assert model.state_dict()["scale"].shape == (1,)
    FSDP.set_state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(dist.DistError, match="give the module itself"):
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)
    # DTensors know their place.
    model, optimizer, _ = trained("fully_shard", steps=1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(state, checkpoint_id=path + "s")
    expected = {name: each.full_tensor().clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    checkpoint.load({"model": model.state_dict()}, checkpoint_id=path + "s")
    for name, each in model.named_parameters():
        assert torch.equal(each.full_tensor(), expected[name])
    plain, optimizer, _ = trained("plain", steps=1)
    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(state, checkpoint_id=path)
    del model


def test_dictionaries_of_shards_are_refused(tmp_path):
    on_ranks(2, dictionaries_of_shards, str(tmp_path / "c"))


def test_flat_parameters_of_stock_torch_are_refused(tmp_path):
    theirs.init_process_group("gloo", store=theirs.HashStore(), rank=0, world_size=1)
    try:
        model = theirs.fsdp.FullyShardedDataParallel(Block(4), device_id=torch.device("cpu"))
        with pytest.raises(dist.DistError, match="_flat_param.*fully_shard"):
            checkpoint.save({"model": model}, checkpoint_id=tmp_path / "c", no_dist=True)
    finally:
        theirs.destroy_process_group()


def test_numbers_of_any_length_and_names_of_two_values(tmp_path):
    path = tmp_path / "c"
    saved = {"n": [2**63, 2**64, -(2**63) - 1, 10**30, -(2**63)]}
    checkpoint.save(saved, checkpoint_id=path)
    loaded = {"n": None}
    checkpoint.load(loaded, checkpoint_id=path)
    assert loaded == saved and all(type(each) is int for each in loaded["n"])
    for twice in (1, torch.ones(1)):
        with pytest.raises(dist.DistError, match=r"'a\.b' is there twice"):
            checkpoint.save({"a": {"b": twice}, "a.b": 2}, checkpoint_id=path)


# spec: S6 what a file says is no way to anything of torch's but its types
def test_a_dtype_that_is_none_is_refused():
    assert checkpoint.values.decode({"__muster__": "dtype", "of": "int8"}) is torch.int8
    for name in ("load", "ops", "nothing", 3):
        with pytest.raises(dist.DistError, match="no dtype"):
            checkpoint.values.decode({"__muster__": "dtype", "of": name})

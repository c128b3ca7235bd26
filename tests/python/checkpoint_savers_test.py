# SPDX-License-Identifier: BSD-3-Clause
"""Savers that meet at one path, clocks that differ, and names of other places: real processes that
stand still where a library loaded before theirs stops them.
"""

import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
from multiprocessing import forkserver

import pytest
import saver
import torch
from scratch import LIMIT_S

import muster as dist
from muster import checkpoint

# Stops a process right before the rename that commits, in its first fsync, before it makes its
# folder, or before it locks a file, until another file is there; and shifts the wall clock.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
static void wait_for(const char* gate) {
  char name[512];
  snprintf(name, sizeof name, "%s.waiting", gate);
  fclose(fopen(name, "w"));
  while (access(gate, F_OK) != 0) usleep(5000);
}
int renameat2(int a, const char* from, int b, const char* to, unsigned flags) {
  const char* gate = getenv("RENAME_GATE");
  if (gate && strstr(from, ".saving")) wait_for(gate);
  int (*real)(int, const char*, int, const char*, unsigned) = dlsym(RTLD_NEXT, "renameat2");
  return real(a, from, b, to, flags);
}
int fsync(int file) {
  static int count;
  const char* gate = getenv("FSYNC_GATE");
  if (gate && count++ == 0) wait_for(gate);
  int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
  return real(file);
}
int mkdir(const char* path, mode_t mode) {
  const char* gate = getenv("MKDIR_GATE");
  if (gate && strstr(path, ".saving")) wait_for(gate);
  int (*real)(const char*, mode_t) = dlsym(RTLD_NEXT, "mkdir");
  return real(path, mode);
}
int flock(int file, int operation) {
  static int count;
  const char* gate = getenv("LOCK_GATE");
  if (gate && (operation & LOCK_EX) && count++ == 0) wait_for(gate);
  int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
  return real(file, operation);
}
int clock_gettime(clockid_t id, struct timespec* time) {
  int (*real)(clockid_t, struct timespec*) = dlsym(RTLD_NEXT, "clock_gettime");
  const int result = real(id, time);
  const char* shift = getenv("CLOCK_SHIFT");
  if (result == 0 && id == CLOCK_REALTIME && shift) time->tv_sec += atoi(shift);
  return result;
}
"""

# Each saver is a fork of a process that has imported torch, under the library above.
server = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session", autouse=True)
def savers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = str(folder / "shim.so")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, str(folder / "shim.c"), "-ldl"], check=True
    )
    server.set_forkserver_preload(["torch", "saver"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", library)
        forkserver.ensure_running()


def start(value, path, *step, call="save", loads=None, **environment):
    answer, told = server.Pipe(duplex=False)
    arguments = (told, environment, value, path, step, call, loads)
    process = server.Process(target=saver.save, args=arguments, daemon=True)
    process.start()
    told.close()
    return process, answer


def said(started):
    process, answer = started
    assert answer.poll(LIMIT_S), "the saver does not end"
    text = answer.recv()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    return text


def until(path):
    limit = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < limit, f"{path} does not come"
        time.sleep(0.01)


def value_at(path):
    state = {"a": torch.zeros(4)}
    checkpoint.load(state, checkpoint_id=path, no_dist=True)
    assert len(set(state["a"].tolist())) == 1
    return state["a"][0].item()


# spec: S8 a saver that stood still right before its commit goes on while another one writes: it is
# told that it is refused, the checkpoint is whole at each moment, and the other one is saved; of
# `save` and of `async_save`
@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["save", "async"])
def test_a_saver_that_stood_still_is_refused(tmp_path, call):
    path, old_gate, new_gate = tmp_path / "run/c", tmp_path / "old", tmp_path / "new"
    assert said(start(1, path)) == "saved"
    old = start(2, path, call=call, RENAME_GATE=str(old_gate))
    until(tmp_path / "old.waiting")
    assert value_at(path) == 1
    new = start(3, path, FSYNC_GATE=str(new_gate))
    until(tmp_path / "new.waiting")
    assert value_at(path) == 1
    old_gate.touch()
    answer = said(old)
    assert answer.startswith("refused") and str(path) in answer and "another saver" in answer
    assert value_at(path) == 1
    new_gate.touch()
    assert said(new) == "saved"
    assert value_at(path) == 3
    assert os.listdir(tmp_path / "run") == ["c"]


# spec: S8 as above, where the other one has been committed meanwhile
def test_a_saver_that_wakes_up_after_the_commit_is_refused(tmp_path):
    path, gate = tmp_path / "run/c", tmp_path / "gate"
    assert said(start(1, path)) == "saved"
    old = start(2, path, RENAME_GATE=str(gate))
    until(tmp_path / "gate.waiting")
    assert said(start(3, path)) == "saved"
    gate.touch()
    assert "another saver" in said(old)
    assert value_at(path) == 3
    assert os.listdir(tmp_path / "run") == ["c"]


# spec: S8 an epoch older than the last commit's is refused by name; a job that is started anew has
# loaded what is there, and is not
def test_older_epochs_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "c"
    monkeypatch.setenv("MUSTER_EPOCH", "3")
    checkpoint.save({"a": torch.full((4,), 3.0)}, checkpoint_id=path)
    assert value_at(path) == 3
    monkeypatch.setenv("MUSTER_EPOCH", "2")
    for call in (
        lambda: checkpoint.save({"a": torch.zeros(4)}, checkpoint_id=path),
        lambda: checkpoint.async_save({"a": torch.zeros(4)}, checkpoint_id=path).result(),
    ):
        with pytest.raises(dist.DistError, match="epoch 2.*epoch 3 has saved"):
            call()
    assert value_at(path) == 3
    checkpoint.save({"a": torch.full((4,), 2.0)}, checkpoint_id=path)
    assert value_at(path) == 2


# spec: S8 a rank 0 of an older launch, of a higher epoch, stood still in its save: the requeued
# job, whose epochs count from 1 again, goes on from another checkpoint of the folder and is saved
@pytest.mark.parametrize("launches", [("one", "two"), ("", "")])
@pytest.mark.parametrize("job", ["j", "none"])
def test_a_requeued_job_goes_before_its_old_self(tmp_path, launches, job):
    path, gate = tmp_path / "run/last", tmp_path / "gate"
    epochs = [
        {"TORCHELASTIC_RUN_ID": job, "MUSTER_EPOCH": epoch}
        | ({"MUSTER_LAUNCH": launch} if launch else {})
        for epoch, launch in zip(("3", "1"), launches, strict=True)
    ]
    assert said(start(1, tmp_path / "run/step-1", **epochs[0])) == "saved"
    old = start(2, path, RENAME_GATE=str(gate), **epochs[0])
    until(tmp_path / "gate.waiting")
    for target in (path, tmp_path / "run/best/model", path):
        requeued = start(3, target, call="save", loads=tmp_path / "run/step-1", **epochs[1])
        assert said(requeued) == "saved"
    gate.touch()
    assert "another saver" in said(old)
    assert value_at(path) == 3


# spec: S8 a rank 0 of an older launch wakes up after the requeued job has saved and begins a new
# save: it is refused by name
def test_an_old_self_that_begins_anew_is_refused(tmp_path):
    path = tmp_path / "c"
    old = {"TORCHELASTIC_RUN_ID": "j", "MUSTER_LAUNCH": "one", "MUSTER_EPOCH": "3"}
    requeued = old | {"MUSTER_LAUNCH": "two", "MUSTER_EPOCH": "1"}
    assert said(start(1, path, **old)) == "saved"
    assert said(start(2, path, loads=path, **requeued)) == "saved"
    answer = said(start(3, path, **old))
    assert answer.startswith("refused") and "a later launch of job 'j'" in answer
    assert value_at(path) == 2
    assert said(start(4, path, **requeued)) == "saved"


# spec: S8 without a launcher: a process whose successor has saved is refused, until it has loaded
# what that saved
def test_who_loads_again_goes_on(tmp_path):
    path = tmp_path / "c"
    assert said(start(1, path)) == "saved"
    assert value_at(path) == 1
    checkpoint.save({"a": torch.full((4,), 2.0)}, checkpoint_id=path)
    assert said(start(3, path, loads=path)) == "saved"
    with pytest.raises(dist.DistError, match="a later launch has gone on"):
        checkpoint.save({"a": torch.zeros(4)}, checkpoint_id=path)
    assert value_at(path) == 3
    checkpoint.save({"a": torch.full((4,), 4.0)}, checkpoint_id=path)
    assert value_at(path) == 4


# spec: S8 a process that has loaded goes on as a job of its own in every folder, also in those that
# it has loaded nothing from
def test_what_is_loaded_counts_for_all_folders(tmp_path):
    for name in ("run/step-1", "run/best/model"):
        assert said(start(1, tmp_path / name, MUSTER_EPOCH="3")) == "saved"
    for name in ("run/step-1", "run/best/model"):
        loads = tmp_path / "run/step-1"
        assert said(start(2, tmp_path / name, MUSTER_EPOCH="1", loads=loads)) == "saved"


# spec: S8 a saver whose folder is there is not seen before it holds its lock: of two that begin at
# once one is saved
def test_one_of_two_that_begin_at_once_is_saved(tmp_path):
    path = tmp_path / "run/c"
    first_gate, later_gate, disk = (tmp_path / name for name in ("first", "later", "disk"))
    first = start(2, path, MKDIR_GATE=str(first_gate), FSYNC_GATE=str(disk))  # which has its number
    until(tmp_path / "first.waiting")
    (tmp_path / "run/other.7-0123456789abcdef.saving").mkdir(parents=True)
    later = start(3, path, LOCK_GATE=str(later_gate))
    until(tmp_path / "later.waiting")
    first_gate.touch()
    limit = time.monotonic() + LIMIT_S
    while first[0].is_alive() and not (tmp_path / "disk.waiting").exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
    later_gate.touch()
    assert said(later) == "saved"
    disk.touch()
    assert said(first).startswith("refused")
    assert value_at(path) == 3


# spec: S8 where a file system hides the locks of other hosts their savers seem to have ended: one
# that began later is not taken over
def test_a_later_saver_is_not_taken_over(tmp_path):
    path, gate = tmp_path / "run/c", tmp_path / "gate"
    early = start(2, path, MKDIR_GATE=str(gate))
    until(tmp_path / "gate.waiting")
    later = tmp_path / "run/c.9-0123456789abcdef.saving"
    later.mkdir(parents=True)
    (later / "saver.lock").write_text("{}")
    gate.touch()
    assert said(early) == "saved"
    assert later.exists()
    assert said(start(3, path)) == "saved"
    assert not later.exists()


# spec: S7 S11 the newest is that of the highest step, whatever the clocks of the hosts say, and
# keep_last removes older ones
def test_a_clock_that_is_behind_costs_nothing(tmp_path):
    for step, shift in ((100, 0), (200, -3600), (300, -7200)):
        path = tmp_path / f"step-{step}"
        assert said(start(step, path, step, 2, CLOCK_SHIFT=str(shift))) == "saved"
        assert checkpoint.latest(tmp_path) == str(path)
    assert sorted(os.listdir(tmp_path)) == ["step-200", "step-300"]


# spec: S11 keep_last removes only what muster wrote
def test_files_of_users_stay(tmp_path):
    def save(step, keep_last):
        writer = checkpoint.FileSystemWriter(
            tmp_path / f"step-{step}", step=step, keep_last=keep_last
        )
        checkpoint.save({"a": torch.zeros(4)}, storage_writer=writer)

    save(1, 0)
    (tmp_path / "step-1/notes.txt").write_text("text")
    (tmp_path / "step-1/plots").mkdir()
    for step in range(2, 5):
        save(step, 1)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-4"]
    assert sorted(os.listdir(tmp_path / "step-1")) == ["notes.txt", "plots"]


# spec: S11 names of other places: file:// and ~ are folders of this machine, other schemes are
# refused by name and make no folder
def test_names_of_other_places(tmp_path, monkeypatch):
    from muster.checkpoint import format_utils

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    state = {"a": torch.ones(4)}
    for name, place in (
        (f"file://{tmp_path}/f/c", tmp_path / "f/c"),
        ("~/run/c", tmp_path / "home/run/c"),
        ("file://~/file/c", tmp_path / "home/file/c"),
        (f"file:{tmp_path}/one/c", tmp_path / "one/c"),
    ):
        checkpoint.save(state, checkpoint_id=name)
        assert (place / "muster.json").is_file()
        assert value_at(name) == 1
        assert checkpoint.latest(name.rpartition("/")[0]) == str(place)
        checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(name))
        loaded = {"a": torch.zeros(4)}
        reader = checkpoint.HuggingFaceStorageReader(name)
        checkpoint.load(loaded, storage_reader=reader)
        assert loaded["a"].tolist() == [1, 1, 1, 1]
        checkpoint.to_torch_save(name, f"{name}.pt")
        assert place.with_name("c.pt").is_file()
        checkpoint.from_torch_save(f"{name}.pt", f"{name}-again")
        format_utils.dcp_to_torch_save(name, f"{name}.pt")
        format_utils.torch_save_to_dcp(f"{name}.pt", f"{name}-again")
        assert value_at(place.with_name("c-again")) == 1
    before = sorted(os.listdir(tmp_path))
    for name in ("s3://bucket/c", "gs://bucket/c", "hf://models/c", "memory://c"):
        scheme = name.partition(":")[0]
        for call in (
            lambda name=name: checkpoint.save(state, checkpoint_id=name),
            lambda name=name: checkpoint.async_save(state, checkpoint_id=name),
            lambda name=name: checkpoint.load(state, checkpoint_id=name),
            lambda name=name: checkpoint.latest(name),
            lambda name=name: checkpoint.export_safetensors("~/run/c", name, prefix=""),
            lambda name=name: checkpoint.export_safetensors(name, "out", prefix=""),
            lambda name=name: checkpoint.from_torch_save(name, "out"),
            lambda name=name: checkpoint.from_torch_save("home/run/c.pt", name),
            lambda name=name: checkpoint.from_torch_dcp(name, "out", trust=True),
            lambda name=name: checkpoint.convert.from_safetensors(name, "out"),
            lambda name=name: checkpoint.convert.from_safetensors("home/run/c", name),
            lambda name=name: checkpoint.to_torch_save(name, "out"),
            lambda name=name: checkpoint.to_torch_save("~/run/c", name),
            lambda name=name: format_utils.dcp_to_torch_save("~/run/c", name),
            lambda name=name: format_utils.torch_save_to_dcp(name, "out"),
        ):
            with pytest.raises(dist.DistError, match=f"'{name}' is a name of {scheme}"):
                call()
    with pytest.raises(dist.DistError, match="names the host 'tmp': file:///folder"):
        checkpoint.save(state, checkpoint_id="file://tmp/c")
    assert sorted(os.listdir(tmp_path)) == before


# spec: S8 S11 one folder may be spelt in several ways: a save does not take its own for another's
def test_spellings_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(
        ("plain", "./dotted", "run//double", f"{tmp_path}//whole//c", "run/../up", "plain/")
    ):
        for value in (number, number + 0.5):
            state = {"a": torch.full((4,), value)}
            checkpoint.save(state, checkpoint_id=name)
            assert value_at(name) == value
            checkpoint.async_save(state, checkpoint_id=name).result()
            assert value_at(tmp_path / name) == value
    for step in (1, 2, 3):
        writer = checkpoint.FileSystemWriter(f"step-{step}", step=step, keep_last=2)
        checkpoint.save({"a": torch.zeros(4)}, storage_writer=writer)
    assert checkpoint.latest(".") == "./step-3"
    assert sorted(name for name in os.listdir() if name.startswith("step")) == ["step-2", "step-3"]
    with pytest.raises(dist.DistError, match="keep_last is -1"):
        checkpoint.save(
            {"a": torch.zeros(4)},
            storage_writer=checkpoint.FileSystemWriter("step-4", step=4, keep_last=-1),
        )


# spec: U1 torch's modules for checkpoints are there; what they name is torch's, muster's, or is
# refused by name
def test_modules_of_torch(tmp_path):
    from muster.checkpoint import (
        default_planner,
        filesystem,
        format_utils,
        metadata,
        planner,
        staging,
        stateful,
    )

    assert filesystem.FileSystemWriter is checkpoint.FileSystemWriter
    assert stateful.Stateful and metadata.Metadata and planner.SavePlan
    with pytest.raises(AttributeError, match="StagingOptions"):
        staging.StagingOptions  # noqa: B018
    with pytest.raises(AttributeError, match="SerializationFormat"):
        filesystem.SerializationFormat  # noqa: B018
    state = {"a": {"b": torch.ones(3), 5: [torch.zeros(2), {"c": 1}]}, "step": 3}
    with pytest.raises(dist.DistError, match="planner"):
        checkpoint.save(
            state, checkpoint_id=tmp_path / "c", planner=default_planner.DefaultSavePlanner()
        )
    checkpoint.save(state, checkpoint_id=tmp_path / "c")
    format_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(found["a"]["b"], torch.ones(3)) and found["step"] == 3
    assert torch.equal(found["a"][5][0], torch.zeros(2)) and found["a"][5][1] == {"c": 1}
    format_utils.torch_save_to_dcp(tmp_path / "c.pt", tmp_path / "again")
    checkpoint.load(state, checkpoint_id=tmp_path / "again")


# spec: S6 a folder of torch's, whose metadata is a pickle, is read only where it is trusted
def test_pickled_metadata_needs_trust(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path / "theirs", no_dist=True)

    class Loud:
        def __reduce__(self):
            return pathlib.Path.touch, (pathlib.Path(tmp_path / "loud"),)

    import pickle

    with pytest.raises(dist.DistError, match="--trust"):
        checkpoint.from_torch_dcp(tmp_path / "theirs", tmp_path / "c")
    command = [sys.executable, "-m", "muster.checkpoint"]
    names = [str(tmp_path / "theirs"), str(tmp_path / "c")]
    refused = subprocess.run([*command, *names], capture_output=True, text=True)
    assert refused.returncode != 0 and "--trust" in refused.stderr
    assert not (tmp_path / "c").exists()
    subprocess.run([*command, "--trust", *names], check=True)
    assert value_at(tmp_path / "c") == 1
    (tmp_path / "theirs/.metadata").write_bytes(pickle.dumps(Loud()))
    with pytest.raises(dist.DistError, match="--trust"):
        checkpoint.from_torch_dcp(tmp_path / "theirs", tmp_path / "d")
    assert not (tmp_path / "loud").exists()


def test_a_file_that_claims_more_than_memory_is_refused(tmp_path):
    import json

    header = {"a": {"dtype": "U8", "shape": [1 << 42], "data_offsets": [0, 1 << 42]}}
    text = json.dumps(header).encode()
    (tmp_path / "claims").mkdir()
    with open(tmp_path / "claims/a.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + (1 << 42))
        except OSError:
            pytest.skip("this file system has no files of that size")
    with pytest.raises(dist.DistError, match="has room for"):
        checkpoint.convert.from_safetensors(tmp_path / "claims", tmp_path / "c")

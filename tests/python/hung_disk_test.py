# SPDX-License-Identifier: BSD-3-Clause
"""A launcher whose disk hangs in the middle of a write: a library that is loaded before the C
library's keeps each write to one file waiting until another file is there.
"""

import os
import pathlib
import signal
import subprocess
import time

import pytest
from scratch import LIMIT_S

import muster

MUSTER = pathlib.Path(muster.__file__).parents[2] / "bin/muster"
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
ssize_t write(int file, const void* bytes, size_t count) {
  ssize_t (*real)(int, const void*, size_t) = dlsym(RTLD_NEXT, "write");
  const char* hung = getenv("HUNG_FILE");
  const char* gate = getenv("HUNG_GATE");
  char link[64], path[512] = "", note[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  if (hung && readlink(link, path, sizeof path - 1) > 0 && strstr(path, hung)) {
    snprintf(note, sizeof note, "%s.waiting", gate);
    fclose(fopen(note, "w"));
    while (access(gate, F_OK) != 0) usleep(5000);
  }
  return real(file, bytes, count);
}
"""

WORKER = """
unset LD_PRELOAD
trap 'echo ended >> ended; exit 0' TERM
echo hello; echo hello >&2
while :; do sleep 0.05; done
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = str(folder / "shim.so")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, str(folder / "shim.c"), "-ldl"], check=True
    )
    return library


def until(path):
    limit = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < limit, f"{path} does not come"
        time.sleep(0.01)


class Job:
    """`muster run` with one worker; writes to files of the name `hung` hang."""

    def __init__(self, folder, shim, hung, *options):
        self.gate = folder / "gate"
        self.err = folder / "err.txt"
        environment = dict(os.environ, LD_PRELOAD=shim, HUNG_FILE=hung, HUNG_GATE=str(self.gate))
        command = [str(MUSTER), "run", "--standalone", "--nproc-per-node", "1", *options]
        with open(folder / "out.txt", "wb") as out, open(self.err, "wb") as err:
            self.launcher = subprocess.Popen(
                [*command, "sh", "-c", WORKER], cwd=folder, env=environment, stdout=out, stderr=err
            )

    def __enter__(self):
        until(self.gate.with_name("gate.waiting"))
        return self

    def __exit__(self, *error):
        self.gate.touch()
        self.launcher.kill()
        self.launcher.wait()


# spec: J3.logs a log file whose disk hangs holds up neither signals nor the end of a job: the
# launcher says what the file did not take
def test_a_log_file_that_hangs_holds_no_signal_up(tmp_path, shim):
    logs = tmp_path / "logs"
    with Job(tmp_path, shim, "stdout.log", "--log-dir", str(logs), "--tee", "1") as job:
        job.launcher.send_signal(signal.SIGTERM)
        until(tmp_path / "ended")
        job.launcher.wait(LIMIT_S)
        text = job.err.read_text()
        assert "6 bytes of the workers' output were not written to " + str(logs) in text
        assert "stdout.log, which takes no more" in text


# spec: J3 nor do standard output and standard error that are files on such a disk
@pytest.mark.parametrize("hung", ["out.txt", "err.txt"])
def test_a_console_that_hangs_holds_no_signal_up(tmp_path, shim, hung):
    with Job(tmp_path, shim, hung) as job:
        job.launcher.send_signal(signal.SIGTERM)
        until(tmp_path / "ended")
        job.gate.touch()
        job.launcher.wait(LIMIT_S)
    assert "hello" in (tmp_path / hung).read_text()

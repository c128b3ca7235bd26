# SPDX-License-Identifier: BSD-3-Clause
"""A Slurm of three nodes on this host for tests: Debian's slurmctld, three slurmd and munge."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import pytest
from scratch import LIMIT_S, reserve_port

NODES = ("n1", "n2", "n3")
NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "munged", "unshare")


def _path():
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


class Slurm:
    """Commands of a running cluster."""

    def __init__(self, folder):
        self.folder = folder
        self.hosts = folder / "hosts"
        self.environment = {
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "HOME": str(folder),
        }
        for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "LANG"):
            if name in os.environ:
                self.environment[name] = os.environ[name]

    def words(self, *command):
        """As a user of the cluster would call it, where the nodes have their names."""
        inside = f'mount --bind {self.hosts} /etc/hosts && exec "$@"'
        return ["unshare", "-m", "sh", "-c", inside, "sh", *map(str, command)]

    def start(self, *command, **variables):
        return subprocess.Popen(
            self.words(*command),
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def run(self, *command, limit=LIMIT_S, **variables):
        """Output and exit status."""
        process = self.start(*command, **variables)
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            pytest.fail(f"{command} did not end in {limit} s:\n{out}\n{self.logs()}")
        return out, process.returncode

    def logs(self):
        return "\n".join(
            f"== {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-15:])
            for file in sorted(self.folder.glob("*.log"))
        )


def _write_configuration(folder, host):
    ports = {node: reserve_port() for node in NODES}
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for node, port in ports.items()
    )
    (folder / "slurm.conf").write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={reserve_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=p Nodes=ALL Default=YES State=UP MaxTime=INFINITE OverSubscribe=FORCE:8
""")
    (folder / "hosts").write_text(
        pathlib.Path("/etc/hosts").read_text() + "\n127.0.0.1 " + " ".join(NODES) + "\n"
    )


@contextlib.contextmanager
def slurm_cluster():
    """Skips the test where it cannot be: Slurm is not installed, or this is not root."""
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; MUSTER_SERVICES=ON tools/setup as root")
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm of its own")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="muster-slurm-"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    _write_configuration(folder, socket.gethostname().split(".")[0])
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    slurm = Slurm(folder)
    services = []

    def serve(name, *command):
        log = open(folder / f"{name}.out.log", "wb")
        services.append(
            subprocess.Popen(
                slurm.words(*command), env=slurm.environment, stdout=log, stderr=log, cwd=folder
            )
        )

    try:
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        serve(
            "munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files
        )
        limit = time.monotonic() + LIMIT_S
        while not (folder / "munge.socket").exists() and time.monotonic() < limit:
            time.sleep(0.05)
        serve("slurmctld", "slurmctld", "-D")
        for node in NODES:
            serve(node, "slurmd", "-D", "-N", node)
        while slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D")[0].strip() != str(len(NODES)):
            if time.monotonic() > limit:
                pytest.fail("Slurm did not start:\n" + slurm.logs())
            time.sleep(0.2)
        yield slurm
    finally:
        for service in reversed(services):
            service.send_signal(signal.SIGTERM)
        for service in services:
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(2)
            service.kill()
            service.wait()
        shutil.rmtree(folder, ignore_errors=True)

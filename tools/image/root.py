# SPDX-License-Identifier: BSD-3-Clause
"""A root of Debian in a folder, and processes that see nothing else, as in a container.

A process gets its own mounts and numbers of processes, a /dev with a /dev/shm of 64 MiB, and the
machine's network. One that is not root has no capability and can gain none. No mount outlives the
process, nor does any process that it has started. Needs root, debootstrap and util-linux.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess

SHARED_MEMORY = "64m"  # what container engines give
MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"
SOURCES = f"""\
deb {MIRROR} {SUITE} main
deb {MIRROR} {SUITE}-updates main
deb {MIRROR}-security {SUITE}-security main
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "cmake", "ninja", "make")
# With ROOT, PLACE and so on: what the process has before it is confined. `exec` keeps its number,
# so that the command is process 1.
PREPARE = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t tmpfs -o mode=755,size=1m tmpfs "$root/dev"
for name in null zero full random urandom tty; do
  touch "$root/dev/$name"
  mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
for each in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${each%:*}" "$root/dev/${each#*:}"; done
mkdir "$root/dev/shm" "$root/dev/host"
mount -t tmpfs -o "mode=1777,size=$1,nosuid,nodev" shm "$root/dev/shm"; shift
mount --bind "$1" "$root/etc/resolv.conf"; shift
printf "%s" "$1" > "$root/dev/host/.hosts"; shift
mount --bind "$root/dev/host/.hosts" "$root/etc/hosts"
hostname "$1"; shift
if [ "$1" = read-only ]; then
  mount -o remount,bind,ro "$root"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
fi
shift
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir "$root/dev/host/$2"; else touch "$root/dev/host/$2"; fi
  mount --bind "$1" "$root/dev/host/$2"
  shift 2
done
shift
exec chroot "$root" "$@"
"""


@dataclasses.dataclass(frozen=True)
class Process:
    """How a command is started; the defaults are an engine's."""

    user: str = "0"  # a name or a number, and a group after a colon
    folder: str = "/"
    variables: dict = dataclasses.field(default_factory=dict)
    shared_memory: str = SHARED_MEMORY
    hostname: str = "container"
    hosts: str = ""  # the text of /etc/hosts; engines write one that knows the hostname
    read_only: bool = False  # but for /tmp, which is in memory
    binds: dict = dataclasses.field(default_factory=dict)  # {a path of the machine: its name}


def missing(*programs):
    """What stands in the way of roots on this machine, or ""; `programs` are needed beside those
    that confine processes.
    """
    if os.geteuid() != 0:
        return "needs root, to confine processes to a root of their own"
    for program in ("unshare", "chroot", "setpriv", *programs):
        if shutil.which(program) is None:
            return f"needs {program}, which MUSTER_SERVICES=ON tools/setup brings"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
    )
    return f"this machine lets nobody mount: {tried.stderr.strip()}" if tried.returncode else ""


def pip_settings():
    """The variables of pip and ccache that this process has, and what to bind for those that are
    paths: an engine's user gives them as build arguments.
    """
    variables, binds = {}, {}
    for name, value in os.environ.items():
        if name.startswith(("PIP_", "CCACHE_")):
            if value.startswith("/"):
                if not os.path.exists(value):
                    continue
                binds[value] = name.lower()
                value = f"/dev/host/{name.lower()}"
            variables[name] = value
    return variables, binds


class Root:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    @classmethod
    def debian(cls, folder, packages=()):
        """Debian 12 with as little as its image `debian:12-slim` has."""
        include = [f"--include={','.join(packages)}"] if packages else []
        # It mounts below `folder`, and may be killed.
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        make = ["debootstrap", "--variant=minbase", *include, SUITE, str(folder), MIRROR]
        words = [*apart, *make]
        made = subprocess.run(words, capture_output=True, text=True)
        if made.returncode != 0:
            raise RuntimeError(f"debootstrap: {(made.stdout + made.stderr)[-2000:]}")
        root = cls(folder)
        (root.folder / "etc/apt/sources.list").write_text(SOURCES)
        for package in (root.folder / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        root.keep_mount_points()
        return root

    def copy(self, folder):
        subprocess.run(["cp", "-a", "--reflink=auto", self.folder, folder], check=True)
        return Root(folder)

    def keep_mount_points(self):
        for name in ("dev", "proc", "sys", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        for name in ("hosts", "resolv.conf"):
            path = self.folder / "etc" / name
            if path.is_symlink():
                path.unlink()
            path.touch()

    def path(self, name):
        """A path of the root as the machine sees it. Links are not followed."""
        return self.folder / str(name).lstrip("/")

    def entry(self, user):
        """(uid, gid, home) of a name or a number, by the root's own /etc/passwd."""
        name, _, group = user.partition(":")
        rows = [line.split(":") for line in self.path("etc/passwd").read_text().splitlines()]
        for row in rows:
            if name in (row[0], row[2]):
                return int(row[2]), int(group or row[3]), row[5]
        if not name.isdigit():
            raise RuntimeError(f"no user {name} in /etc/passwd of the image")
        return int(name), int(group or 0), "/"

    def words(self, command, process):
        """The machine's command that runs `command` in the root."""
        uid, gid, _ = self.entry(process.user)
        inside = ["/usr/bin/env", f"--chdir={process.folder}"]
        if uid != 0:
            # Another user clears what --kill-child has set.
            confined = [
                "--clear-groups",
                "--bounding-set=-all",
                "--no-new-privs",
                "--pdeathsig=KILL",
            ]
            inside = ["setpriv", f"--reuid={uid}", f"--regid={gid}", *confined, *inside]
        binds = [word for pair in process.binds.items() for word in map(str, pair)]
        return [
            *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
            *("sh", "-c", PREPARE, "sh", str(self.folder), process.shared_memory),
            "/etc/resolv.conf",
            process.hosts or f"127.0.0.1 localhost\n127.0.0.1 {process.hostname}\n",
            process.hostname,
            "read-only" if process.read_only else "writable",
            *(*binds, "--", *inside, *command),
        ]

    def start(self, command, process, **options):
        variables = {"PATH": PATH, "HOME": self.entry(process.user)[2]}
        variables |= {"HOSTNAME": process.hostname} | process.variables
        return subprocess.Popen(
            self.words([str(word) for word in command], process),
            env=variables,
            stdin=subprocess.DEVNULL,
            **options,
        )

    def run(self, command, process, timeout):
        """(status, what it printed)."""
        running = self.start(
            command, process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            said, _ = running.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            running.kill()  # unshare, and with it every process in the root
            said, _ = running.communicate()
            return 124, f"{said}\nno end after {timeout} s"
        return running.returncode, said

    def compilers(self):
        """The programs in it that an image without a compiler does not have."""
        folders = [self.path(folder) for folder in PATH.split(":")]
        return sorted({name for name in COMPILERS for at in folders if os.path.lexists(at / name)})

    def megabytes(self):
        said = subprocess.check_output(["du", "--summarize", "--block-size=1000000", self.folder])
        return int(said.split()[0])

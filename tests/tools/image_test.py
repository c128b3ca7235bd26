# SPDX-License-Identifier: BSD-3-Clause
"""The Dockerfile, the example for Kubernetes that uses its image, and tools/image, which takes the
Dockerfile's steps without an engine: here in a root that has this machine's /usr and no more.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools/wheel")]
# MUSTER_CHECKS=ON tools/setup puts PyYAML there.
sys.path += map(str, ROOT.glob(".cache/checks/lib/python3.*/site-packages"))

import matrix  # noqa: E402
from image import builder, dockerfile, pods, root  # noqa: E402

try:
    import yaml
except ImportError:
    yaml = None
READS_YAML = unittest.skipUnless(yaml, "needs PyYAML, which MUSTER_CHECKS=ON tools/setup brings")

STAGES = dockerfile.read((ROOT / "Dockerfile").read_text(encoding="utf-8"))
IGNORED = dockerfile.Ignored((ROOT / ".dockerignore").read_text(encoding="utf-8"))
# Debian's packages that bring one, by the names that they have or begin with.
WITH_COMPILER = re.compile(
    r"(?<![\w-])(build-essential|gcc|g\+\+|clang|llvm|cmake|ninja-build|make)(?!\w)|-dev\b"
)


def tracked():
    said = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    return [name for name in said.stdout.split("\0") if name]


class TheDockerfile(unittest.TestCase):
    # spec: V2.dockerfile the first stage builds the wheel, the second has it and no compiler
    def test_stages(self):
        first, second = STAGES
        self.assertTrue(any("tools/wheel/build" in step.text for step in first.all("RUN")))
        (wheel,) = [step for step in second.all("COPY") if step.flags.get("from") == first.name]
        self.assertTrue(wheel.text.startswith("/muster/dist/*.whl "), wheel.text)
        for step in second.all("RUN"):
            self.assertIsNone(WITH_COMPILER.search(step.text), step.text)
        for stage in STAGES:
            self.assertIn(stage.base, builder.DEBIAN)
            if any("apt-get install" in step.text for step in stage.all("RUN")):
                self.assertIn("--no-install-recommends", stage.all("RUN")[0].text)

    # spec: V2.dockerfile each file that it copies exists, and .dockerignore lets it through
    def test_copied_files_exist(self):
        copied = [s for stage in STAGES for s in stage.all("COPY") if "from" not in s.flags]
        self.assertEqual(len(copied), 4)
        for step in copied:
            for pattern in step.text.split()[:-1]:
                self.assertTrue(builder.sources(ROOT, pattern, IGNORED), pattern)

    # spec: V2.dockerfile the context has all that git keeps and nothing that it ignores
    def test_context(self):
        names = tracked()
        self.assertEqual([name for name in names if name in IGNORED], [])
        for name in (
            ".git/config",
            ".venv/bin/python",
            ".cache/torch/x",
            "build/release/bin/muster",
        ):
            self.assertIn(name, IGNORED)
        git = (ROOT / ".gitignore").read_text().split()
        for pattern in git:
            self.assertIn(pattern.strip("/").replace("*.pyc", "src/a.pyc"), IGNORED)

    def test_requirement_that_a_step_looks_up(self):
        (lookup,) = re.findall(r"\$\((.*?)\)", STAGES[0].all("RUN")[0].text)
        said = subprocess.run(["sh", "-c", lookup], cwd=ROOT, capture_output=True, text=True)
        self.assertRegex(said.stdout, r"^scikit-build-core\S*\n$")

    # spec: V2.dockerfile what runs is the command, by a user who is not root, known by a number
    def test_user(self):
        last = STAGES[-1]
        self.assertRegex(last.last("USER").text, r"^[1-9]\d*:[1-9]\d*$")
        after = last.steps[last.steps.index(last.last("USER")) :]
        self.assertEqual([step.name for step in after], ["USER", "WORKDIR", "ENTRYPOINT", "CMD"])
        self.assertEqual(last.last("ENTRYPOINT").words, ["muster"])

    # spec: V2.dockerfile both stages take one torch, which the wheel is made for
    def test_torch(self):
        torch = [dict(step.pairs()).get("TORCH") for stage in STAGES for step in stage.all("ARG")]
        torch = [each for each in torch if each]
        self.assertEqual(len(torch), 2)
        self.assertEqual(torch[0], torch[1])
        self.assertIn(torch[0], [each.minor for each in matrix.read().torch])


class TheExample(unittest.TestCase):
    def setUp(self):
        text = (ROOT / "examples/kubernetes/digits.yaml").read_text(encoding="utf-8")
        self.service, self.job = yaml.safe_load_all(text)
        self.pod = self.job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]

    # spec: V2.dockerfile the example starts a program that the image has, by its entry point
    @READS_YAML
    def test_uses_the_image(self):
        self.assertNotIn("command", self.container)
        program = self.container["args"][-1]
        places = [step.text.split()[-1] for step in STAGES[-1].all("COPY")]
        self.assertIn(os.path.dirname(program) + "/", places)
        self.assertIn("run", self.container["args"][0])

    # spec: V2.dockerfile the pods are confined as the policy `restricted` asks, without /dev/shm
    @READS_YAML
    def test_is_confined(self):
        self.assertIs(self.pod["securityContext"]["runAsNonRoot"], True)
        self.assertEqual(
            self.container["securityContext"],
            {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        )
        self.assertEqual([mount["mountPath"] for mount in self.container["volumeMounts"]], ["/tmp"])

    # spec: V2.dockerfile the pods find each other by the service of the example
    @READS_YAML
    def test_service(self):
        self.assertEqual(self.service["spec"]["clusterIP"], "None")
        self.assertEqual(self.service["metadata"]["name"], self.pod["subdomain"])
        made = pods.pods(self.job, "secret")
        nodes = self.container["args"][self.container["args"].index("--nnodes") + 1]
        self.assertEqual(len(made), int(nodes))
        self.assertEqual(made[1].address, "digits-1.digits.default.svc.cluster.local")
        self.assertEqual(made[1].variables["MUSTER_SECRET"], "secret")


class Reader(unittest.TestCase):
    def test_lines_are_joined(self):
        text = '# x\nFROM a AS b\nRUN one \\\n# between\n && two\nCMD ["c d", "e"]\nFROM b\n'
        first, second = dockerfile.read(text)
        self.assertEqual((first.base, first.name, second.name), ("a", "b", "1"))
        self.assertEqual(first.steps[0].text.split(), ["one", "&&", "two"])
        self.assertEqual(first.last("CMD").words, ["c d", "e"])

    def test_what_is_unknown_is_refused(self):
        for step in (
            "HEALTHCHECK NONE",
            "RUN --mount=type=cache true",
            "RUN cat <<END",
            "USER",
            "COPY --link a b",
        ):
            with self.assertRaises(dockerfile.Fault, msg=step):
                dockerfile.read(f"FROM a\n{step}\n")
        for text in ("", "RUN a\n", "FROM a\nRUN b \\\n"):
            with self.assertRaises(dockerfile.Fault, msg=text):
                dockerfile.read(text)

    def test_variables(self):
        values = {"A": "one", "EMPTY": ""}
        for text, wanted in (
            ("$A-${A}", "one-one"),
            ("${B:-two}${A:-two}", "twoone"),
            ("${A:+three}${EMPTY:+three}", "three"),
            (r"\$A$B", "$A"),
        ):
            self.assertEqual(dockerfile.substitute(text, values), wanted)

    def test_ignored(self):
        ignored = dockerfile.Ignored("# c\nbuild\n**/*.pyc\ndocs/*.md\n!docs/a.md\n")
        for name in ("build", "build/a/b", "a.pyc", "a/b.pyc", "docs/b.md"):
            self.assertIn(name, ignored)
        for name in ("src/build", "builder", "docs/a.md", "docs/x/b.md", "a.pyc.txt"):
            self.assertNotIn(name, ignored)


MADE_UP = """
FROM debian:12 AS first
ARG WORD=given
ARG NONE
WORKDIR /made
RUN echo "$WORD${NONE:+never}" > word && id -u > user
FROM debian:12-slim
ENV WORD=image
COPY --from=first /made/* /taken/
COPY kept.txt folder /here/
RUN test "$WORD" = image && mkdir own && chmod 777 own
USER 1234:1235
WORKDIR own
ENTRYPOINT ["sh", "-c"]
CMD ["echo default"]
"""
ASK = (
    "id -u; id -g; pwd; echo $WORD $$; df --output=size -k /dev/shm; ls /dev/host;"
    " tail -1 /etc/hosts"
)


@unittest.skipIf(root.missing(), root.missing())
class Steps(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        self.work.chmod(0o755)
        self.binds = {"/usr": "usr"}
        self.context = self.work / "context"
        (self.context / "folder").mkdir(parents=True)
        for name in ("kept.txt", "folder/in.txt", "folder/left.tmp"):
            (self.context / name).write_text(name)
        (self.context / ".dockerignore").write_text("**/*.tmp\n")

    def base(self):
        """A root whose programs are this machine's."""
        base = root.Root(self.work / "base")
        (base.folder / "etc").mkdir(parents=True)
        (base.folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
        for name in ("bin", "sbin", "lib", "lib64"):
            (base.folder / name).symlink_to(f"usr/{name}")
        (base.folder / "usr").symlink_to("dev/host/usr")
        base.keep_mount_points()
        return base

    def build(self, text, **arguments):
        made = builder.Builder(
            *(self.context, self.work, self.base(), arguments, ({}, self.binds)),
            say=lambda text: None,
        )
        return made.build(dockerfile.read(text))

    def run_in(self, image, text, **given):
        process = image.process(binds=self.binds, **given)
        return image.root.run([*image.entrypoint, text], process, 60)

    # spec: V2.dockerfile RUN, COPY, ARG, ENV, USER, WORKDIR and ENTRYPOINT do what an engine does
    def test_steps(self):
        image = self.build(MADE_UP, WORD="chosen")
        read = lambda name: image.root.path(name).read_text().strip()  # noqa: E731
        self.assertEqual((read("taken/word"), read("taken/user")), ("chosen", "0"))
        here = sorted(path.name for path in image.root.path("here").iterdir())
        self.assertEqual(here, ["in.txt", "kept.txt"])
        self.assertEqual(image.command, ("echo default",))
        status, said = self.run_in(image, ASK, hostname="pod")
        expected = ["1234", "1235", "/own", "image", "1", "1K-blocks", "65536", "usr"]
        expected += ["127.0.0.1", "pod"]
        self.assertEqual((status, said.split()), (0, expected))

    # spec: V2.dockerfile a process has no capability, and writes to /tmp alone if that is asked
    def test_confinement(self):
        image = self.build(MADE_UP)
        said = self.run_in(image, "grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status")[1]
        self.assertEqual(
            said.split(), ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
        )
        self.assertEqual(self.run_in(image, "touch /own/a")[0], 0)
        self.assertNotEqual(self.run_in(image, "touch /here/a")[0], 0)
        status, said = self.run_in(image, "touch /tmp/a && ! touch /own/b", read_only=True)
        self.assertEqual(status, 0, said)
        self.assertFalse(image.root.path("tmp/a").exists())

    # spec: V2.dockerfile all that a process has started ends with it, and no mount stays
    def test_nothing_stays(self):
        image = self.build(MADE_UP)
        self.assertEqual(self.run_in(image, "sleep 4321 & echo up"), (0, "up\n"))
        command = [*image.entrypoint, "sleep 4321 & echo up; wait"]
        process = image.process(binds=self.binds)
        with image.root.start(command, process, stdout=subprocess.PIPE) as running:
            self.assertEqual(running.stdout.readline(), b"up\n")
            running.kill()
            self.assertEqual(running.stdout.read(), b"")  # ends once nobody has the pipe
        self.assertNotIn(str(self.work), pathlib.Path("/proc/mounts").read_text())

    def test_faults(self):
        for step in (
            "RUN false",
            "COPY nothing /",
            "COPY folder/left.tmp /",
            "USER nobody",
            "COPY --from=other /a /",
            "COPY ../a /",
        ):
            with self.assertRaises((dockerfile.Fault, RuntimeError), msg=step):
                self.build(f"FROM debian:12\n{step}\n")
            subprocess.run(["rm", "-rf", self.work / "base", self.work / "0"], check=True)
        with self.assertRaises(dockerfile.Fault):
            self.build("FROM alpine\n")

    def test_unknown_argument(self):
        with self.assertRaisesRegex(dockerfile.Fault, "no ARG WORT"):
            self.build(MADE_UP, WORT="a")


if __name__ == "__main__":
    unittest.main()

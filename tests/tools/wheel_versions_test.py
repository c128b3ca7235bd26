# SPDX-License-Identifier: BSD-3-Clause
"""tools/wheel: the table of versions, of this tree and of made-up ones; the layout of the wheel."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/wheel"))

import assemble  # noqa: E402
import libtorch  # noqa: E402
import matrix  # noqa: E402

THREE = """python = ["3.11"]
[[torch]]
built = "2.9.1"
tested."3.11" = "2026-01-02"
[[torch]]
built = "2.11.0"
[[torch]]
built = "2.10.0"
"""
PAGE = "A\n\n<!-- printed by tools/wheel/versions --write -->\n\n| old |\n\nB\n"


def written(text):
    file = tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False)
    with file:
        file.write(text)
    return pathlib.Path(file.name)


def read(text):
    file = written(text)
    try:
        return matrix.read(file)
    finally:
        file.unlink()


def versions(root, *options):
    command = [sys.executable, "-B", ROOT / "tools/wheel/versions", "--root", root, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


class Versions(unittest.TestCase):
    # spec: V3 the page has the table of torch and Python versions that the wheel is built from
    def test_this_tree(self):
        self.assertEqual(versions(ROOT, "--check"), (0, ""))

    # spec: V1 three minors of torch in a row, sorted by number and not as text
    def test_three_minors(self):
        table = read(THREE)
        self.assertEqual([each.minor for each in table.torch], ["2.9", "2.10", "2.11"])
        self.assertEqual(table.requirement, "torch>=2.9,<2.12")
        self.assertEqual(list(matrix.faults(table)), [])
        for other in (THREE.replace("2.10.0", "2.12.0"), THREE.rpartition("[[")[0]):
            self.assertIn("not three minors of torch in a row", "".join(matrix.faults(read(other))))

    # spec: V3 a day for a Python that no wheel is built for is refused
    def test_unknown_python(self):
        table = read(THREE.replace('python = ["3.11"]', 'python = ["3.12"]'))
        self.assertEqual(
            list(matrix.faults(table)),
            ["torch 2.9.1 is tested with Python 3.11, which is not listed"],
        )

    # spec: V3 another table in the page is refused, and --write mends it
    def test_page(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "tools/wheel").mkdir(parents=True)
            (root / "docs/user").mkdir(parents=True)
            (root / "tools/wheel/matrix.toml").write_text(THREE)
            page = root / "docs/user/compatibility.md"
            page.write_text(PAGE)
            status, said = versions(root, "--check")
            self.assertEqual(status, 1)
            self.assertIn("tools/wheel/versions --write writes it", said)
            self.assertEqual(versions(root, "--write"), (0, ""))
            self.assertEqual(versions(root, "--check"), (0, ""))
            self.assertIn(
                "| 2.9 | 2.9.1 | 2026-01-02 |\n| 2.10 | 2.10.0 | not yet |", page.read_text()
            )
            page.write_text("no place")
            self.assertIn("has no place for the table", versions(root, "--check")[1])


class Layout(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.folder.name)
        self.addCleanup(self.folder.cleanup)

    def installed(self, number):
        """What `cmake --install` leaves for one torch."""
        folder = self.root / f"installed-{number}"
        for name in ("muster/_C.cpython-311.so", "muster/_build.py", "scripts/muster_bench_worker"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"for {number}")
        for name in ("muster/__init__.py", "muster/libmuster_mpi_abi.so", "scripts/muster"):
            (folder / name).write_text("for all")
        return folder

    # spec: V1 one distribution with an extension for each torch, and one of what is free of torch
    def test_extensions(self):
        tree = self.root / "tree"
        for each in read(THREE).torch:
            assemble.add_extension(self.installed(each.built), tree, each)
        extensions = tree / "muster/_extensions"
        for folder, number in (("torch_2_9", "2.9.1"), ("torch_2_11", "2.11.0")):
            for name in ("_C.cpython-311.so", "_build.py", "muster_bench_worker"):
                self.assertEqual((extensions / folder / name).read_text(), f"for {number}")
        self.assertEqual((extensions / "bin/muster").read_text(), "for all")
        self.assertTrue((extensions / "muster/libmuster_mpi_abi.so").is_file())
        self.assertTrue((tree / "muster/__init__.py").is_file())
        # An extension or a _build beside the package would be taken instead of those that fit.
        beside = {path.name for path in (tree / "muster").iterdir() if path.is_file()}
        self.assertEqual(beside, {"__init__.py"})

    # spec: V1 the wheel asks for the range of its extensions, and names each licence that it has
    def test_metadata(self):
        made = self.root / "made/muster_dist-0.1.0.dist-info"
        (made / "licenses").mkdir(parents=True)
        (made / "licenses/LICENSE").write_text("own")
        head = "Name: muster-dist\nLicense-File: LICENSE\nRequires-Dist: torch==2.11.0"
        (made / "METADATA").write_text(f"{head}\n\nRequires-Dist: torch==2.11.0 says the page\n")
        tree = self.root / "tree"
        texts = lambda folder: (folder / "libfmt9.txt").write_text("MIT")  # noqa: E731
        assemble.add_metadata(tree, made, "torch>=2.9,<2.12", texts)
        told = (tree / made.name / "METADATA").read_text()
        self.assertEqual(
            told,
            "Name: muster-dist\nLicense-File: LICENSE\nRequires-Dist: torch>=2.9,<2.12\n"
            "License-File: libfmt9.txt\n\nRequires-Dist: torch==2.11.0 says the page\n",
        )

    # spec: V1 the wheel's command finds its program beside the package, though another muster comes
    # first on the path, and hands its Python on; without the program it says what to do
    def test_command(self):
        command = self.root / "bin/muster"
        assemble.place_shim("muster", command.parent)
        other, site = self.root / "other", self.root / "site"
        (other / "muster").mkdir(parents=True)
        (other / "muster/__init__.py").write_text("raise ImportError")
        environment = {"PYTHONPATH": f"{other}:{site}", "PATH": os.environ["PATH"]}
        run = lambda: subprocess.run(  # noqa: E731
            [sys.executable, command, "a", "b c"], capture_output=True, text=True, env=environment
        )
        self.assertIn("muster-dist is not where", run().stderr)
        program = site / "muster/_extensions/bin/muster"
        program.parent.mkdir(parents=True)
        program.write_text('#!/bin/sh\nprintf "%s|" "$MUSTER_PYTHON" "$@"\n')
        program.chmod(0o755)
        self.assertEqual(run().stdout, f"{sys.executable}|a|b c|")
        environment["MUSTER_PYTHON"] = "/usr/bin/other"
        self.assertEqual(run().stdout, "/usr/bin/other|a|b c|")

    # spec: V1 of a torch that is fetched to compile with, headers and the linked libraries are kept
    def test_what_is_kept_of_torch(self):
        kept = ("torch/include/ATen/ATen.h", "torch/lib/libc10.so", "torch/version.py")
        self.assertTrue(all(map(libtorch.is_needed, kept)))
        self.assertFalse(any(map(libtorch.is_needed, ("torch/lib/libtorch_cuda.so", "torch/a.py"))))
        (self.root / "version.py").write_text("__version__ = '2.15.0+cu132'\ndebug = False\n")
        self.assertEqual(libtorch.version_in(self.root), "2.15.0")
        self.assertEqual(libtorch.version_in(self.root / "none"), "")


if __name__ == "__main__":
    unittest.main()

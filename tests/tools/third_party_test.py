# SPDX-License-Identifier: BSD-3-Clause
"""tools/third_party, over this tree with another page, and over small trees made for each rule."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "tools"))

from licences import debian, tree  # noqa: E402
from licences.libraries import LIBRARIES  # noqa: E402
from licences.torch_wheel import TorchWheel  # noqa: E402


def has_torch():
    try:
        return bool(TorchWheel.find(ROOT))
    except debian.Missing:
        return False


ON_DEBIAN = unittest.skipUnless(shutil.which("dpkg-query"), "reads the packages of Debian")
WITH_TORCH = unittest.skipUnless(
    has_torch(), "reads the metadata of torch, which tools/setup brings"
)


def check(page):
    """The exit status of --check, and what it says, where THIRD_PARTY.md has this text."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in ("src", "include", "python", "cmake", "tools"):
            (root / name).symlink_to(ROOT / name)
        if page is not None:
            (root / "THIRD_PARTY.md").write_text(page, encoding="utf-8")
        command = [sys.executable, "-B", ROOT / "tools/third_party", "--check", "--root", root]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


def faults(**changes):
    """Those of a tree in which each library of the table is used as it says; `changes`: further
    text of its files.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        includes = "".join(f"#include <{each.includes}>\n" for each in LIBRARIES if each.includes)
        looks = "".join(f"find_package({each.cmake})\n" for each in LIBRARIES if each.cmake)
        packages = " ".join(each.package for each in LIBRARIES)
        for name, text in {
            "src/a.cc": includes + changes.get("source", ""),
            "cmake/a.cmake": looks + changes.get("cmake", ""),
            "tools/setup": f"packages=(g++ {packages}\n  {changes.get('package', '')})\n",
        }.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        return list(tree.faults(root))


class ThirdParty(unittest.TestCase):
    # spec: V11.licences the page is what the packages say; another one is refused
    @ON_DEBIAN
    @WITH_TORCH
    def test_check_is_red_where_the_page_differs(self):
        self.assertEqual(check(PAGE), (0, ""))
        for page in (PAGE.replace("| ISC |", "| MIT |"), None):
            self.assertNotEqual(page, PAGE)
            code, said = check(page)
            self.assertEqual(code, 1)
            self.assertIn("tools/third_party --write writes it", said)

    # spec: V11.licences a library that is linked and that the page does not have is a fault
    def test_refuses_a_library_without_a_row(self):
        self.assertEqual(faults(), [])
        for change, text, said in (
            ("source", "#include <snappy.h>\n", "src/a.cc includes <snappy.h...>"),
            ("source", "#include <boost/asio.hpp>\n", "src/a.cc includes <boost/...>"),
            ("cmake", "find_package(Boost REQUIRED)\n", "cmake/a.cmake looks for Boost"),
            ("cmake", "pkg_check_modules(numa numa)\n", "cmake/a.cmake looks for numa"),
            ("package", "libnuma-dev", "tools/setup installs libnuma-dev"),
        ):
            found = faults(**{change: text})
            self.assertEqual(len(found), 1, found)
            self.assertIn(said, found[0])
        self.assertEqual(faults(source="#include <sys/mman.h>\n#include <unistd.h>\n"), [])

    # spec: V11.licences a row of a library that nothing uses is a fault
    def test_refuses_a_row_of_what_is_not_linked(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "tools").mkdir()
            (root / "tools/setup").write_text("packages=(g++ libsodium-dev)\n")
            found = "\n".join(tree.faults(root))
        self.assertIn("tools/setup does not install libasio-dev", found)
        self.assertIn("nothing includes <sodium.h...>: libsodium has a row", found)

    # spec: V11.licences what wheels contain has its text on the page, and wheels carry the page
    def test_wheels_carry_the_texts(self):
        rows = re.findall(r"^\| (.+?) \| .* \| (.+?) \|$", PAGE.partition("\n## What")[0], re.M)
        shipped = [name for name, way in rows if way in ("compiled in", "of `make wheel`: a copy")]
        self.assertGreaterEqual(len(shipped), 11)
        texts = dict(re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```$", PAGE, re.M | re.S))
        self.assertEqual(sorted(texts), sorted(shipped))
        for name, text in texts.items():
            self.assertIn("Copyright", text.partition("\n\n")[0], name)
            self.assertGreater(len(text), 700, name)
            self.assertNotIn("/usr/share/common-licenses/BSD", text, name)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        self.assertEqual(project["license"], "BSD-3-Clause")
        self.assertEqual(project["license-files"], ["LICENSE", "THIRD_PARTY.md"])

    # spec: V11.licences the copyright files of what a repaired wheel contains are copied
    @ON_DEBIAN
    def test_copies_the_copyright_files(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-B", ROOT / "tools/third_party", "--texts", folder]
            subprocess.run(command, check=True, capture_output=True)
            names = {path.stem for path in pathlib.Path(folder).iterdir()}
        indirect = re.findall(r"^- `(\S+)`$", PAGE, re.M)
        self.assertIn("libgnutls30", indirect)
        self.assertLessEqual({*indirect, "libsodium23", "libcli11-dev", "LGPL-3"}, names)

    # spec: V11.licences a wheel without the licence of a library in it is refused, as is one with a
    # library that the page does not have
    @ON_DEBIAN
    def test_looks_into_wheels(self):
        whole = {
            "muster/_C.so",
            "muster_dist.libs/libsodium-0a1b2c3d.so.23.3.0",
            "muster_dist.libs/libldap-2-0a1b2c3d.5.so.0.1.8",
            *(
                f"muster_dist-0.1.0.dist-info/licenses/{name}"
                for name in ("LICENSE", "THIRD_PARTY.md", "libsodium23.txt", "libldap-2.5-0.txt")
            ),
        }
        sodium = "muster_dist-0.1.0.dist-info/licenses/libsodium23.txt"
        for names, said in (
            (whole, ""),
            (whole - {sodium}, "libsodium-0a1b2c3d.so.23.3.0 and not libsodium23.txt"),
            (whole | {"muster_dist.libs/libuv-0a1b2c3d.so.1"}, "libuv-0a1b2c3d.so.1, which is no"),
            ({name for name in whole if "_PARTY" not in name}, "has no THIRD_PARTY.md"),
        ):
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "muster_dist-0.1.0-py3-none-any.whl"
                with zipfile.ZipFile(path, "w") as archive:
                    for name in sorted(names):
                        archive.writestr(name, "")
                command = [sys.executable, "-B", ROOT / "tools/third_party", "--wheel", path]
                done = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(done.returncode, 1 if said else 0, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1 if said else 0, done.stderr)
            self.assertIn(said, done.stderr)

    def test_reads_machine_readable_copyright_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "some" / "copyright"
            path.parent.mkdir()
            path.write_text(
                "Format: x\n\nFiles: *\nCopyright: (c) 2001 A\n 2002 B\nLicense: Expat\n\n"
                "Files: debian/*\nCopyright: C\nLicense: GPL-2\n No.\n\n"
                "License: Expat\n Free\n  of\n .\n charge.\n"
            )
            before, debian.DOCUMENTS = debian.DOCUMENTS, pathlib.Path(folder)
            self.addCleanup(setattr, debian, "DOCUMENTS", before)
            found = debian.licence_of("some")
            self.assertEqual(found.name, "MIT")
            self.assertEqual(found.holders, "Copyright 2001 A\nCopyright 2002 B")
            self.assertEqual(found.text, "Free\n of\n\ncharge.")
            path.write_text("Do as you like.\n")
            with self.assertRaisesRegex(debian.Missing, "does not say the licence"):
                debian.licence_of("some")
            with self.assertRaisesRegex(debian.Missing, "tools/setup installs other on Debian"):
                debian.licence_of("other")


if __name__ == "__main__":
    unittest.main()

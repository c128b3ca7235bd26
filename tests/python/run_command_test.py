# SPDX-License-Identifier: BSD-3-Clause
"""The place from which `python -m muster.run` takes the program `muster`."""

import importlib.util
import os
import pathlib
import shutil
import sysconfig

import pytest

import muster.run


@pytest.fixture
def laid(tmp_path, monkeypatch):
    """A copy of muster/run.py in a tree of its own, with an executable where a build has it, and
    nothing in the other places.
    """
    package = tmp_path / "release" / "python" / "muster"
    folder = tmp_path / "release" / "bin"
    package.mkdir(parents=True)
    folder.mkdir()
    shutil.copy(pathlib.Path(muster.run.__file__).resolve(), package / "run.py")
    program = folder / "muster"
    program.write_text("#!/bin/sh\n")
    for path in (tmp_path, tmp_path / "release", folder, program):
        path.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    spec = importlib.util.spec_from_file_location("laid_run", package / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, program


# spec: W3 a launcher that another user could have laid beside the package is not run, and named
def test_a_launcher_that_others_can_have_laid_is_refused(laid):
    module, program = laid
    assert module.command() == str(program)
    for loose in (program, program.parent, program.parent.parent):
        loose.chmod(0o757)
        with pytest.raises(FileNotFoundError, match=str(program)):
            module.command()
        loose.chmod(0o755)
    assert module.command() == str(program)


# spec: W3 nor one that is another user's, or behind another user's link
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_another_users_launcher_is_refused(laid):
    module, program = laid
    os.chown(program, 12345, 12345)
    with pytest.raises(FileNotFoundError, match=str(program)):
        module.command()
    os.chown(program, 0, 0)
    moved = program.rename(program.parent / "moved")
    program.symlink_to(moved.name)
    assert module.command() == str(program)
    os.lchown(program, 12345, 12345)
    with pytest.raises(FileNotFoundError, match=str(program)):
        module.command()


# spec: W3 where the package itself is another user's or a group's, so may the launcher be; and what
# PATH names is the user's own choice
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_an_environment_of_others_is_used(laid, monkeypatch):
    module, program = laid
    os.chown(module.__file__, 12345, 12345)
    os.chown(program, 12345, 12345)
    assert module.command() == str(program)
    os.chown(module.__file__, 0, 0)
    with pytest.raises(FileNotFoundError, match=str(program)):
        module.command()
    monkeypatch.setenv("PATH", str(program.parent))
    assert module.command() == str(program)
    monkeypatch.setenv("PATH", "")
    os.chown(program, 0, 23456)
    program.chmod(0o775)
    with pytest.raises(FileNotFoundError, match=str(program)):
        module.command()
    tree = program.parent.parent
    os.chown(tree, 0, 23456)
    tree.chmod(0o2775)
    assert module.command() == str(program)

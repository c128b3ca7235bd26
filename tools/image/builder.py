# SPDX-License-Identifier: BSD-3-Clause
"""Takes the steps of a Dockerfile's stages: what `docker build` does, one root for each stage."""

import dataclasses
import os
import pathlib
import shutil
import time

from .dockerfile import Fault, Ignored, substitute
from .root import PATH, Process, Root

LIMIT_S = 3 * 3600  # of one step; only a fault makes it take so long
DEBIAN = ("debian:12", "debian:12-slim", "debian:bookworm", "debian:bookworm-slim")


@dataclasses.dataclass
class Image:
    root: Root
    user: str = "0"
    folder: str = "/"
    variables: dict = dataclasses.field(default_factory=lambda: {"PATH": PATH})
    entrypoint: tuple = ()
    command: tuple = ()

    def process(self, **given):
        """How the engine starts a process of the image; `given` as in Process."""
        given["variables"] = self.variables | given.get("variables", {})
        return Process(**{"user": self.user, "folder": self.folder} | given)


def sources(folder, pattern, ignored):
    """The paths that COPY's `pattern` means, relative to `folder`."""
    if ".." in pathlib.PurePath(pattern).parts:
        raise Fault(f"COPY from outside of the context: {pattern}")
    pattern = pattern.strip("/")
    if pattern in ("", "."):
        return [pathlib.Path()]
    found = (path.relative_to(folder) for path in sorted(pathlib.Path(folder).glob(pattern)))
    return [path for path in found if path not in ignored]


def copy_tree(folder, name, target, ignored):
    """Copies what lies below folder/name into the folder `target`."""
    for at, folders, files in os.walk(folder / name):
        below = pathlib.Path(at).relative_to(folder)
        links = [each for each in folders if (folder / below / each).is_symlink()]
        folders[:] = [f for f in folders if f not in links and below / f not in ignored]
        place = target / below.relative_to(name)
        place.mkdir(parents=True, exist_ok=True)
        for file in files + links:
            if below / file not in ignored:
                shutil.copy2(folder / below / file, place / file, follow_symlinks=False)


class Builder:
    """`settings`: variables and binds of each RUN beside its own (root.pip_settings)."""

    def __init__(self, context, work, base, arguments, settings=({}, {}), say=print):
        self.context, self.work, self.base = pathlib.Path(context), pathlib.Path(work), base
        self.arguments, self.settings, self.say = arguments, settings, say
        ignore = self.context / ".dockerignore"
        self.ignored = Ignored(ignore.read_text() if ignore.exists() else "")
        self.images = {}

    def build(self, stages):
        """The image of the last stage. Unused build arguments are an error, as with an engine."""
        known = {name for stage in stages for step in stage.all("ARG") for name, _ in step.pairs()}
        if unknown := sorted(set(self.arguments) - known):
            raise Fault(f"no ARG {', '.join(unknown)} in the Dockerfile")
        for stage in stages:
            image = self.begin(stage)
            given = {}
            for number, step in enumerate(stage.steps, 1):
                self.say(f"{stage.name} {number}/{len(stage.steps)}: {step.name} {step.text}")
                start = time.monotonic()
                getattr(self, f"take_{step.name.lower()}")(image, given, step)
                if step.name in ("RUN", "COPY"):
                    self.say(f"  {time.monotonic() - start:.0f} s")
            self.images[stage.name] = image
        return image

    def begin(self, stage):
        if stage.base in self.images:
            of = self.images[stage.base]
            if of.entrypoint or of.command:
                raise Fault(
                    f"line {stage.line}: {stage.base} has an ENTRYPOINT or a CMD to inherit"
                )
            root = of.root.copy(self.work / stage.name)
            return dataclasses.replace(of, root=root, variables=dict(of.variables))
        if stage.base not in DEBIAN:
            raise Fault(f"line {stage.line}: {stage.base} is neither a stage nor Debian 12")
        return Image(self.base.copy(self.work / stage.name))

    def take_arg(self, image, given, step):
        for name, default in step.pairs():
            value = self.arguments.get(name, default)
            if value is not None:
                given[name] = substitute(value, given | image.variables)

    def take_env(self, image, given, step):
        values = given | image.variables
        image.variables |= {name: substitute(value, values) for name, value in step.pairs()}

    def take_workdir(self, image, given, step):
        name = substitute(step.text, given | image.variables)
        image.folder = str(pathlib.PurePosixPath(image.folder) / name)
        image.root.path(image.folder).mkdir(parents=True, exist_ok=True)

    def take_user(self, image, given, step):
        image.user = substitute(step.text, given | image.variables)
        image.root.entry(image.user)  # that it is there

    def take_run(self, image, given, step):
        variables, binds = self.settings
        process = image.process(variables=variables | given | image.variables, binds=binds)
        command = step.words or ["/bin/sh", "-c", step.text]
        status, said = image.root.run(command, process, LIMIT_S)
        with open(self.work / "log", "a") as log:
            log.write(f"\n== line {step.line}: RUN {step.text}\n{said}")
        if status != 0:
            raise Fault(f"line {step.line}: RUN ended with {status}:\n{said[-4000:]}")

    def take_copy(self, image, given, step):
        values = given | image.variables
        words = [substitute(word, values) for word in step.words or step.text.split()]
        if len(words) < 2:
            raise Fault(f"line {step.line}: COPY {step.text}")
        *patterns, target = words
        origin = step.flags.get("from")
        if origin is not None and origin not in self.images:
            raise Fault(f"line {step.line}: no stage {origin} stands above")
        folder = self.images[origin].root.folder if origin else self.context
        ignored = Ignored("") if origin else self.ignored
        found = []
        for pattern in patterns:
            matches = sources(folder, pattern, ignored)
            if not matches:
                raise Fault(f"line {step.line}: COPY finds no {pattern}")
            found += matches
        place = image.root.path(pathlib.PurePosixPath(image.folder) / target)
        self.copy(folder, found, place, target.endswith("/") or target == ".", ignored, step)
        if owner := step.flags.get("chown"):
            self.give(image, place, owner)

    def copy(self, folder, found, place, into, ignored, step):
        if len(found) > 1 and not into:
            raise Fault(f"line {step.line}: COPY of several files to something without a '/'")
        for name in found:
            if (folder / name).is_dir():
                copy_tree(folder, name, place, ignored)
                continue
            file = place / name.name if into or place.is_dir() else place
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, file)
            os.chown(file, 0, 0)

    def give(self, image, place, owner):
        uid, gid, _ = image.root.entry(owner)
        for path in (place, *place.rglob("*")):
            os.chown(path, uid, gid, follow_symlinks=False)

    def take_entrypoint(self, image, given, step):
        image.entrypoint = tuple(step.words or ("/bin/sh", "-c", step.text))

    def take_cmd(self, image, given, step):
        image.command = tuple(step.words or ("/bin/sh", "-c", step.text))

    def take_nothing(self, image, given, step):
        """For engines and readers: it changes nothing in the root."""

    take_label = take_expose = take_stopsignal = take_nothing

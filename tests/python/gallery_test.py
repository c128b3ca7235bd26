# SPDX-License-Identifier: BSD-3-Clause
"""The gallery's page, and its picture drawn anew from a job of this build."""

import importlib.machinery
import importlib.util
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import muster

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(muster.__file__).parents[2]
DRAWN_FROM = re.compile(r"\d+ cores of \S.*, \d{4}-\d\d-\d\d, commit [0-9a-f]{12}")


def load_gallery():
    loader = importlib.machinery.SourceFileLoader("gallery", str(ROOT / "tools" / "gallery"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gallery", loader))
    loader.exec_module(module)
    return module


def parts_of(picture):
    """Its texts, and the ends of the bars in each rank's row; a row is named by its text."""
    root = ElementTree.fromstring(picture)
    texts = [each.text for each in root.iter() if each.tag.endswith("}text")]
    rows = {
        each.text: float(each.get("y")) - 16
        for each in root.iter()
        if each.tag.endswith("}text") and re.fullmatch(r"rank \d+", each.text)
    }
    bars = {name: [] for name in rows}
    for each in root.iter():
        if not each.tag.endswith("}rect") or each.get("y") is None or each.get("height") != "24":
            continue
        if each.get("fill") == "#f2f2f2":
            continue
        name = next(name for name, y in rows.items() if y == float(each.get("y")))
        bars[name].append(float(each.get("x")) + float(each.get("width")))
    return texts, bars


# spec: V9.gallery each picture of the gallery is there and says from which machine, day and commit
# it is; the tool that draws it shows the calls of a job of this build, in which the killed rank is
# behind the others
def test_the_gallery_and_its_picture(tmp_path):
    page = (ROOT / "docs" / "user" / "gallery.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert pictures
    for name in pictures:
        texts, bars = parts_of((ROOT / "docs" / "user" / name).read_text(encoding="utf-8"))
        assert DRAWN_FROM.fullmatch(texts[-1]), texts[-1]
        assert all(bars.values()), name
    gallery = load_gallery()
    timeline = gallery.trace_of_killed_job(BUILD, tmp_path)
    texts, bars = parts_of(gallery.picture(timeline, 40))
    assert DRAWN_FROM.fullmatch(texts[-1]), texts[-1]
    assert "all_reduce" in texts and texts[0].startswith("rank 1 "), texts
    assert list(bars) == [f"rank {rank}" for rank in range(4)]
    # In the trace: on a busy machine all calls may go on beyond the end of the picture.
    ends = dict.fromkeys(range(4), 0)
    for call in timeline["traceEvents"]:
        if call["ph"] == "X":
            ends[call["pid"]] = max(ends[call["pid"]], call["ts"] + call["dur"])
    # One of the others may have been ended before it entered the call that the killed one left.
    assert ends[1] < max(ends.values()), ends

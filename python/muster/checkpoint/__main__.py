# SPDX-License-Identifier: BSD-3-Clause
"""python -m muster.checkpoint FROM TO: the conversions that need Python; `muster checkpoint` has
the others, and ls, show and verify.

FROM and TO: a checkpoint of muster's (a folder with muster.json), a file of torch.save (its name
ends in .pt, .pth or .bin), a `.distcp` folder of torch.distributed.checkpoint (as FROM; torch
unpickles its metadata, so only with --trust), a folder of safetensors files.
"""

import argparse
import os
import sys

from muster import DistError

from . import convert


def _is_file_of_torch(path):
    return path.endswith((".pt", ".pth", ".bin"))


def _printable(text):
    """Without what a terminal takes for commands: names in a checkpoint may be anybody's."""
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text)


def main():
    parser = argparse.ArgumentParser(
        prog="python -m muster.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="FROM")
    parser.add_argument("target", metavar="TO")
    parser.add_argument(
        "--prefix",
        metavar="TEXT",
        help="write whole safetensors files of the tensors whose names begin with TEXT, "
        "such as model.",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read a .distcp folder although that can run code of its author",
    )
    given = parser.parse_args()
    try:
        if given.prefix is not None:
            convert.export_safetensors(given.source, given.target, prefix=given.prefix)
        elif _is_file_of_torch(given.source):
            convert.from_torch_save(given.source, given.target)
        elif os.path.exists(os.path.join(given.source, ".metadata")):
            convert.from_torch_dcp(given.source, given.target, trust=given.trust)
        elif _is_file_of_torch(given.target):
            convert.to_torch_save(given.source, given.target)
        elif os.path.exists(os.path.join(given.source, "muster.json")):
            parser.error(
                f"{given.source} is a checkpoint already: name a .pt file, or give --prefix"
            )
        else:
            convert.from_safetensors(given.source, given.target)
    except (DistError, OSError) as error:
        sys.exit(_printable(f"muster.checkpoint: {error}"))


if __name__ == "__main__":
    main()

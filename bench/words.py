# SPDX-License-Identifier: BSD-3-Clause
"""Options of the benches that are lists."""

import argparse


def listed(read):
    """For argparse: comma-separated words, each of which `read` takes."""
    return lambda text: [read(word) for word in text.split(",")]


def words_of(known):
    """For argparse: comma-separated words, each of which is known."""

    def read(text):
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f'"{word}" is none of {", ".join(known)}')
        return words

    return read

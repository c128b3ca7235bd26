# SPDX-License-Identifier: BSD-3-Clause
import os
import random
import sys

sys.path.insert(0, os.path.dirname(__file__))

# Programs that tests start may run in a folder of their own.
if "PYTHONPATH" in os.environ:
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))


def pytest_collection_modifyitems(config, items):
    """Keeps n sets of parameters of a function that is marked `sampled(n)`, drawn by
    MUSTER_TEST_SEED; in long runs all. The mark is for tests that start Python again and again.
    """
    if os.environ.get("MUSTER_TEST_LONG"):
        return
    draw = random.Random(int(os.environ.get("MUSTER_TEST_SEED", "0")))
    sets = {}
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            sets.setdefault((item.function, mark.args[0]), []).append(item)
    left_out = {
        item
        for (_, count), those in sets.items()
        for item in draw.sample(those, max(0, len(those) - count))
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]

# SPDX-License-Identifier: BSD-3-Clause
"""A store that is written in Python: it passes each call on to another one."""

import datetime


def passing_store(base, below, on_set=lambda: None):
    """A store of the class `base`: muster's Store, or torch's. Calls `on_set` at each `set`."""

    class Passing(base):
        def set(self, key, value):
            on_set()
            below.set(key, value)

        def get(self, key):
            return below.get(key)

        def add(self, key, amount):
            return below.add(key, amount)

        def compare_set(self, key, expected, desired):
            return below.compare_set(key, expected, desired)

        def wait(self, keys, timeout=datetime.timedelta(seconds=60)):
            below.wait(keys, timeout)

        def check(self, keys):
            return below.check(keys)

        def delete_key(self, key):
            return below.delete_key(key)

        def num_keys(self):
            return below.num_keys()

        def clone(self):
            return self

    return Passing()

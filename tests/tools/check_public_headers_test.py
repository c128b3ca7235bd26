# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_public_headers, on small trees."""

import pathlib
import unittest

from trees import run_over

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_public_headers"

GOOD = {
    "muster/distributed.h": '#include "muster/work.h"\n',
    "muster/work.h": "#include <memory>\n",
    **{
        f"muster/{name}.h": "#include <muster/work.h>\n"
        for name in (
            "device_mesh",
            "parallel",
            "checkpoint",
            "elastic",
            "rpc",
            "key_value_store",
            "pipeline",
            "tensor_parallel",
        )
    },
}


class CheckPublicHeaders(unittest.TestCase):
    def test_accepts_what_the_umbrellas_reach(self):
        code, output = run_over(TOOL, GOOD)
        self.assertEqual(code, 0, output)
        self.assertIn("muster/distributed.h reads 2 headers\n", output)
        self.assertIn("10 headers, 0 errors", output)

    def refuses(self, files, text):
        code, output = run_over(TOOL, {**GOOD, **files})
        self.assertEqual(code, 1)
        self.assertIn(text, output)

    def test_refuses_a_header_that_nothing_reaches(self):
        self.refuses({"muster/extra.h": ""}, "muster/extra.h is reached by no umbrella")

    def test_refuses_a_private_header(self):
        self.refuses(
            {"muster/work.h": '#include "core/base/log/log.h"\n'},
            "reaches core/base/log/log.h, which is not public",
        )

    def test_refuses_too_many(self):
        extra = {f"muster/extra{i}.h": "" for i in range(39)}
        work = "".join(f'#include "muster/extra{i}.h"\n' for i in range(39))
        self.refuses({**extra, "muster/work.h": work}, "49 public headers; at most 48")


if __name__ == "__main__":
    unittest.main()

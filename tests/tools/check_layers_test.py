# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_layers, on small trees made for each rule."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

from trees import run_over

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_layers"

GOOD = {
    "include/muster/status.h": "#include <string>\n",
    "src/core/base/words.h": '#include "muster/status.h"\n',
    "src/core/base/log/log.cc": "#include <spdlog/spdlog.h>\n",
    "src/core/transport/factory.h": '#include "core/base/words.h"\n',
    "src/core/transport/tcp/stream.h": '#include "core/transport/factory.h"\n',
    "src/testing/rank_threads.h": '#include "core/transport/factory.h"\n',
    "src/core/transport/factory_test.cc": '#include "testing/rank_threads.h"\n'
    "#include <gtest/gtest.h>\n",
    "include/muster/work.h": '#include <ATen/core/Tensor.h>\n#include "muster/status.h"\n',
    "src/core/group/call/call.h": "#include <ATen/core/Tensor.h>\n"
    '#include "core/transport/factory.h"\n',
    "src/core/group/backends/native.h": '#include "muster/work.h"\n',
    "include/muster/distributed.h": '#include "muster/work.h"\n',
    "src/faces/compat/backend.cc": "#include <torch/csrc/distributed/c10d/Backend.hpp>\n",
    "examples/hello.cc": '#include "muster/distributed.h"\n',
    "src/rpc/agent/agent.cc": '#include "core/base/words.h"\n#include "core/base/words.h"\n',
    "src/rpc/agent/agent_test.cc": '#include "core/transport/factory.h"\n',
    "src/rpc/core_headers.txt": "core/base/words.h\n",
    "src/checkpoint/format/save.h": "#include <vector>\n",
    "src/jobs/elastic/state.cc": '#include "checkpoint/format/save.h"\n',
    "src/backends/registration/registration.cc": '#include "core/group/backends/native.h"\n',
    "src/backends/core_headers.txt": "core/group/backends/native.h\n",
}


def run(files):
    return run_over(TOOL, files)


class CheckLayers(unittest.TestCase):
    def test_accepts_a_good_tree(self):
        self.assertEqual(run(GOOD), (0, "check_layers: 22 includes, 0 forbidden\n"))

    def test_refuses_an_empty_tree(self):
        self.assertEqual(run({})[0], 1)

    def refuses(self, path, text, rule):
        code, output = run({**GOOD, path: text})
        self.assertEqual(code, 1, output)
        self.assertRegex(output, f"{path}:1: .*{rule}")

    def test_refuses_an_upward_include(self):
        self.refuses(
            "src/core/base/time/clock.cc",
            '#include "core/transport/factory.h"\n',
            "base/ may not include core/transport/",
        )

    def test_refuses_an_upward_include_into_the_top_level(self):
        self.refuses(
            "src/core/base/time/clock.cc",
            '#include "muster/distributed.h"\n',
            "base/ may not include core/group/",
        )

    def test_refuses_a_wing_that_another_may_not_use(self):
        text = '#include "checkpoint/format/save.h"\n'
        self.refuses("src/rpc/rpc.cc", text, "rpc/ may not include checkpoint/")
        self.refuses("src/jobs/launch/launcher.cc", text, "jobs/ may not include checkpoint/")
        self.refuses("src/core/base/env.cc", text, "core/ may not include checkpoint/")

    def test_refuses_what_measures_in_the_product(self):
        files = {**GOOD, "src/lab/model/cost.h": "#include <vector>\n"}
        code, output = run({**files, "src/rpc/rpc.cc": '#include "lab/model/cost.h"\n'})
        self.assertEqual(code, 1, output)
        self.assertIn("lab/ measures", output)
        code, output = run({**files, "src/faces/cli/bench.cc": '#include "lab/model/cost.h"\n'})
        self.assertEqual(code, 1, output)
        self.assertIn("lab/ measures", output)

    def test_a_wing_lists_the_core_headers_that_it_uses(self):
        new = {"src/rpc/rpc.cc": '#include "core/transport/factory.h"\n'}
        code, output = run({**GOOD, **new})
        self.assertEqual(code, 1, output)
        place = "src/rpc/core_headers.txt: is not as the sources are: "
        self.assertIn(place + "core/transport/factory.h;", output)
        listed = "core/base/words.h\ncore/transport/factory.h\n"
        code, output = run({**GOOD, **new, "src/rpc/core_headers.txt": listed})
        self.assertEqual(code, 0, output)
        code, output = run({**GOOD, "src/rpc/core_headers.txt": listed})
        self.assertEqual(code, 1, output)

    def test_draws_how_the_wings_include_each_other(self):
        page = "docs/internals/wings.md"
        begin, end = "<!-- drawn by tools/check_layers --write -->\n", "<!-- end of the picture -->"
        code, output = run({**GOOD, page: f"Before.\n{begin}{end}\nAfter.\n"})
        self.assertEqual(code, 1, output)
        self.assertIn(f"{page}: is not as the sources are", output)
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**GOOD, page: f"Before.\n{begin}{end}\nAfter.\n"}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            for arguments in (["--write"], []):
                command = [sys.executable, "-B", TOOL, *arguments, folder]
                done = subprocess.run(command, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            text = (root / page).read_text()
            self.assertRegex(text, r"(?s)^Before\..*\nrpc +1 .*After\.\n$")

    def test_refuses_testing_outside_tests(self):
        self.refuses(
            "src/core/group/work.cc",
            '#include "testing/rank_threads.h"\n',
            "testing/ is for tests",
        )

    def test_refuses_a_test_header_that_hides_another(self):
        self.refuses(
            "src/core/store/testing/rank_threads.h", "#include <vector>\n", "src/testing has a"
        )

    def test_refuses_a_private_header_of_a_kind(self):
        self.refuses(
            "src/core/group/work.cc",
            '#include "core/transport/tcp/stream.h"\n',
            "private to core/transport/",
        )

    def test_refuses_a_private_header_in_examples(self):
        self.refuses(
            "examples/bad.cc",
            '#include "core/transport/tcp/stream.h"\n',
            "private to core/transport/",
        )

    def test_refuses_a_private_folder(self):
        self.refuses(
            "src/train/ddp/reducer/reducer.cc",
            '#include "core/group/backends/native.h"\n',
            "private to core/group/",
        )

    def test_refuses_torch_in_the_torch_free_half(self):
        for header in ("torch/types.h", "ATen/ATen.h", "c10/util/Half.h"):
            self.refuses(
                "src/core/transport/tcp/stream.cc",
                f"#include <{header}>\n",
                "torch is for the layers",
            )

    def test_refuses_torch_distributed_outside_compat(self):
        self.refuses(
            "src/core/group/work.cc",
            "#include <torch/csrc/distributed/c10d/Work.hpp>\n",
            "is for compat/",
        )

    def test_refuses_fmt_outside_the_log(self):
        self.refuses(
            "src/core/base/env.cc", "#include <fmt/core.h>\n", "stay behind core/base/log/log.h"
        )

    def test_refuses_an_unknown_folder(self):
        self.refuses(
            "src/core/helpers/strings.cc",
            '#include "muster/status.h"\n',
            "belongs to no layer",
        )

    def test_refuses_a_private_header_in_a_public_one(self):
        self.refuses(
            "include/muster/store.h",
            '#include "core/base/words.h"\n',
            "public headers only",
        )

    def test_refuses_torch_in_a_public_header_of_the_torch_free_half(self):
        self.refuses("include/muster/op.h", "#include <ATen/ATen.h>\n", "torch is for the layers")

    def test_refuses_a_public_header_that_no_layer_has(self):
        self.refuses(
            "include/muster/other.h", '#include "muster/status.h"\n', "belongs to no layer"
        )

    def test_refuses_a_missing_header(self):
        self.refuses("src/core/base/env.cc", '#include "core/base/missing.h"\n', "no such header")

    def test_refuses_a_thread_that_takes_signals(self):
        for line in (
            "auto t = std::thread([] {});",
            "std::thread t(run);",
            "result_ = std::async(std::launch::async, run);",
            "std::jthread t;",
            "threads_.emplace_back(run);",
        ):
            self.refuses("src/core/base/time/clock.cc", line + "\n", "start_thread")
        code, output = run(
            {
                **GOOD,
                "src/core/base/threads/thread_start.cc": "return std::thread([] {});\n",
                "src/core/base/clock_test.cc": "std::thread t(run);\n",
                "src/core/base/time/clock.cc": "std::thread thread_;  // std::thread(f) elsewhere\n"
                "threads_.push_back(std::move(*started));\n",
            }
        )
        self.assertEqual(code, 0, output)

    def test_refuses_a_relative_include(self):
        self.refuses("src/core/base/env.cc", '#include "status.h"\n', "are included as")


if __name__ == "__main__":
    unittest.main()

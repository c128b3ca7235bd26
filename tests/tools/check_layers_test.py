"""tools/check_layers, on small trees made for each rule."""

import pathlib
import unittest

from trees import run_over

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_layers"

GOOD = {
    "include/muster/status.h": "#include <string>\n",
    "src/muster/base/words.h": '#include "muster/status.h"\n',
    "src/muster/base/log.cc": "#include <spdlog/spdlog.h>\n",
    "src/muster/transport/factory.h": '#include "muster/base/words.h"\n',
    "src/muster/transport/tcp/stream.h": '#include "muster/transport/factory.h"\n',
    "src/muster/testing/rank_threads.h": '#include "muster/transport/factory.h"\n',
    "src/muster/transport/factory_test.cc": '#include "muster/testing/rank_threads.h"\n'
    "#include <gtest/gtest.h>\n",
    "include/muster/work.h": '#include <ATen/core/Tensor.h>\n#include "muster/status.h"\n',
    "src/muster/group/call.h": "#include <ATen/core/Tensor.h>\n"
    '#include "muster/transport/factory.h"\n',
    "src/muster/group/backends/native.h": '#include "muster/work.h"\n',
    "include/muster/distributed.h": '#include "muster/work.h"\n',
    "src/muster/compat/backend.cc": "#include <torch/csrc/distributed/c10d/Backend.hpp>\n",
    "examples/hello.cc": '#include "muster/distributed.h"\n',
}


def run(files):
    return run_over(TOOL, files)


class CheckLayers(unittest.TestCase):
    def test_accepts_a_good_tree(self):
        self.assertEqual(run(GOOD), (0, "check_layers: 16 includes, 0 forbidden\n"))

    def test_refuses_an_empty_tree(self):
        self.assertEqual(run({})[0], 1)

    def refuses(self, path, text, rule):
        code, output = run({**GOOD, path: text})
        self.assertEqual(code, 1, output)
        self.assertRegex(output, f"{path}:1: .*{rule}")
        self.assertIn(" 1 forbidden", output)

    def test_refuses_an_upward_include(self):
        self.refuses(
            "src/muster/base/clock.cc",
            '#include "muster/transport/factory.h"\n',
            "base/ may not include transport/",
        )

    def test_refuses_an_upward_include_into_the_top_level(self):
        self.refuses(
            "src/muster/base/clock.cc",
            '#include "muster/distributed.h"\n',
            "base/ may not include group/",
        )

    def test_refuses_testing_outside_tests(self):
        self.refuses(
            "src/muster/group/work.cc",
            '#include "muster/testing/rank_threads.h"\n',
            "testing/ is for tests",
        )

    def test_refuses_a_private_header_of_a_kind(self):
        self.refuses(
            "src/muster/group/work.cc",
            '#include "muster/transport/tcp/stream.h"\n',
            "private to transport/",
        )

    def test_refuses_a_private_header_in_examples(self):
        self.refuses(
            "examples/bad.cc", '#include "muster/transport/tcp/stream.h"\n', "private to transport/"
        )

    def test_refuses_a_private_folder(self):
        self.refuses(
            "src/muster/parallel/reducer.cc",
            '#include "muster/group/backends/native.h"\n',
            "private to group/",
        )

    def test_refuses_torch_in_the_torch_free_half(self):
        for header in ("torch/types.h", "ATen/ATen.h", "c10/util/Half.h"):
            self.refuses(
                "src/muster/transport/tcp/stream.cc",
                f"#include <{header}>\n",
                "torch is for group/",
            )

    def test_refuses_torch_distributed_outside_compat(self):
        self.refuses(
            "src/muster/group/work.cc",
            "#include <torch/csrc/distributed/c10d/Work.hpp>\n",
            "is for compat/",
        )

    def test_refuses_fmt_outside_the_log(self):
        self.refuses("src/muster/base/env.cc", "#include <fmt/core.h>\n", "stay behind base/log.h")

    def test_refuses_an_unknown_folder(self):
        self.refuses(
            "src/muster/helpers/strings.cc",
            '#include "muster/status.h"\n',
            "belongs to no layer",
        )

    def test_refuses_a_private_header_in_a_public_one(self):
        self.refuses(
            "include/muster/store.h",
            '#include "muster/base/words.h"\n',
            "public headers only",
        )

    def test_refuses_torch_in_a_public_header_of_the_torch_free_half(self):
        self.refuses("include/muster/op.h", "#include <ATen/ATen.h>\n", "torch is for group/")

    def test_refuses_a_public_header_that_no_layer_has(self):
        self.refuses(
            "include/muster/other.h", '#include "muster/status.h"\n', "belongs to no layer"
        )

    def test_refuses_a_missing_header(self):
        self.refuses(
            "src/muster/base/env.cc", '#include "muster/base/missing.h"\n', "no such header"
        )

    def test_refuses_a_thread_that_takes_signals(self):
        for line in (
            "auto t = std::thread([] {});",
            "std::thread t(run);",
            "result_ = std::async(std::launch::async, run);",
            "std::jthread t;",
            "threads_.emplace_back(run);",
        ):
            self.refuses("src/muster/base/clock.cc", line + "\n", "start_thread")
        code, output = run(
            {
                **GOOD,
                "src/muster/base/thread_start.cc": "return std::thread([] {});\n",
                "src/muster/base/clock_test.cc": "std::thread t(run);\n",
                "src/muster/base/clock.cc": "std::thread thread_;  // std::thread(f) elsewhere\n"
                "threads_.push_back(std::move(*started));\n",
            }
        )
        self.assertEqual(code, 0, output)

    def test_refuses_a_relative_include(self):
        self.refuses("src/muster/base/env.cc", '#include "status.h"\n', "are included as")


if __name__ == "__main__":
    unittest.main()

// SPDX-License-Identifier: BSD-3-Clause
/// Stock torch beside muster: workers in Python, stock_*.py, each of which a benchmark runs to its
/// end.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lab/bench/programs.h"

namespace muster_bench {

class Stock {
 public:
  explicit Stock(std::string worker) : worker_(std::move(worker)) {}

  CLI::Option* add_option(CLI::App& app) {
    return app.add_option("--python", given_,
                          "a Python that has torch, for stock torch; default: what MUSTER_PYTHON "
                          "says, else the first of those that muster run takes "
                          "that has it");
  }

  /// The Python of its processes; without one it says once why.
  const std::optional<std::string>& python() {
    if (looked_) return python_;
    looked_ = true;
    if (const auto found = muster::lab::find_python(given_)) {
      python_ = *found;
    } else {
      complain(found.status().message());
    }
    return python_;
  }

  /// Runs the worker and returns its output. If it cannot be run or fails: none, and the reason on
  /// standard error.
  std::optional<std::string> run(
      const std::vector<std::string>& arguments,
      const std::vector<std::pair<std::string, std::string>>& variables = {}) {
    namespace lab = muster::lab;
    if (!python()) return {};
    const auto worker = lab::bench_file(worker_);
    if (!worker) return complain(worker.status().message());
    std::vector<std::string> words{*python_, *worker};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const auto said = lab::run_program(words, lab::Complaints::shown, variables);
    return said ? std::optional(*said) : complain(said.status().message());
  }

 private:
  static std::nullopt_t complain(const std::string& reason) {
    std::fprintf(stderr, "muster-lab: stock torch is not measured: %s\n", reason.c_str());
    return std::nullopt;
  }

  std::string worker_, given_;
  std::optional<std::string> python_;
  bool looked_ = false;
};

}  // namespace muster_bench

// SPDX-License-Identifier: BSD-3-Clause
// The log of ranks by `muster run --log-format` and `--log-file`.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "faces/cli/testing/launched.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

using muster::testing::ScratchFolder;

/// The processes whose lines of JSON these are. Each line must have all fields.
std::set<int> processes_of(const std::string& text) {
  std::set<int> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (object.is_discarded()) {
      ADD_FAILURE() << "not JSON: " << line;
      continue;
    }
    for (const char* field : {"time", "level", "host", "pid", "message"})
      EXPECT_TRUE(object.contains(field)) << line;
    found.insert(object.value("pid", -1));
  }
  return found;
}

// spec: V6.format the ranks' lines are objects in one file, and none is elsewhere
TEST(RunLog, LinesAreJsonInAFile) {
  const ScratchFolder folder;
  const std::string file = folder.file("log");
  const Outcome outcome =
      run(run_words(2, {"--log-format", "json", "--log-file", file, kWorker, "log"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(processes_of(contents(file)).size(), 2u) << contents(file);
}

// spec: V6.file %p gives each process a file
TEST(RunLog, EachProcessHasAFile) {
  const ScratchFolder folder;
  const Outcome outcome = run(run_words(2, {"--log-file", folder.file("log.%p"), kWorker, "log"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const std::string process = entry.path().extension().string().substr(1);
    EXPECT_TRUE(contains(contents(entry.path().string()), " " + process + " rank ")) << process;
    ++files;
  }
  EXPECT_EQ(files, 2);
}

// spec: V6.format a form that is not known is refused, and a file that cannot be is named
TEST(RunLog, MistakesAreNamed) {
  const Outcome form = run(run_words(1, {"--log-format", "xml", "true"}));
  EXPECT_EQ(form.code, 2);
  EXPECT_TRUE(contains(form.err, "--log-format: \"xml\"")) << form.err;
  const Outcome file = run(run_words(1, {"--log-file", "/dev/null/log", kWorker, "log"}));
  EXPECT_EQ(file.code, 0) << file.err;
  EXPECT_TRUE(contains(file.err, "MUSTER_LOG_FILE: /dev/null/log cannot be written")) << file.err;
  EXPECT_TRUE(contains(file.err, "rank 0] said")) << file.err;
}

}  // namespace
}  // namespace muster::cli::testing

// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "core/base/process/temporary_folder.h"
#include "core/wait/topology.h"
#include "faces/cli/testing/launched.h"
#include "jobs/launch/workers/process.h"
#include "lab/bench/other_libraries.h"
#include "testing/budget.h"

namespace muster::lab {
namespace {

using cli::testing::contains;
using cli::testing::Fifo;
using cli::testing::Outcome;
using cli::testing::run;

namespace fs = std::filesystem;
using cli::bench::RankOptions;

/// A machine with all MPIs, whose compilers make empty programs and write down what they were
/// asked.
class OtherLibraries : public ::testing::Test {
 protected:
  OtherLibraries() {
    for (const char* name : {"mpicc.openmpi", "mpicc.mpich", "cc", "mpiexec.hydra"}) {
      const std::string program = path("bin") + "/" + name;
      fs::create_directories(path("bin"));
      std::ofstream(program) << "#!/bin/sh\necho \"$0 $*\" >> " << path("asked")
                             << "\nwhile [ $# -gt 1 ]; do [ $1 = -o ] && : > $2; shift; done\n";
      fs::permissions(program, fs::perms::owner_all);
    }
    std::ofstream(path("mpi_worker.c")) << "";
    set("PATH", path("bin") + ":" + std::getenv("PATH"));
    set("MUSTER_BENCH_DIR", path(""));
    set("I_MPI_ROOT", path(""));
  }
  ~OtherLibraries() override {
    for (const auto& [name, before] : before_)
      before.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), before.c_str(), 1);
  }
  std::string path(const std::string& name) const {
    return folder_.path() + (name.empty() ? "" : "/" + name);
  }
  void set(const std::string& name, const std::string& value) {
    const char* now = std::getenv(name.c_str());
    before_.try_emplace(name, now == nullptr ? "" : now);
    setenv(name.c_str(), value.c_str(), 1);
  }
  StartPlan plan(const std::string& library, int ranks, const std::string& transport = "shm") {
    auto made =
        plan_library(library, RankOptions{.ranks = ranks, .transport = transport}, folder_.path());
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? *made : StartPlan{};
  }
  static bool says(const StartPlan& plan, const std::vector<std::string>& words) {
    return std::search(plan.command.begin(), plan.command.end(), words.begin(), words.end()) !=
           plan.command.end();
  }
  static std::string value(const StartPlan& plan, const std::string& name) {
    for (const auto& [key, text] : plan.environment)
      if (key == name) return text;
    return "";
  }
  const int crowd_ = usable_cores() + 1;

 private:
  TemporaryFolder folder_{"muster-libraries-"};
  std::map<std::string, std::string> before_;
};

TEST_F(OtherLibraries, EachHasACoreForEachRankWhereThereAreEnough) {
  EXPECT_TRUE(says(plan("openmpi", 1), {"--bind-to", "core"}));
  EXPECT_FALSE(says(plan("openmpi", 1), {"--oversubscribe"}));
  EXPECT_TRUE(says(plan("mpich", 1), {"-bind-to", "core"}));
  EXPECT_EQ(value(plan("impi", 1), "I_MPI_PIN"), "") << "it binds by itself";
}

// One that spins, or lies down for microseconds, would be measured far below what it can.
TEST_F(OtherLibraries, EachGivesItsCoreAwayWhereRanksShareOne) {
  const StartPlan openmpi = plan("openmpi", crowd_);
  EXPECT_TRUE(says(openmpi, {"--oversubscribe", "--bind-to", "none"}));
  EXPECT_TRUE(says(openmpi, {"--mca", "mpi_yield_when_idle", "1"}));
  const StartPlan impi = plan("impi", crowd_);
  EXPECT_EQ(value(impi, "I_MPI_PIN"), "0");
  EXPECT_EQ(value(impi, "I_MPI_THREAD_YIELD"), "2") << "sched_yield; 3 would sleep";
  EXPECT_EQ(value(impi, "I_MPI_WAIT_MODE"), "") << "once it is named it sleeps, whatever its value";
}

TEST_F(OtherLibraries, EachTakesTheTransportThatIsMeasured) {
  EXPECT_TRUE(says(plan("openmpi", 2, "tcp"), {"--mca", "btl", "tcp,self"}));
  EXPECT_FALSE(says(plan("openmpi", 2), {"tcp,self"}));
  EXPECT_EQ(value(plan("mpich", 2, "tcp"), "FI_PROVIDER"), "tcp");
  EXPECT_EQ(value(plan("impi", 2, "tcp"), "FI_PROVIDER"), "tcp");
  EXPECT_EQ(value(plan("impi", 2), "I_MPI_FABRICS"), "shm");
}

TEST_F(OtherLibraries, EachIsBuiltByItsOwnCompilerAndRunsThatProgram) {
  for (const char* library : {"openmpi", "mpich", "impi"}) {
    const StartPlan made = plan(library, 2);
    EXPECT_EQ(made.library, library);
    EXPECT_TRUE(says(made, {path("mpi_worker"), path("")})) << library;
    EXPECT_TRUE(says(made, {"-n", "2"})) << library;
  }
  std::ifstream asked(path("asked"));
  const std::string text((std::istreambuf_iterator<char>(asked)), {});
  for (const char* compiler : {"/mpicc.openmpi ", "/mpicc.mpich ", "/cc "})
    EXPECT_TRUE(contains(text, compiler)) << text;
}

TEST_F(OtherLibraries, WhatIsMissingIsNamedWithItsRemedy) {
  set("I_MPI_ROOT", path("nowhere"));
  const auto none = plan_library("impi", RankOptions{}, path(""));
  ASSERT_FALSE(none.ok());
  EXPECT_TRUE(contains(none.status().message(), "impi-rt")) << none.status().message();
}

// Real ones, where they are installed: every operation that is measured has figures.
TEST(RealLibraries, MeasureEveryOperation) {
  if (muster::testing::kSanitized)
    GTEST_SKIP() << "the MPIs poll, and a sanitized muster waits for cores";
  std::string libraries;
  if (launch::find_program("mpicc.openmpi")) libraries = "openmpi";
  if (launch::find_program("mpicc.mpich")) libraries += libraries.empty() ? "mpich" : ",mpich";
  if (libraries.empty()) GTEST_SKIP() << "no MPI is installed here";
  Fifo scratch;  // for its folder
  const std::string json = scratch.folder() + "/rows.json";
  const std::string ops =
      "broadcast,all_reduce,reduce,all_gather,gather,scatter,reduce_scatter,all_to_all,barrier";
  const Outcome outcome = run({"--vs", libraries, "--op", ops, "--sizes", "64", "--seconds", "0.01",
                               "--rounds", "1", "--engine", "--json", json},
                              {{"MUSTER_SECRET", "none but this one knows it"}});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::ifstream file(json);
  const std::string rows((std::istreambuf_iterator<char>(file)), {});
  for (const char* library : {"openmpi", "mpich"}) {
    if (!contains("," + libraries, "," + std::string(library))) continue;
    std::size_t with_figures = 0;
    std::size_t at = 0;
    const std::string place = "\"library\":\"" + std::string(library) + "\"";
    while ((at = rows.find(place, at)) != std::string::npos) {
      const std::string row = rows.substr(at, rows.find('\n', at) - at);
      with_figures += contains(row, "\"iterations\":0,") ? 0 : 1;
      at += place.size();
    }
    EXPECT_EQ(with_figures, 9u) << library << "\n" << rows << outcome.err;
  }
  fs::remove(json);
}

}  // namespace
}  // namespace muster::lab

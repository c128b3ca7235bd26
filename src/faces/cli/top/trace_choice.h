// SPDX-License-Identifier: BSD-3-Clause
/// Which job a command looks at (`muster trace`, `top`, `dash`): by its files on this host, or
/// through its store.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/store/factory.h"
#include "core/trace/analysis.h"
#include "core/trace/responder.h"
#include "muster/status.h"

namespace muster::cli {

/// Asked of each rank over the store, by commands that want all calls it has kept.
inline constexpr std::size_t kAllRecords = trace::kMostEntries;

/// The trace of a job, with notes on its sources.
struct ShownJob {
  trace::JobTrace job;
  std::vector<std::string> notes;

  std::string note_lines() const;
};

class TraceChoice {
 public:
  /// `folder`: how the option, or the argument, is called that names a directory.
  void add_to(CLI::App& app, const std::string& folder = "--dir");
  bool by_store() const { return !store_text_.empty(); }
  /// The directory that the user named, or after `find` that of the job's traces; empty if
  /// neither is known.
  const std::string& directory() const { return directory_; }

  /// Finds the job, once; `records` are wanted of each rank. Without an option that selects
  /// one, it is the latest job, or the latest running one if `prefers_live`.
  Status find(std::size_t records, bool prefers_live);
  /// Its present state. One thread at a time.
  Result<ShownJob> read() const;
  /// The same; but where none of its ranks lives and the job's launcher has started it again, in
  /// another directory then, that is read from now on. A job is known by its launcher's name
  /// (--rdzv-id); one without a name, and one that was chosen by a process, is not followed.
  Result<ShownJob> read_latest();

 private:
  Result<std::string> find_directory(bool prefers_live) const;
  void note_other_jobs();
  Status connect();

  std::int64_t pid_ = 0;
  std::string directory_, store_text_, name_;
  std::string base_;    // of the directories that a job which starts again may write
  std::string run_id_;  // of the job that was read last
  std::vector<std::string> notes_;
  double wait_ = 2;
  trace::AskOptions ask_;
  std::shared_ptr<store::Store> store_;
};

}  // namespace muster::cli

// SPDX-License-Identifier: BSD-3-Clause
/// For tests: the built `muster` command as a process, with its output in hand.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/process/temporary_folder.h"

namespace muster::cli::testing {

/// A program that does as a rank what its argument says (test_worker_main.cc).
inline const std::string kWorker = MUSTER_TEST_WORKER;

inline bool contains(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

struct Outcome {
  int code = -1;  ///< as a shell tells it: 128 + signal where one ended it
  std::string out, err;
};

/// One run of the command. Everything waits with a generous deadline and fails the test when it
/// passes.
class Launched {
 public:
  using Variables = std::map<std::string, std::string>;
  /// Starts `muster arguments...` with nothing but PATH and `variables` in its environment.
  /// `before` runs in the new process first, to put it on a host, say.
  explicit Launched(const std::vector<std::string>& arguments, const Variables& variables = {},
                    const std::function<void()>& before = {});
  Launched(Launched&&) = delete;
  ~Launched();

  pid_t pid() const { return pid_; }
  void signal(int number);
  /// Reads until standard output (or error) holds `text` at least `times` times.
  bool wait_for_output(const std::string& text, int times = 1);
  bool wait_for_error(const std::string& text);
  /// Returns the standard output (or error) read so far, and forgets it.
  std::string take_output() { return std::exchange(out_text_, {}); }
  std::string take_error() { return std::exchange(err_text_, {}); }
  /// Reads to the end of both streams and collects the process.
  Outcome finish();

 private:
  bool read_more();
  bool wait_until(const std::string& stream, const std::string& text, int times);
  pid_t pid_ = -1;
  Descriptor out_, err_;
  std::string out_text_, err_text_;
  std::chrono::steady_clock::time_point deadline_;
};

inline Outcome run(const std::vector<std::string>& arguments,
                   const Launched::Variables& variables = {}) {
  return Launched(arguments, variables).finish();
}

/// The arguments of `muster run` for so many workers of one node.
inline std::vector<std::string> run_words(int workers, std::vector<std::string> rest) {
  std::vector<std::string> words = {"run", "--standalone", "--nproc-per-node",
                                    std::to_string(workers)};
  words.insert(words.end(), rest.begin(), rest.end());
  return words;
}
/// The same for workers that run a script of the shell.
inline std::vector<std::string> shell(int workers, const std::string& script,
                                      std::vector<std::string> options = {}) {
  options.insert(options.end(), {"sh", "-c", script});
  return run_words(workers, options);
}

/// For `before`: `localhost` has a loopback address of either family there, as on most systems.
/// Needs root.
std::function<void()> localhost_of_both_families(const std::string& hosts_file);

/// A fifo in a directory of its own, to see whether anybody still holds it open for writing.
class Fifo {
 public:
  Fifo();
  const std::string& path() const { return path_; }
  const std::string& folder() const { return folder_.path(); }
  /// Opens the reading end; blocks until a writer has come. Call it after the writer was started.
  bool open();
  /// True once all writers have gone.
  bool wait_for_end();

 private:
  const TemporaryFolder folder_{"muster-test-"};
  const std::string path_ = folder_.path() + "/fifo";
  Descriptor end_;
};

/// Lines of a text, sorted: ranks' lines come in any order.
std::vector<std::string> sorted_lines(const std::string& text);
int count_of(const std::string& text, const std::string& what);
std::string contents(const std::string& path);

}  // namespace muster::cli::testing

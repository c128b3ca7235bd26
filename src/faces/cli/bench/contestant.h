/// A library that is measured: how its ranks are started, what they are asked, how they end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "faces/cli/bench/cell.h"
#include "muster/status.h"

namespace muster::cli::bench {

struct Field {
  int ranks = 2;
  std::string transport = "shm";  ///< or "tcp", or "mpi": muster over backend mpi
  std::string mpi = {};           ///< with "mpi": the rival whose MPI carries muster's calls
  bool threads = false;           ///< our ranks as threads of one process
  bool tensors = true;  ///< our ranks call muster::all_reduce(tensor) and its like, where this
                        ///< build has them; else the engine
};

/// How to start the ranks of a library, all by one command.
struct StartPlan {
  std::string library;
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> environment;  ///< set on top of ours
  bool engine = false;  ///< muster's engine alone, below the tensors
};

/// "muster", "gloo", "openmpi", "mpich", "impi". What is missing on this machine is named, with
/// what to install. The programs of MPI are compiled into `folder` with the library's own compiler.
Result<StartPlan> plan_start(const std::string& library, const Field& field,
                             const std::string& folder);
const std::vector<std::string>& known_rivals();
/// A script of bench/ that measures by itself, with these arguments.
Result<StartPlan> plan_script(const std::string& name, const std::vector<std::string>& arguments);

class Contestant {
 public:
  /// Starts the ranks; they get ready while the first cell waits for them.
  static Result<std::unique_ptr<Contestant>> start(const StartPlan& plan, int ranks,
                                                   const std::string& folder);
  /// Asks them to end and ends them if they do not.
  ~Contestant();

  const std::string& library() const { return library_; }
  /// Blocks until the ranks have measured it or have taken far longer than they should.
  CellResult play(const Cell& cell);

 private:
  Contestant() = default;
  std::string last_words() const;

  std::string library_;
  std::string folder_;
  pid_t pid_ = -1;
  Descriptor pidfd_, back_;
  std::vector<Descriptor> orders_;
  std::string unread_;
  bool failed_ = false;
};

}  // namespace muster::cli::bench

// SPDX-License-Identifier: BSD-3-Clause
/// The `muster` command: one subcommand a file.
#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "faces/cli/commands.h"
#include "faces/cli/parse.h"
#include "faces/cli/run_arguments.h"
#include "faces/cli/trace.h"
#include "jobs/launch/launcher.h"

namespace {

constexpr const char* kHelp =
    "muster: distributed training on LibTorch tensors\n"
    "\n"
    "  muster run [options] program [arguments]      start the ranks of a job on this node "
    "(torchrun)\n"
    "  muster launch [options] program [arguments]   the same with torch.distributed.launch's "
    "options\n"
    "  muster bench [options]                        how long collectives take between processes "
    "of this machine\n"
    "  muster secret [--observer] [-o FILE]          a secret for a job of several nodes, or the "
    "key that only looks at one\n"
    "  muster doctor                                 what this machine offers and what is wrong "
    "with it\n"
    "  muster trace [--job NAME | --pid PID | --dir DIR | --store HOST:PORT] [-o FILE]\n"
    "                                                what a job's ranks called last, live or dead, "
    "and who is behind\n"
    "  muster top [the same choices] [--once]        what a job's ranks are in, refreshed\n"
    "  muster checkpoint ls|show|verify|convert      sharded checkpoints: what is there, whether "
    "it "
    "is whole, other forms of it\n"
    "  muster tunables                               the performance numbers in force, and how to "
    "override them\n"
    "  muster environment                            the environment variables that muster reads\n"
    "  muster --version\n"
    "\n"
    "muster run --standalone --nproc-per-node 4 ./train      four ranks on this machine\n"
    "muster run --help                                       all options\n";

int run(muster::cli::RunFlavour flavour, const std::vector<std::string>& arguments) {
  const auto parsed = muster::cli::parse_run(flavour, arguments);
  if (!parsed.finished) return muster::launch::run_job(parsed.options);
  (parsed.exit_code == 0 ? std::cout : std::cerr) << parsed.text;
  return parsed.exit_code;
}

/// A stream that the caller has closed (`>&-`) leads nowhere from now on. Otherwise the next file
/// that is opened would have its number, and be written to.
bool open_streams() {
  for (int stream = 0; stream <= 2; ++stream) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    if (::open("/dev/null", stream == 0 ? O_RDONLY : O_WRONLY) != stream) return false;
  }
  return true;
}

int run_command(const std::vector<std::string>& arguments) {
  const std::string command = arguments.empty() ? "--help" : arguments.front();
  const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1),
                                      arguments.end());
  if (command == "run") return run(muster::cli::RunFlavour::run, rest);
  if (command == "launch") return run(muster::cli::RunFlavour::launch, rest);
  if (command == "bench") return muster::cli::run_bench(rest);
  if (command == "bench-worker") return muster::cli::run_engine_worker(rest);
  if (command == "doctor") return muster::cli::run_doctor(rest);
  if (command == "secret") return muster::cli::run_secret(rest);
  if (command == "trace") return muster::cli::run_trace(rest);
  if (command == "environment") return muster::cli::run_environment(rest);
  if (command == "checkpoint") return muster::cli::run_checkpoint(rest);
  if (command == "tunables") return muster::cli::run_tunables(rest);
  if (command == "top") return muster::cli::run_top(rest);
  const bool version = command == "--version",
             help = command == "--help" || command == "-h" || command == "help";
  if ((version || help) && !rest.empty()) {
    std::cerr << "muster: \"" << rest.front() << "\" is not understood after " << command
              << "; muster COMMAND --help tells of a command\n";
    return muster::cli::kUsageError;
  }
  if (version) {
    std::cout << "muster " << MUSTER_VERSION << "\n";
    return 0;
  }
  if (help) {
    std::cout << kHelp;
    return arguments.empty() ? muster::cli::kUsageError : 0;
  }
  std::cerr << "muster: there is no command \"" << command << "\"\n\n" << kHelp;
  return muster::cli::kUsageError;
}

/// A command whose output could not be written (no space, say) fails, even if it has succeeded
/// otherwise.
int checked_output(int exit_code) {
  errno = 0;
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.flush();
  if (written || errno == EPIPE) return exit_code;
  std::cerr << "muster: not all could be written to standard output: "
            << (errno == 0 ? "it has failed" : muster::errno_text(errno)) << "\n";
  return exit_code == 0 ? 1 : exit_code;
}

}  // namespace

int main(int count, char** words) {
  if (!open_streams()) return 1;
  return checked_output(run_command({words + 1, words + count}));
}

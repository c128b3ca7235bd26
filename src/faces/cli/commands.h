// SPDX-License-Identifier: BSD-3-Clause
/// The subcommands of `muster`, one source a command. Each gets the arguments after its name,
/// prints to standard output and returns the exit code: 0, 1 after an error, 2 for arguments that
/// are not understood.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

/// `muster bench`: how long the engine's collectives take on this machine.
int run_bench(const std::vector<std::string>& arguments);
/// `muster bench-worker`: the ranks of `muster bench` with the engine alone, without tensors.
/// Started by `muster bench`, not by people.
int run_engine_worker(const std::vector<std::string>& arguments);
/// `muster checkpoint ls|show|verify|convert`: what a folder of checkpoints has, and whether it is
/// whole. 1 if a checkpoint is damaged or cannot be read.
int run_checkpoint(const std::vector<std::string>& arguments);
/// `muster doctor`: what this machine offers and what is wrong with it. 1 if something is in the
/// way of a job.
int run_doctor(const std::vector<std::string>& arguments);
/// `muster environment`: the environment variables that muster reads, or their page of the
/// documentation.
int run_environment(const std::vector<std::string>& arguments);
/// `muster secret`: a secret for a job of several nodes.
int run_secret(const std::vector<std::string>& arguments);
/// `muster trace`: what the ranks of a job called last, merged, and who is behind; also as a
/// timeline.
int run_trace(const std::vector<std::string>& arguments);
/// `muster top`: what a job's ranks are in, refreshed.
int run_top(const std::vector<std::string>& arguments);
/// `muster tunables`: the performance numbers in force here, or their page of the documentation.
int run_tunables(const std::vector<std::string>& arguments);

}  // namespace muster::cli

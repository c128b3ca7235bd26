// SPDX-License-Identifier: BSD-3-Clause
/// The commands of `muster`, one source a command. commands.cc has the table of them.
#pragma once

#include <string>
#include <vector>

#include "faces/cli/tree/command.h"

namespace muster::cli {

/// `muster run`, `muster launch`: starts the ranks of a job on this node.
Command run_command();
Command launch_command();
/// `muster bench`: how long the engine's collectives take on this machine.
Command bench_command();
/// `muster bench-worker`: the ranks of `muster bench` with the engine alone, without tensors.
/// Started by `muster bench`, not by people.
Command bench_worker_command();
/// `muster checkpoint ls|show|verify|convert`: what a folder of checkpoints has, and whether it is
/// whole. 1 if a checkpoint is damaged or cannot be read.
Command checkpoint_command();
/// `muster completion`: a script by which the shell completes what is typed.
Command completion_command();
/// `muster dash`: a page for a browser of what a job's ranks do, live and after the end.
Command dash_command();
/// `muster doctor`: what this machine offers and what is wrong with it. 1 if something is in the
/// way of a job.
Command doctor_command();
/// `muster environment`: the environment variables that muster reads, or their page of the
/// documentation.
Command environment_command();
/// `muster man-pages`: the manual pages, for `make man`.
Command man_pages_command();
/// `muster node`: a node of a job of `muster run --hosts`. Started through ssh, not by people.
Command node_command();
/// `muster secret`: a secret for a job of several nodes.
Command secret_command();
/// `muster trace`: what the ranks of a job called last, merged, and who is behind; also as a
/// timeline.
Command trace_command();
/// `muster top`: what a job's ranks are in, refreshed.
Command top_command();
/// `muster tunables`: the performance numbers in force here, or their page of the documentation.
Command tunables_command();

}  // namespace muster::cli

// SPDX-License-Identifier: BSD-3-Clause
#include "lab/bench/other_libraries.h"

#include <filesystem>
#include <utility>

#include "core/base/environment.h"
#include "core/wait/topology.h"
#include "jobs/launch/workers/process.h"
#include "lab/bench/programs.h"

namespace muster::lab {
namespace {

namespace fs = std::filesystem;
using cli::bench::program_beside;
using cli::bench::RankOptions;

/// Compiles the MPI worker; the program.
Result<std::string> build_mpi_worker(std::vector<std::string> compiler, const std::string& folder,
                                     const std::vector<std::string>& libraries = {}) {
  auto source = bench_file("mpi_worker.c");
  if (!source) return source.status();
  const std::string program = folder + "/mpi_worker";
  compiler.insert(compiler.end(), {"-O2", "-o", program, *source});
  compiler.insert(compiler.end(), libraries.begin(), libraries.end());
  auto built = run_program(compiler, Complaints::kept);
  return built ? Result<std::string>(program) : Result<std::string>(built.status());
}

Status missing(const std::string& what, const std::string& remedy) {
  return Status(Code::invalid_argument, what + " is not on this machine; " + remedy);
}

// Each library runs as its own documents advise: bound to cores if every rank has one, otherwise it
// yields while it waits. The caller appends the program and its words.
StartPlan launch_openmpi(const RankOptions& options) {
  StartPlan plan{"openmpi",
                 {"mpirun.openmpi", "--allow-run-as-root", "-n", std::to_string(options.ranks)},
                 {}};
  const bool oversubscribed = options.ranks > usable_cores();
  const std::vector<std::string> bound = {"--bind-to", "core"};
  const std::vector<std::string> yielding = {"--oversubscribe", "--bind-to",           "none",
                                             "--mca",           "mpi_yield_when_idle", "1"};
  plan.command.insert(plan.command.end(), oversubscribed ? yielding.begin() : bound.begin(),
                      oversubscribed ? yielding.end() : bound.end());
  if (options.transport == "tcp")
    plan.command.insert(plan.command.end(), {"--mca", "pml", "ob1", "--mca", "btl", "tcp,self"});
  return plan;
}

StartPlan launch_mpich(const RankOptions& options) {
  StartPlan plan{"mpich", {"mpirun.mpich", "-n", std::to_string(options.ranks)}, {}};
  if (options.ranks <= usable_cores())
    plan.command.insert(plan.command.end(), {"-bind-to", "core"});
  if (options.transport == "tcp")
    plan.environment = {
        {"MPIR_CVAR_NOLOCAL", "1"}, {"MPIR_CVAR_CH4_NETMOD", "ofi"}, {"FI_PROVIDER", "tcp"}};
  return plan;
}

StartPlan launch_impi(const RankOptions& options) {
  const std::string root = env_text("I_MPI_ROOT").value_or("");
  StartPlan plan{"impi", {root + "/bin/mpiexec.hydra", "-n", std::to_string(options.ranks)}, {}};
  plan.environment = {{"I_MPI_ROOT", root}, {"I_MPI_HYDRA_IFACE", "lo"}};
  if (options.ranks > usable_cores()) {
    plan.environment.insert(plan.environment.end(),
                            {{"I_MPI_PIN", "0"}, {"I_MPI_THREAD_YIELD", "2"}});
  }
  plan.environment.emplace_back("I_MPI_FABRICS", options.transport == "tcp" ? "ofi" : "shm");
  if (options.transport == "tcp") plan.environment.emplace_back("FI_PROVIDER", "tcp");
  return plan;
}

/// The same program on every rank.
StartPlan on_ranks(StartPlan plan, std::initializer_list<std::string> words) {
  plan.command.insert(plan.command.end(), words);
  return plan;
}

Result<StartPlan> plan_openmpi(const RankOptions& options, const std::string& folder) {
  if (!launch::find_program("mpicc.openmpi"))
    return missing("Open MPI", "apt-get install openmpi-bin libopenmpi-dev");
  auto program = build_mpi_worker({"mpicc.openmpi"}, folder);
  if (!program) return program.status();
  return on_ranks(launch_openmpi(options), {*program, folder});
}

Result<StartPlan> plan_mpich(const RankOptions& options, const std::string& folder) {
  if (!launch::find_program("mpicc.mpich"))
    return missing("MPICH", "apt-get install mpich libmpich-dev");
  auto program = build_mpi_worker({"mpicc.mpich"}, folder);
  if (!program) return program.status();
  return on_ranks(launch_mpich(options), {*program, folder});
}

Result<StartPlan> plan_impi(const RankOptions& options, const std::string& folder) {
  const auto root = env_text("I_MPI_ROOT");
  if (!root || !fs::exists(*root + "/bin/mpiexec.hydra")) {
    return missing("Intel MPI",
                   "pip install impi-rt impi-devel into a virtual environment and set I_MPI_ROOT "
                   "to its folder");
  }
  auto program = build_mpi_worker({"cc", "-I" + *root + "/include"}, folder,
                                  {"-L" + *root + "/lib", "-lmpi", "-Wl,-rpath," + *root + "/lib"});
  if (!program) return program.status();
  return on_ranks(launch_impi(options), {*program, folder});
}

Result<StartPlan> plan_gloo(const RankOptions& options, const std::string& folder) {
  auto worker = bench_file("gloo_worker.py");
  if (!worker) return worker.status();
  auto python = find_python();
  if (!python) return python.status();
  StartPlan plan{
      "gloo", {*python, *worker, "--ranks", std::to_string(options.ranks), "--folder", folder}, {}};
  plan.transport = "tcp";  // also within a host
  return plan;
}

}  // namespace

Result<StartPlan> plan_muster_on_mpi(const RankOptions& options, const std::string& mpi,
                                     const std::string& folder) {
  const std::string worker = program_beside("muster_bench_worker");
  std::error_code error;
  if (!fs::exists(worker, error))
    return Status(Code::unsupported, worker +
                                         " is not there; it is built with the half of muster "
                                         "that needs torch");
  if (mpi.empty())
    return Status(Code::invalid_argument,
                  "name the MPI that carries muster's calls: --vs openmpi, mpich or impi");
  StartPlan plan = mpi == "openmpi" ? launch_openmpi(options)
                   : mpi == "mpich" ? launch_mpich(options)
                                    : launch_impi(options);
  plan.library = "muster";
  return on_ranks(std::move(plan), {worker, "--folder", folder, "--transport", "mpi"});
}

Result<StartPlan> plan_script(const std::string& name, const std::vector<std::string>& arguments) {
  auto program = bench_file(name);
  if (!program) return program.status();
  auto python = find_python();
  if (!python) return python.status();
  StartPlan plan{"muster", {*python, *program}, {}};
  plan.command.insert(plan.command.end(), arguments.begin(), arguments.end());
  plan.environment = variables_to_import_muster();
  return plan;
}

const std::vector<std::string>& other_libraries() {
  static const std::vector<std::string> names = {"gloo", "openmpi", "mpich", "impi"};
  return names;
}

Result<StartPlan> plan_library(const std::string& library, const RankOptions& options,
                               const std::string& folder) {
  if (library == "openmpi") return plan_openmpi(options, folder);
  if (library == "mpich") return plan_mpich(options, folder);
  if (library == "impi") return plan_impi(options, folder);
  if (library == "gloo") return plan_gloo(options, folder);
  return cli::bench::plan_muster(options, folder);
}

std::string why_left_out(const std::string& library, int ranks) {
  if (library != "mpich" || ranks <= usable_cores()) return {};
  return "left out if ranks outnumber cores: it spins without yielding, tens of milliseconds a "
         "call";
}

}  // namespace muster::lab

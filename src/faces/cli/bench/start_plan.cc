#include <cstdio>
#include <filesystem>
#include <utility>

#include "core/base/env.h"
#include "core/security/secret.h"
#include "core/wait/topology.h"
#include "faces/cli/bench/contestant.h"
#include "faces/cli/bench/files.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/worker.h"

namespace muster::cli::bench {
namespace {

namespace fs = std::filesystem;

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

// Each library as its own documents advise: bound to cores where every rank has one, giving its
// core away while it waits where not.
/// What starts a program on the ranks of an MPI; the program and its words are to be appended.
StartPlan launch_openmpi(const Field& field) {
  StartPlan plan{
      "openmpi", {"mpirun.openmpi", "--allow-run-as-root", "-n", std::to_string(field.ranks)}, {}};
  const bool oversubscribed = field.ranks > usable_cores();
  const std::vector<std::string> bound = {"--bind-to", "core"};
  const std::vector<std::string> yielding = {"--oversubscribe", "--bind-to",           "none",
                                             "--mca",           "mpi_yield_when_idle", "1"};
  plan.command.insert(plan.command.end(), oversubscribed ? yielding.begin() : bound.begin(),
                      oversubscribed ? yielding.end() : bound.end());
  if (field.transport == "tcp")
    plan.command.insert(plan.command.end(), {"--mca", "pml", "ob1", "--mca", "btl", "tcp,self"});
  return plan;
}

StartPlan launch_mpich(const Field& field) {
  StartPlan plan{"mpich", {"mpirun.mpich", "-n", std::to_string(field.ranks)}, {}};
  if (field.ranks <= usable_cores()) plan.command.insert(plan.command.end(), {"-bind-to", "core"});
  if (field.transport == "tcp")
    plan.environment = {
        {"MPIR_CVAR_NOLOCAL", "1"}, {"MPIR_CVAR_CH4_NETMOD", "ofi"}, {"FI_PROVIDER", "tcp"}};
  return plan;
}

StartPlan launch_impi(const Field& field) {
  const std::string root = env_text("I_MPI_ROOT").value_or("");
  StartPlan plan{"impi", {root + "/bin/mpiexec.hydra", "-n", std::to_string(field.ranks)}, {}};
  plan.environment = {{"I_MPI_ROOT", root}, {"I_MPI_HYDRA_IFACE", "lo"}};
  if (field.ranks > usable_cores()) {
    plan.environment.insert(plan.environment.end(),
                            {{"I_MPI_PIN", "0"}, {"I_MPI_THREAD_YIELD", "2"}});
  }
  plan.environment.emplace_back("I_MPI_FABRICS", field.transport == "tcp" ? "ofi" : "shm");
  if (field.transport == "tcp") plan.environment.emplace_back("FI_PROVIDER", "tcp");
  return plan;
}

/// The same program on every rank.
StartPlan on_ranks(StartPlan plan, std::initializer_list<std::string> words) {
  plan.command.insert(plan.command.end(), words);
  return plan;
}

Result<StartPlan> plan_openmpi(const Field& field, const std::string& folder) {
  if (!launch::find_program("mpicc.openmpi"))
    return missing("Open MPI", "apt-get install openmpi-bin libopenmpi-dev");
  auto program = build_mpi_worker({"mpicc.openmpi"}, folder);
  if (!program) return program.status();
  return on_ranks(launch_openmpi(field), {*program, folder});
}

Result<StartPlan> plan_mpich(const Field& field, const std::string& folder) {
  if (!launch::find_program("mpicc.mpich"))
    return missing("MPICH", "apt-get install mpich libmpich-dev");
  auto program = build_mpi_worker({"mpicc.mpich"}, folder);
  if (!program) return program.status();
  return on_ranks(launch_mpich(field), {*program, folder});
}

Result<StartPlan> plan_impi(const Field& field, const std::string& folder) {
  const auto root = env_text("I_MPI_ROOT");
  if (!root || !fs::exists(*root + "/bin/mpiexec.hydra")) {
    return missing("Intel MPI",
                   "pip install impi-rt impi-devel into a virtual environment and set I_MPI_ROOT "
                   "to its folder");
  }
  auto program = build_mpi_worker({"cc", "-I" + *root + "/include"}, folder,
                                  {"-L" + *root + "/lib", "-lmpi", "-Wl,-rpath," + *root + "/lib"});
  if (!program) return program.status();
  return on_ranks(launch_impi(field), {*program, folder});
}

Result<StartPlan> plan_gloo(const Field& field, const std::string& folder) {
  auto worker = bench_file("gloo_worker.py");
  if (!worker) return worker.status();
  auto python = find_python();
  if (!python) return python.status();
  return StartPlan{
      "gloo", {*python, *worker, "--ranks", std::to_string(field.ranks), "--folder", folder}, {}};
}

/// False, and said once why, where calls on tensors are asked for and cannot be timed.
bool times_tensors(const Field& field, const std::string& worker) {
  std::error_code error;
  if (!field.tensors || fs::exists(worker, error)) return field.tensors;
  static bool said = false;
  if (!std::exchange(said, true))
    std::fprintf(stderr,
                 "muster bench: times the engine alone, below the tensors: %s is not there; it is "
                 "built with the half of muster that needs torch\n",
                 worker.c_str());
  return false;
}

/// muster's calls on tensors over backend mpi, started as the rival on the same MPI.
Result<StartPlan> plan_muster_on_mpi(const Field& field, const std::string& folder) {
  const std::string worker = program_beside("muster_bench_worker");
  std::error_code error;
  if (!fs::exists(worker, error))
    return Status(Code::unsupported, worker +
                                         " is not there; it is built with the half of muster "
                                         "that needs torch");
  if (field.mpi.empty())
    return Status(Code::invalid_argument,
                  "name the MPI that carries muster's calls: --vs openmpi, mpich or impi");
  StartPlan plan = field.mpi == "openmpi" ? launch_openmpi(field)
                   : field.mpi == "mpich" ? launch_mpich(field)
                                          : launch_impi(field);
  plan.library = "muster";
  return on_ranks(std::move(plan), {worker, "--folder", folder, "--transport", "mpi"});
}

StartPlan plan_muster(const Field& field, const std::string& folder) {
  const std::string worker = program_beside("muster_bench_worker");
  StartPlan plan{"muster", {worker}, {}};
  plan.engine = !times_tensors(field, worker);
  if (plan.engine) plan.command = {launch::own_program(), "bench-worker"};
  plan.command.insert(plan.command.end(), {"--ranks", std::to_string(field.ranks), "--folder",
                                           folder, "--transport", field.transport});
  if (field.threads) plan.command.emplace_back("--threads");
  plan.environment = {{"MUSTER_SECRET", Secret::random_text()}};
  return plan;
}

}  // namespace

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

const std::vector<std::string>& known_rivals() {
  static const std::vector<std::string> names = {"gloo", "openmpi", "mpich", "impi"};
  return names;
}

Result<StartPlan> plan_start(const std::string& library, const Field& field,
                             const std::string& folder) {
  if (library == "openmpi") return plan_openmpi(field, folder);
  if (library == "mpich") return plan_mpich(field, folder);
  if (library == "impi") return plan_impi(field, folder);
  if (library == "gloo") return plan_gloo(field, folder);
  if (field.transport == "mpi") return plan_muster_on_mpi(field, folder);
  return plan_muster(field, folder);
}

}  // namespace muster::cli::bench

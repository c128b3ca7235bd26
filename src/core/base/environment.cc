// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/environment.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>

namespace muster {

std::optional<std::string> env_text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

void wipe_env(const char* name) {
  if (char* value = std::getenv(name); value != nullptr)
    ::explicit_bzero(value, std::strlen(value));
  ::unsetenv(name);
}

Result<std::optional<std::int64_t>> env_integer(const char* name, std::int64_t low,
                                                std::int64_t high) {
  const auto text = env_text(name);
  if (!text) return std::optional<std::int64_t>();
  std::int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high) {
    return Status(Code::invalid_argument, "environment variable " + std::string(name) + " is \"" +
                                              *text + "\"; expected a whole number from " +
                                              std::to_string(low) + " to " + std::to_string(high));
  }
  return std::optional<std::int64_t>(value);
}

Result<std::optional<bool>> env_flag(const char* name) {
  const auto text = env_text(name);
  if (!text) return std::optional<bool>();
  std::string lower = *text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (lower == "1" || lower == "true" || lower == "yes" || lower == "on")
    return std::optional<bool>(true);
  if (lower == "0" || lower == "false" || lower == "no" || lower == "off")
    return std::optional<bool>(false);
  return Status(Code::invalid_argument, "environment variable " + std::string(name) + " is \"" +
                                            *text +
                                            "\"; expected 1 or 0 (true, false, yes, no, on, off)");
}

namespace {

constexpr EnvironmentVariable kJob[] = {
    {"RANK, WORLD_SIZE", "",
     "This process's rank and the number of ranks, for env://. Without them the variables of srun "
     "and mpirun below are used."},
    {"MASTER_ADDR, MASTER_PORT", "",
     "Where rank 0 serves the job's store, for env://. If all ranks run on one host under srun or "
     "mpirun, neither is needed."},
    {"LOCAL_RANK", "", "This process's rank on its host, as get_node_local_rank returns it."},
    {"MUSTER_AGENT_STORE", "",
     "HOST:PORT of the store that the launcher serves. Set by `muster run`; every rank is then a "
     "client of that store."},
    {"MUSTER_EPOCH", "",
     "Number of the epoch (the set of nodes) that this process belongs to. Set by `muster run` "
     "with "
     "several nodes; the launcher's store refuses processes of earlier epochs."},
    {"MUSTER_LAUNCH", "",
     "Drawn at random by `muster run` for each launch of a job that has epochs, the same on all "
     "ranks and in all epochs. Savers of checkpoints compare their epochs within one launch only."},
    {"TORCHELASTIC_RESTART_COUNT", "0",
     "Number of restarts of the job so far. Ranks of different restarts do not meet each other."},
    {"TORCHELASTIC_RUN_ID", "none",
     "The job's name, in traces and in the keys of its store: the same on all ranks. If it is set, "
     "is_torchelastic_launched is true."},
    {"TORCHELASTIC_USE_AGENT_STORE", "off",
     "Set by torchrun, whose agent serves a store of stock torch at MASTER_PORT. Python programs "
     "meet over that store; C++ programs cannot."},
};

constexpr EnvironmentVariable kSecurity[] = {
    {"MUSTER_SECRET", "",
     "The job's secret, at least 16 characters, the same on all ranks; `muster secret` makes one. "
     "Without a secret only processes of the same user on the same host can join. `muster run` "
     "makes one for a job on one node."},
    {"MUSTER_SECRET_FD", "",
     "PROCESS:DESCRIPTOR of the sealed file in which `muster run` hands the secret to workers. "
     "MUSTER_SECRET takes precedence."},
    {"MUSTER_SECRET_FILE", "",
     "A file that holds the secret, closed to other users. The two above take precedence."},
    {"MUSTER_INSECURE", "off",
     "1 lets processes of any host join without a secret. Use it only on networks that you trust. "
     "A secret that is given takes precedence."},
    {"MUSTER_ALLOW_PICKLE", "1",
     "0 makes object collectives and remote calls in Python refuse pickles that can run code."},
};

constexpr EnvironmentVariable kNetwork[] = {
    {"MUSTER_SOCKET_IFNAME", "",
     "Network interfaces for links between hosts, separated by commas. Every rank must name the "
     "same number of interfaces. Without it: the interface from which the store is reached."},
    {"GLOO_SOCKET_IFNAME", "", "The same, if MUSTER_SOCKET_IFNAME is unset."},
    {"MUSTER_HEARTBEAT_TIMEOUT", "10",
     "Whole seconds for which a rank of another host may be silent before it counts as failed; 0: "
     "for ever. After 3 s the log warns. A rank of the same host counts as failed when its process "
     "has ended or is stopped, and never because it is slow."},
    {"MUSTER_TLS", "full",
     "Which parts of TCP links are encrypted; the same on all ranks. \"control-plain\" "
     "neither encrypts nor authenticates payloads of tensors and objects. Use it only on networks "
     "that you trust."},
};

constexpr EnvironmentVariable kBackends[] = {
    {"MUSTER_MPI_LIBRARY", "",
     "The file of the MPI library that backend mpi uses. Without it: the one that the process has "
     "loaded, else that of the launcher, else the first that is installed."},
    {"MUSTER_UCC_LIBRARY", "libucc.so.1", "The file of the UCC library that backend ucc uses."},
    {"MUSTER_PLUGINS", "",
     "A folder that is searched first for the plugins of backends (libmuster_mpi_*.so)."},
};

constexpr EnvironmentVariable kEtcd[] = {
    {"MUSTER_ETCD_USER, MUSTER_ETCD_PASSWORD", "",
     "The user of the etcd cluster and its password, if the cluster requires them."},
    {"MUSTER_ETCD_CACERT", "the system's",
     "PEM file of the authority that has signed the certificates of etcd's members. If it is set, "
     "endpoints without a scheme are https."},
    {"MUSTER_ETCD_CERT, MUSTER_ETCD_KEY", "",
     "PEM files of this client's certificate and its key, if the cluster requires them."},
};

constexpr EnvironmentVariable kKubernetes[] = {
    {"KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT", "",
     "Set by Kubernetes in all pods: the API server, for --rdzv-backend kubernetes without "
     "--rdzv-endpoint."},
    {"MUSTER_KUBERNETES_TOKEN_FILE", "that of the pod's service account",
     "File with the bearer token for the API server. It is read for each request."},
    {"MUSTER_KUBERNETES_CACERT", "that of the pod's service account",
     "PEM file of the authority that has signed the API server's certificate."},
    {"MUSTER_KUBERNETES_NAMESPACE", "the pod's", "Namespace of the job's Leases."},
};

constexpr EnvironmentVariable kMemory[] = {
    {"MUSTER_SHARE_MEMORY", "",
     "1 puts all CPU tensors into memory that the ranks of the host share. 0 keeps even the "
     "gradients of DistributedDataParallel out of it."},
    {"MUSTER_ALGORITHM", "",
     "OPERATION:ALGORITHM pairs, separated by commas, that replace the choice by size: "
     "\"all_reduce:bruck,broadcast:chain\". The value of a group's first rank counts."},
    {"MUSTER_TUNING", "~/.config/muster/tuning",
     "The tuning file that `muster bench --tune` writes. \"off\" reads none."},
    {"MUSTER_TUNE", "",
     "NAME=VALUE pairs, separated by commas, that override performance numbers: "
     "\"link_spin=20us\". The page of tunables lists the names."},
    {"MUSTER_COMPRESS_WITHIN_HOST", "0",
     "1 compresses also where ranks share the memory of a host, which takes longer than not to "
     "compress: to try on one machine how a model trains over slow links. The same on all ranks."},
};

constexpr EnvironmentVariable kNccl[] = {
    {"MUSTER_NCCL_LIBRARY", "torch's copy, the wheel beside torch, or the system's",
     "The NCCL library to load."},
    {"TORCH_NCCL_ASYNC_ERROR_HANDLING, NCCL_ASYNC_ERROR_HANDLING",
     "1 for timeouts, 2 for other failures; with blocking waits 2",
     "At a failure on NCCL: 0 does nothing, except in blocking waits, 1 aborts the "
     "communicators and ends the process, 2 aborts them and fails the calls, 3 ends the process."},
    {"NCCL_COMM_BLOCKING", "0",
     "1: refused by backend nccl, which must be able to abort NCCL's calls."},
    {"TORCH_NCCL_USE_COMM_NONBLOCKING", "",
     "NCCL's communicators never block, whatever it says; calls mean the same."},
    {"TORCH_NCCL_NAN_CHECK, TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0",
     "1: refused by backend nccl, which has neither."},
    {"TORCH_NCCL_HIGH_PRIORITY", "0",
     "1: the calls of all groups run on streams of high priority."},
    {"TORCH_NCCL_AVOID_RECORD_STREAMS, TORCH_NCCL_CUDA_EVENT_CACHE", "",
     "Ways of torch's own backend. Backend nccl holds tensors until their calls are done."},
    {"TORCH_NCCL_BLOCKING_WAIT, NCCL_BLOCKING_WAIT", "0",
     "1: synchronous calls and `wait` return when the GPU has carried out the call, or throw."},
    {"TORCH_NCCL_RANKS_PER_ROOT", "128",
     "Larger groups connect by ncclCommInitRankScalable, if NCCL has it (2.23), by an id for each "
     "so many ranks. The same on all ranks."},
    {"NCCL_MULTI_RANK_GPU_ENABLE", "0",
     "1 on all ranks that share a GPU: this is meant. Otherwise backend nccl refuses it. Read by "
     "NCCL 2.30 too."},
    {"TORCH_NCCL_*", "",
     "Those that are not listed here steer the watchdog of torch's own backend; a warning names "
     "them."},
    {"NCCL_*", "", "NCCL reads its variables itself; muster leaves them alone."},
};

constexpr EnvironmentVariable kDiagnosis[] = {
    {"MUSTER_LOG_LEVEL", "warning",
     "error, warning, info, debug or trace. It overrides the level that the two variables of "
     "torch give."},
    {"MUSTER_LOG_FORMAT", "text",
     "text, or json: each line of the log is an object with time, level, host, pid, rank and "
     "message. `muster run --log-format` sets it."},
    {"MUSTER_LOG_FILE", "",
     "The log goes to this file instead of standard error. %h in it is the host, %p the process. "
     "`muster run --log-file` sets it."},
    {"MUSTER_LOG_FILE_MB", "64",
     "A file of the log that has grown to so many MiB becomes FILE.1, which becomes FILE.2."},
    {"MUSTER_LOG_FILES_KEPT", "5", "The number of files that are kept so."},
    {"TORCH_DISTRIBUTED_DEBUG", "OFF",
     "OFF, INFO or DETAIL. At DETAIL reports of mismatched calls have shapes and call stacks."},
    {"TORCH_CPP_LOG_LEVEL", "WARNING",
     "ERROR, WARNING or INFO. INFO logs at debug if TORCH_DISTRIBUTED_DEBUG is INFO, and at trace "
     "if it is DETAIL."},
    {"MUSTER_TRACE_ENTRIES", "2000",
     "How many calls each rank's flight recorder keeps. 0 disables it."},
    {"MUSTER_RUN_DIR", "$XDG_RUNTIME_DIR/muster, else /tmp/muster-UID",
     "The folder of traces. It must be closed to others."},
    {"TORCH_SHOW_CPP_STACKTRACES", "0",
     "1 adds the C++ stack of the callee to errors of remote calls."},
    {"PYTHONBREAKPOINT", "", "What `breakpoint(rank)` opens in Python instead of pdb."},
    {"NO_COLOR", "", "Set to any text, it keeps `muster top` from using colour."},
};

constexpr EnvironmentVariable kLaunching[] = {
    {"PET_<NAME>", "",
     "Sets the option `--<name>` of `muster run`, for any option that takes a value: "
     "PET_NPROC_PER_NODE=4."},
    {"PET_N_PROC_PER_NODE", "",
     "The same as PET_NPROC_PER_NODE, in the spelling of Kubeflow's PyTorchJob."},
    {"MUSTER_PYTHON", "",
     "The Python that `muster run` and muster-lab start, and whose torch `make` builds "
     "against."},
    {"PYTHON_EXEC", "",
     "The same, for `muster run` only; takes precedence over MUSTER_PYTHON. `muster run` sets it "
     "in its workers to the Python that runs them."},
    {"VIRTUAL_ENV, CONDA_PREFIX, CONDA_DEFAULT_ENV", "",
     "The activated environment. Its Python is used if no variable above names one and this muster "
     "is not installed in a virtual environment itself."},
    {"CUDA_VISIBLE_DEVICES", "", "The devices that `--nproc-per-node gpu` counts."},
    {"MUSTER_REPLACE_GLOO", "off",
     "1 gives Python programs muster as torch's backend `gloo`, as --replace-gloo does."},
    {"DDP_DISABLE_COMM_MEM", "0 on machines without GPUs",
     "1 keeps the buckets of stock torch's DDP out of memory that the ranks of a host share."},
    {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30", "Seconds: the default of --shutdown-timeout."},
    {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ",
     "The default of --log-line-prefix-template."},
    {"PATH", "", "The folders in which a program named without a folder is searched for."},
    {"TMPDIR", "/tmp", "Where temporary files are made."},
    {"HOME, XDG_CONFIG_HOME, XDG_RUNTIME_DIR", "",
     "The folders of the tuning file, of traces and of this user's own key."},
};

constexpr EnvironmentVariable kSchedulers[] = {
    {"SLURM_PROCID, SLURM_NTASKS, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NTASKS_PER_NODE, "
     "SLURM_NODEID, SLURM_NNODES, SLURM_STEP_NUM_NODES, SLURM_JOB_ID, SLURM_STEP_ID, SLURM_STEPID, "
     "SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_NODELIST, SLURM_STEP_TASKS_PER_NODE, "
     "SLURM_TASKS_PER_NODE",
     "", "Set by srun. Rank 0 serves the store on the first host of the step."},
    {"OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, "
     "OMPI_COMM_WORLD_LOCAL_SIZE, PMIX_NAMESPACE",
     "", "Set by Open MPI's mpirun."},
    {"JOB_COMPLETION_INDEX, HOSTNAME", "",
     "Set by Kubernetes in the pods of an Indexed Job or a JobSet: this pod's number and its name. "
     "Pod 0 has the same name with 0 at the end."},
    {"PMI_RANK, PMI_SIZE, PMI_FD, MPI_LOCALRANKID, MPI_LOCALNRANKS", "",
     "Set by the mpirun of MPICH and Intel MPI."},
    {"MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE, MV2_COMM_WORLD_LOCAL_RANK, "
     "MV2_COMM_WORLD_LOCAL_SIZE",
     "", "Set by MVAPICH2."},
};

constexpr EnvironmentVariable kWorkers[] = {
    {"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, "
     "ROLE_WORLD_SIZE, ROLE_NAME, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT, "
     "TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RUN_ID, PYTHON_EXEC",
     "", "As under torchrun."},
    {"MUSTER_AGENT_STORE, MUSTER_SECRET_FD, MUSTER_EPOCH, MUSTER_LAUNCH", "",
     "See above. MUSTER_SECRET is removed from their environment."},
    {"MUSTER_LAUNCHER_NEWS, MUSTER_SPARE", "",
     "With `--elastic keep`: the descriptor on which the launcher announces epochs; and, in spare "
     "processes only, 1."},
    {"MUSTER_COMMITTED, MUSTER_STATE_EPOCH, MUSTER_ON_LOST_STATE", "",
     "With `--elastic keep`: the newest commit that the launcher has heard of, if any; the newest "
     "epoch in which a node had the job's state; and, with `--on-lost-state fail`, \"fail\"."},
    {"TORCHELASTIC_ERROR_FILE", "",
     "Where torch's `@record` leaves the exception of a worker, which the launcher reports."},
    {"OMP_NUM_THREADS", "",
     "The number of cores divided by the number of workers, unless it is set."},
};

constexpr EnvironmentVariable kLogged[] = {
    {"CUDA_VISIBLE_DEVICES, MASTER_ADDR, MASTER_PORT, NCCL_DEBUG, NCCL_IB_TIMEOUT, NCCL_NTHREADS, "
     "NCCL_SOCKET_IFNAME, GLOO_DEVICE_TRANSPORT",
     "", "Shown by DistributedDataParallel's log, as torch's log shows them; not used otherwise."},
};

constexpr EnvironmentVariable kBuilding[] = {
    {"MUSTER_LIBTORCH, LIBTORCH", "",
     "An unpacked LibTorch to build against instead of a wheel's."},
    {"MUSTER_TORCH, MUSTER_CUDA, MUSTER_TORCH_TESTS, MUSTER_BROWSER, MUSTER_RIVALS, MUSTER_CHECKS, "
     "MUSTER_SERVICES, MUSTER_DOCS",
     "", "What `tools/setup` installs; its first lines say what each adds."},
    {"MUSTER_BENCH_DIR", "bench/ of the sources",
     "Where muster-lab finds its scripts and the other libraries' workers."},
    {"I_MPI_ROOT", "", "The folder of Intel MPI, for `muster-lab --vs impi`."},
    {"PYTHONPATH", "", "Kept by muster-lab behind the folder of the Python package it times."},
    {"MUSTER_TEST_SEED", "the clock", "The seed of sampled tests. `make test` prints it."},
    {"MUSTER_TEST_LONG", "0", "1 runs test matrices whole."},
    {"MUSTER_TEST_BUDGET_S, MUSTER_TEST_SHARE, MUSTER_TEST_LONG_BUDGET_S, MUSTER_FUZZ_SECONDS", "",
     "How long sampled tests and fuzzers run (src/testing/budget.h)."},
};

constexpr EnvironmentSection kSections[] = {
    {"Joining a job", kJob},
    {"Security", kSecurity},
    {"Network", kNetwork},
    {"etcd", kEtcd},
    {"Kubernetes", kKubernetes},
    {"Backends", kBackends},
    {"Memory and algorithms", kMemory},
    {"Backend nccl", kNccl},
    {"Logs and traces", kDiagnosis},
    {"Launching", kLaunching},
    {"From srun and mpirun", kSchedulers},
    {"What workers get from muster run", kWorkers},
    {"Logged only", kLogged},
    {"Building, benchmarks and tests", kBuilding},
};

constexpr std::size_t kColumns = 100;

/// Appends `text` in lines of at most 100 columns, the first after what the last line of `page`
/// holds, the others indented by two.
void wrap(std::string& page, std::string_view text) {
  std::size_t column = page.size() - (page.rfind('\n') + 1);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    if (column + 1 + end > kColumns) {
      page += "\n ";
      column = 1;
    }
    page += ' ';
    page += text.substr(0, end);
    column += 1 + end;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

/// "`RANK`, `WORLD_SIZE`"
std::string as_code(std::string_view names) {
  std::string text = "`";
  for (const char c : names) {
    if (c == ',') text += '`';
    text += c;
    if (c == ' ') text += '`';
  }
  return text + "`";
}

}  // namespace

std::span<const EnvironmentSection> environment_sections() { return kSections; }

std::string environment_page() {
  std::string page =
      "# Environment variables\n\n"
      "Every variable that muster reads, printed by `muster environment --markdown`. `muster "
      "environment`\nprints those that are set here. Empty and unset are the same. Flags are 1, "
      "true, yes or on, and 0,\nfalse, no or off.\n";
  for (const EnvironmentSection& section : kSections) {
    page += "\n## " + std::string(section.title) + "\n\n";
    for (const EnvironmentVariable& row : section.variables) {
      page += "-";
      wrap(page, as_code(row.name) +
                     (row.standard.empty() ? "" : " (default: " + std::string(row.standard) + ")") +
                     ":");
      wrap(page, row.meaning);
      page += '\n';
    }
  }
  return page;
}

}  // namespace muster

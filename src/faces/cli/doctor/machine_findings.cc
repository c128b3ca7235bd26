// SPDX-License-Identifier: BSD-3-Clause
// What `muster doctor` says of the machine itself and of the programs on it.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

#include "core/base/descriptor.h"
#include "core/base/process/shell_word.h"
#include "core/collective/kernels/kernels.h"
#include "faces/cli/doctor/findings.h"
#include "faces/cli/version.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/process.h"
#include "jobs/launch/workers/worker_commands.h"

namespace muster::cli {
namespace {

/// A Python that hangs in reading its packages is not waited for longer.
constexpr const char* kPythonLimit = "timeout 20 ";

/// Prints the versions without importing torch, which takes seconds, and nothing of the folder that
/// the command was started in.
constexpr const char* kVersions =
    "import sys; sys.path[:1] = []\n"
    "from importlib.metadata import version, PackageNotFoundError\n"
    "def of(name):\n"
    "    try: return version(name)\n"
    "    except PackageNotFoundError: return \"none\"\n"
    "print(sys.version.split()[0], of(\"torch\"), of(\"muster-dist\"))\n";

std::string first_line_of(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

/// The words that the Python prints; empty if it cannot be run.
std::string ask_python(const std::string& python) {
  const std::string command = kPythonLimit + shell_word(python) + " -c " + shell_word(kVersions) +
                              " 2>/dev/null </dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "re"), ::pclose);
  std::array<char, 512> bytes;
  const std::size_t got = pipe ? std::fread(bytes.data(), 1, bytes.size(), pipe.get()) : 0;
  return {bytes.data(), got};
}

std::string mebibytes(double bytes) {
  return std::to_string(static_cast<long long>(bytes / (1 << 20))) + " MiB";
}

void look_at_memory(Findings& findings) {
  struct statvfs shared {};
  if (::statvfs("/dev/shm", &shared) == 0) {
    const double free = static_cast<double>(shared.f_bavail) * static_cast<double>(shared.f_frsize);
    const double size = static_cast<double>(shared.f_blocks) * static_cast<double>(shared.f_frsize);
    findings.say("/dev/shm", mebibytes(free) + " free of " + mebibytes(size) +
                                 " (muster itself uses memfds, which count against memory only)");
  } else {
    findings.say("/dev/shm", "not there");
  }
  const Descriptor memory(::memfd_create("muster-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  findings.judge(static_cast<bool>(memory), "memfd",
                 memory ? "works" : "does not work: ranks of one host cannot share memory");
}

std::string text_of(rlim_t value, rlim_t unit) {
  if (value == RLIM_INFINITY) return "unlimited";
  return unit == 1 ? std::to_string(value) : std::to_string(value / unit) + " KiB";
}

/// `least`: below it a job may fail; 0: any value does.
void look_at_limit(Findings& findings, const char* what, __rlimit_resource resource, rlim_t least,
                   rlim_t unit = 1) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return;
  const std::string now =
      text_of(limit.rlim_cur, unit) + " (up to " + text_of(limit.rlim_max, unit) + ")";
  if (limit.rlim_cur >= least) return findings.say(what, now);
  findings.warn(what, now + "; at least " + std::to_string(least) + " is wise (ulimit)");
}

std::string processor_name() {
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("model name") && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "unknown";
}

int numa_nodes() {
  std::error_code failed;
  int count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/sys/devices/system/node", failed)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("node") && name.size() > 4 && name[4] >= '0' && name[4] <= '9') ++count;
  }
  return count;
}

/// Ranks of a host copy large messages from each other's memory where the system lets them.
void look_at_ptrace(Findings& findings) {
  const std::string scope = first_line_of("/proc/sys/kernel/yama/ptrace_scope");
  if (scope.empty() || scope == "0")
    return findings.say("ptrace scope", (scope.empty() ? "no Yama" : "0") +
                                            std::string(": ranks may read each other's memory"));
  findings.say("ptrace scope", scope +
                                   ": large messages between ranks of this host are copied twice; "
                                   "sysctl kernel.yama.ptrace_scope=0 lets them be read in place");
}

}  // namespace

void look_at_programs(Findings& findings) {
  findings.say("built with", "torch " + torch_version() + ", " + compiler_version());
  const auto python = launch::first_python(
      launch::python_places(launch::inherited_environment(), launch::own_program()));
  if (!python) return findings.say("Python", "none; muster run starts other programs");
  const std::string said = ask_python(*python);
  const std::size_t first = said.find(' '), second = said.find(' ', first + 1),
                    end = said.find('\n');
  if (first == std::string::npos || second == std::string::npos || end == std::string::npos)
    return findings.warn("Python", *python + " cannot be run");
  const auto version = [&](std::size_t from, std::size_t to) {
    return said.substr(from + 1, to - from - 1);
  };
  findings.say("Python", said.substr(0, first) + " (" + *python + ")");
  findings.say("its torch", version(first, second));
  const std::string own = version(second, end);
  findings.say("its muster", own == "none" ? "not installed by pip" : own);
}

void look_at_machine(Findings& findings) {
  utsname system{};
  ::uname(&system);
  findings.say("system", std::string(system.sysname) + " " + system.release + " " + system.machine);
  findings.say("processor", processor_name() + "; reductions by " + collective::instruction_set());
  findings.say("cores", std::to_string(launch::allowed_cores()) +
                            " for this process (affinity and control group)");
  findings.say("NUMA nodes", std::to_string(numa_nodes()));
  findings.say("GPUs", std::to_string(launch::gpu_count()));
  look_at_memory(findings);
  look_at_ptrace(findings);
  look_at_limit(findings, "open files", RLIMIT_NOFILE, 1024);
  look_at_limit(findings, "processes", RLIMIT_NPROC, 256);
  look_at_limit(findings, "locked memory", RLIMIT_MEMLOCK, 0, 1024);
  look_at_limit(findings, "address space", RLIMIT_AS, 0, 1024);
  look_at_limit(findings, "core files", RLIMIT_CORE, 0, 1024);
  const bool pidfd = launch::open_pidfd(::getpid()).ok();
  findings.judge(pidfd, "pidfd", pidfd ? "works" : "does not work: Linux 5.3 is needed");
}

}  // namespace muster::cli

// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/run_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <memory>
#include <utility>

#include "core/base/environment.h"
#include "core/security/own_files.h"

namespace muster::trace {
namespace {

constexpr std::int64_t kKeptSeconds = 3 * 24 * 60 * 60;  // limit: litter of killed processes
constexpr std::size_t kKeptJobs = 64;                    // limit: litter of killed processes
constexpr std::string_view kJobPrefix = "job-";

bool is_trace(std::string_view name) {
  return name.starts_with("rank") && name.ends_with(".trace");
}

/// Names in a directory, without the two dots.
std::vector<std::string> names_in(int directory) {
  std::vector<std::string> names;
  const int copy = ::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return names;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(copy), ::closedir);
  if (!stream) return names;
  while (const dirent* entry = ::readdir(stream.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  return names;
}

OwnRules rules_for(unsigned closed) {
  return {.name = "the directory for traces", .closed = closed};
}

Result<Descriptor> or_another(Result<Descriptor> directory, const std::string& within = "") {
  if (directory) return directory;
  return Status(Code::refused,
                directory.status().message() + within + "; or name another with MUSTER_RUN_DIR");
}

bool has_live_rank(int job) {
  for (const auto& name : names_in(job)) {
    if (!is_trace(name)) continue;
    const Descriptor file(::openat(job, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (file && is_live(file.get())) return true;
  }
  return false;
}

}  // namespace

std::string run_directory() {
  if (const auto named = env_text("MUSTER_RUN_DIR")) return *named;
  return own_runtime_folder();
}

std::string job_folder(const std::string& job) {
  std::string folder(kJobPrefix);
  // The end of a job's name distinguishes two runs at one address.
  for (const char c : job.size() > 120 ? job.substr(job.size() - 120) : job) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '.';
    if (plain || !folder.ends_with('_')) folder += plain ? c : '_';
  }
  return folder;
}

std::string trace_name(int rank) { return "rank" + std::to_string(rank) + ".trace"; }

Result<Descriptor> open_job_directory(const std::string& base, const std::string& folder) {
  const auto parent = or_another(make_own_folder(base, rules_for(022)));
  if (!parent) return parent.status();
  struct stat info {};
  const bool first = ::fstatat(parent->get(), folder.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0;
  auto made = make_own_folder(folder, rules_for(077), 0700, parent->get());
  if (first && made) prune(base);
  return or_another(std::move(made), " (in " + base + ")");
}

bool is_live(int trace_file) {
  if (::flock(trace_file, LOCK_SH | LOCK_NB) != 0) return errno == EWOULDBLOCK;
  ::flock(trace_file, LOCK_UN);
  return false;
}

std::vector<JobDirectory> list_jobs(const std::string& base) {
  std::vector<JobDirectory> jobs;
  const Descriptor parent(::open(base.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!parent) return jobs;
  for (const auto& name : names_in(parent.get())) {
    struct stat info {};
    if (!name.starts_with(kJobPrefix) ||
        ::fstatat(parent.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISDIR(info.st_mode))
      continue;
    std::string path = base;
    path.append("/").append(name);
    jobs.push_back({std::move(path),
                    std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec});
  }
  std::sort(jobs.begin(), jobs.end(),
            [](const auto& a, const auto& b) { return a.changed_ns > b.changed_ns; });
  return jobs;
}

void prune(const std::string& base) {
  const std::int64_t oldest = (std::int64_t{::time(nullptr)} - kKeptSeconds) * 1'000'000'000;
  std::size_t kept = 0;
  for (const auto& [path, changed] : list_jobs(base)) {
    if (++kept <= kKeptJobs && changed >= oldest) continue;
    const auto job = open_own_folder(path, rules_for(077));
    if (!job || has_live_rank(job->get())) continue;
    for (const auto& name : names_in(job->get())) {
      if (is_trace(name)) ::unlinkat(job->get(), name.c_str(), 0);
    }
    ::rmdir(path.c_str());
  }
}

}  // namespace muster::trace

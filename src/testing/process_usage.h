// SPDX-License-Identifier: BSD-3-Clause
/// The system's resources that this process holds, to show that a test gives back all that it took.
#pragma once

#include <dirent.h>
#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <limits>
#include <string>

namespace muster::testing {

/// Open file descriptors, those of standard input, output and error among them.
inline int open_descriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return -1;
  int count = 0;
  while (const dirent* entry = ::readdir(folder)) count += entry->d_name[0] != '.' ? 1 : 0;
  ::closedir(folder);
  return count - 1;  // the folder's own
}

struct MemoryInUse {
  std::size_t own = 0;     ///< bytes of anonymous memory that are resident
  std::size_t shared = 0;  ///< bytes of memory files that are resident here
};
/// After freed memory has been given back to the system as far as the allocator can.
inline MemoryInUse memory_in_use() {
  ::malloc_trim(0);
  MemoryInUse use;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::size_t kib = 0;
    if (word == "RssAnon:" && status >> kib) use.own = kib * 1024;
    if (word == "RssShmem:" && status >> kib) use.shared = kib * 1024;
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return use;
}

/// Bytes of anonymous and shared memory that this process answers for: what it shares is divided by
/// those who have it mapped (PSS, without files). Summed over all who share it is what they take
/// together; each alone also grows by what it only comes to look at of the others'. 0 where the
/// system does not tell.
inline std::size_t proportional_memory() {
  ::malloc_trim(0);
  std::size_t bytes = 0;
  std::ifstream sums("/proc/self/smaps_rollup");
  for (std::string word; sums >> word;) {
    std::size_t kib = 0;
    if ((word == "Pss_Anon:" || word == "Pss_Shmem:") && sums >> kib) bytes += kib * 1024;
    sums.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return bytes;
}

/// Sanitizers keep freed memory in quarantine: resident memory says nothing under them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kMemoryTells = false;
#else
inline constexpr bool kMemoryTells = true;
#endif

/// Sets the soft limit of open files while it lives, as far as the hard limit goes.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(std::size_t wanted) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    limit_ = static_cast<std::size_t>(std::min<rlim_t>(wanted, before_.rlim_max));
    const rlimit now{limit_, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &now);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;

  std::size_t limit() const { return limit_; }

 private:
  rlimit before_{};
  std::size_t limit_ = 0;
};

}  // namespace muster::testing

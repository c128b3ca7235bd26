// SPDX-License-Identifier: BSD-3-Clause
#include "core/wait/topology.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <sstream>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "core/base/process/limits.h"

namespace muster {
namespace {

/// As many as Linux can be built for: it refuses to tell its mask to who has less room than its own
/// takes, as cpu_set_t has on large machines.
struct Mask {
  static constexpr std::size_t kBits = 1 << 13;
  alignas(cpu_set_t) std::array<unsigned char, kBits / 8> bytes{};
  cpu_set_t* set() { return reinterpret_cast<cpu_set_t*>(bytes.data()); }
};

}  // namespace

std::vector<int> own_hardware_threads() {
  std::vector<int> numbers;
  Mask mask;
  if (::sched_getaffinity(0, sizeof mask.bytes, mask.set()) != 0) return numbers;
  for (std::size_t number = 0; number < Mask::kBits; ++number) {
    if (CPU_ISSET_S(number, sizeof mask.bytes, mask.set()))
      numbers.push_back(static_cast<int>(number));
  }
  return numbers;
}

Status bind_to_hardware_thread(int number) {
  const std::string what = "cannot run on hardware thread " + std::to_string(number) + " alone";
  if (number < 0 || static_cast<std::size_t>(number) >= Mask::kBits)
    return Status(Code::invalid_argument, what + ": there is none");
  Mask mask;
  CPU_SET_S(static_cast<std::size_t>(number), sizeof mask.bytes, mask.set());
  if (::sched_setaffinity(0, sizeof mask.bytes, mask.set()) == 0) return {};
  return Status(Code::invalid_argument, what + ": " + errno_text(errno) +
                                            "; there is none, or this process may not have it");
}

namespace {

constexpr int kMostThreads = 1 << 13;

/// Parses a CPU list in the kernel's format, such as "0-3,8".
std::vector<int> numbers_in(std::string_view list) {
  std::vector<int> numbers;
  const char* const end = list.data() + list.size();
  for (const char* at = list.data(); at != end;) {
    int low = 0;
    auto [next, error] = std::from_chars(at, end, low);
    if (error != std::errc()) break;
    int high = low;
    if (next != end && *next == '-') {
      const auto range = std::from_chars(next + 1, end, high);
      next = range.ptr;
      error = range.ec;
    }
    if (error != std::errc() || low < 0 || high >= kMostThreads) break;
    for (int number = low; number <= high; ++number) numbers.push_back(number);
    if (next == end || *next != ',') break;
    at = next + 1;
  }
  return numbers;
}

std::vector<int> allowed_threads(const std::string& root) {
  if (root.empty()) return own_hardware_threads();
  constexpr std::string_view kField = "Cpus_allowed_list:";
  const std::string status = small_file(root + "/proc/self/status").value_or("");
  const auto at = status.find(kField);
  if (at == std::string::npos) return {};
  return numbers_in(
      std::string_view(status).substr(status.find_first_not_of(" \t", at + kField.size())));
}

/// CPU limit of one control group; 0: none.
double quota_of(const ControlGroup& group) {
  std::string text;
  if (group.unified) {
    text = small_file(group.folder + "/cpu.max").value_or("");
  } else {
    text = small_file(group.folder + "/cpu.cfs_quota_us").value_or("") + " " +
           small_file(group.folder + "/cpu.cfs_period_us").value_or("");
  }
  std::istringstream words(text);
  double quota = 0, period = 0;
  if (!(words >> quota >> period) || quota <= 0 || period <= 0) return 0;
  return quota / period;
}

}  // namespace

std::vector<int> own_cores(const std::string& root) {
  auto threads = allowed_threads(root);
  const std::string cpus = root + "/sys/devices/system/cpu/";
  if (small_file(cpus + "smt/active").value_or("1").starts_with('0')) return threads;
  std::vector<int> cores;
  std::vector<bool> counted(kMostThreads);  // already counted through a sibling
  for (const int thread : threads) {
    if (counted[static_cast<std::size_t>(thread)]) continue;
    const auto list =
        small_file(cpus + "cpu" + std::to_string(thread) + "/topology/thread_siblings_list");
    auto siblings = numbers_in(list.value_or(""));
    if (siblings.empty()) siblings = {thread};
    cores.push_back(siblings.front());
    for (const int sibling : siblings) counted[static_cast<std::size_t>(sibling)] = true;
  }
  std::ranges::sort(cores);
  return cores;
}

double cpu_quota(const std::string& root) {
  double least = 0;
  for (const ControlGroup& group : control_groups("cpu", root)) {
    const double quota = quota_of(group);
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
  }
  return least;
}

int cores_within(std::size_t cores, double quota) {
  auto count = static_cast<int>(std::clamp<std::size_t>(cores, 1, kMostThreads));
  if (quota > 0 && quota < count) count = std::max(1, static_cast<int>(quota));
  return count;
}

int usable_cores() {
  static const int cores = cores_within(own_cores().size(), cpu_quota());
  return cores;
}

}  // namespace muster

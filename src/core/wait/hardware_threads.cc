#include "core/wait/hardware_threads.h"

#include <sched.h>

#include <array>
#include <cerrno>
#include <string>

#include "core/base/descriptor.h"

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

}  // namespace muster

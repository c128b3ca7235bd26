#include "muster/base/thread_rest.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "muster/base/descriptor.h"

namespace muster {
namespace {

/// How often the thread has gone to sleep, where it sleeps now; -1 where it does not, or has ended.
std::int64_t switches_of_sleeper(pid_t thread) {
  const auto path = "/proc/self/task/" + std::to_string(thread) + "/status";
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 4096> text{};
  const auto length = file ? ::read(file.get(), text.data(), text.size() - 1) : -1;
  if (length <= 0) return -1;
  const std::string_view all(text.data(), static_cast<std::size_t>(length));
  constexpr std::string_view kState = "\nState:\t", kSwitches = "\nvoluntary_ctxt_switches:\t";
  const auto state = all.find(kState), switches = all.find(kSwitches);
  if (state == all.npos || switches == all.npos || all[state + kState.size()] != 'S') return -1;
  return std::strtoll(all.data() + switches + kSwitches.size(), nullptr, 10);
}

}  // namespace

pid_t ThreadRest::this_thread() { return static_cast<pid_t>(::syscall(SYS_gettid)); }

Duration ThreadRest::asleep_for(TimePoint now) {
  const auto switches = switches_of_sleeper(thread_);
  if (switches < 0 || switches != switches_) {
    switches_ = switches;
    since_ = now;
  }
  return now - since_;
}

}  // namespace muster

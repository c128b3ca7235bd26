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

/// What the system says of a thread in one of its files; empty where it has ended.
class ThreadFile {
 public:
  ThreadFile(pid_t thread, const char* name) {
    const auto path = "/proc/self/task/" + std::to_string(thread) + "/" + name;
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    const auto length = file ? ::read(file.get(), text_.data(), text_.size() - 1) : -1;
    length_ = length > 0 ? static_cast<std::size_t>(length) : 0;
  }
  std::string_view text() const { return {text_.data(), length_}; }  // a zero follows

 private:
  std::array<char, 4096> text_{};
  std::size_t length_ = 0;
};

/// How often the thread has gone to sleep, where it sleeps now; -1 where it does not, or has ended.
std::int64_t switches_of_sleeper(pid_t thread) {
  const ThreadFile file(thread, "status");
  const std::string_view all = file.text();
  constexpr std::string_view kState = "\nState:\t", kSwitches = "\nvoluntary_ctxt_switches:\t";
  const auto state = all.find(kState), switches = all.find(kSwitches);
  if (state == all.npos || switches == all.npos || all[state + kState.size()] != 'S') return -1;
  return std::strtoll(all.data() + switches + kSwitches.size(), nullptr, 10);
}

/// For how long the thread has had a core or waited for one, in nanoseconds; -1 where it is not
/// known.
std::int64_t time_awake(pid_t thread) {
  const ThreadFile file(thread, "schedstat");
  if (file.text().empty()) return -1;
  char* next = nullptr;
  const auto ran = std::strtoll(file.text().data(), &next, 10);
  return ran + std::strtoll(next, nullptr, 10);
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

Duration ThreadRest::idle_for(TimePoint now) {
  const auto awake = time_awake(thread_);
  if (awake < 0 || awake_ < 0 || std::chrono::nanoseconds(awake - awake_) * 4 > now - idle_since_) {
    awake_ = awake;
    idle_since_ = now;
  }
  return now - idle_since_;
}

}  // namespace muster

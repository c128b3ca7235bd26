#include "core/wait/callbacks/thread_rest.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "core/tunables/tunables.h"

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

bool ThreadRest::stands_still(TimePoint now, TimePoint began, Duration asleep) {
  const bool idle = idle_for(now) >= tunables().callback_idle;  // each look counts
  return asleep_for(now) >= asleep || idle || now - began >= tunables().callback_longest;
}

std::optional<const void*> ThreadRest::sleeps_on() const {
  const ThreadFile file(thread_, "syscall");
  if (file.text().empty()) return std::nullopt;
  // "202 0x7f22e4000ba0 0x189 0x0 0x0 ...": the call and its arguments, or "running".
  char* next = nullptr;
  const long call = std::strtol(file.text().data(), &next, 10);
  const auto word = std::strtoull(next, &next, 16);
  const auto operation = std::strtoull(next, &next, 16) & FUTEX_CMD_MASK;
  std::strtoull(next, &next, 16);  // the value that the word had
  const auto limit = std::strtoull(next, &next, 16);
  const bool on_condition = call == SYS_futex && operation == FUTEX_WAIT_BITSET && limit == 0;
  return on_condition ? reinterpret_cast<const void*>(word) : nullptr;  // NOLINT
}

}  // namespace muster

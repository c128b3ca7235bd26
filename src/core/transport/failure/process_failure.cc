// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/failure/process_failure.h"

#include <cxxabi.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"

namespace muster::transport {
namespace {

// A terminating thread may hold any lock, so another thread notifies the other ranks. The
// terminating one waits this long for it.
constexpr auto kTerminateLimit = std::chrono::milliseconds(1500);  // limit: of an ending process
// Limit of a reason's length: it is quoted within another rank's error.
constexpr std::size_t kMostText = 1000;  // limit: of a sentence

struct Jobs {
  // Guards all but `terminate_before`, which a terminating thread reads while it may hold any lock.
  // Fabrics are called, and destroyed, without it.
  std::mutex mutex;
  std::vector<std::weak_ptr<Fabric>> fabrics;
  std::string why;
  std::vector<int> earlier;
  std::string trouble;
  std::string exception;
  std::vector<int> earlier_of_exception;
  std::terminate_handler terminate_before = nullptr;
};

// Never destroyed: exit handlers and other threads may use it late.
Jobs& jobs() {
  static Jobs* const all = new Jobs;
  return *all;
}

std::string described(const std::exception_ptr& exception) {
  if (exception == nullptr) return "std::terminate was called";
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& error) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(typeid(error).name(), nullptr, nullptr, &status), &std::free);
    return std::string(name != nullptr ? name.get() : typeid(error).name()) + ": " + error.what();
  } catch (...) {
    return "an exception that is no std::exception was not caught";
  }
}

/// Signals that the other ranks have been notified.
class Notified {
 public:
  void end() {
    const std::lock_guard guard(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kTerminateLimit, [&] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

[[noreturn]] void on_terminate() {
  static std::atomic_flag begun = ATOMIC_FLAG_INIT;
  static Notified& notified = *new Notified;  // never destroyed: a thread may use it late
  if (!begun.test_and_set()) {
    auto notifier = start_thread("a thread that tells of this process's failure",
                                 [exception = std::current_exception()] {
                                   tell_process_failure(described(exception));
                                   notified.end();
                                 });
    // If no thread can be started, the others see this process end.
    notifier.ok() ? notifier->detach() : notified.end();
  }
  notified.wait();  // a second terminating thread waits too, since it would end the process
  if (jobs().terminate_before != nullptr) jobs().terminate_before();
  std::abort();
}

std::string shortened(std::string text) {
  text.resize(std::min(text.size(), kMostText));
  return text;
}

/// The fabrics that are still open.
std::vector<std::shared_ptr<Fabric>> open_fabrics(const Jobs& all) {
  std::vector<std::shared_ptr<Fabric>> fabrics;
  for (const auto& each : all.fabrics) {
    if (auto fabric = each.lock()) fabrics.push_back(std::move(fabric));
  }
  return fabrics;
}

void on_process_exit(int status, void*) {
  Jobs& all = jobs();
  std::string trouble, exception;
  std::vector<int> earlier;
  {
    const std::lock_guard guard(all.mutex);
    trouble = all.trouble;
    exception = all.exception;
    earlier = all.earlier_of_exception;
  }
  const std::string exits = "its process ended with exit status " + std::to_string(status) +
                            " and had not called destroy_process_group";
  const bool failed = status != EXIT_SUCCESS;
  if (failed) note_process_failure(exception, std::move(earlier));
  tell_process_failure(failed ? (trouble.empty() ? exits : trouble) : std::string());
  leave_process_jobs();
}

}  // namespace

void leave_process_jobs() {
  Jobs& all = jobs();
  std::vector<std::shared_ptr<Fabric>> fabrics;
  std::string trouble;
  {
    const std::lock_guard guard(all.mutex);
    fabrics = open_fabrics(all);
    trouble = all.trouble;
  }
  for (const auto& fabric : fabrics)
    if (!trouble.empty()) fabric->leave_unclosed(trouble);
}

void note_process_failure(std::string why, std::vector<int> earlier) {
  Jobs& all = jobs();
  const std::lock_guard guard(all.mutex);
  if (!all.why.empty() || why.empty()) return;
  all.why = shortened(std::move(why));
  all.earlier = std::move(earlier);
}

void note_process_exception(std::string what, std::vector<int> earlier) {
  Jobs& all = jobs();
  const std::lock_guard guard(all.mutex);
  all.exception = shortened(std::move(what));
  all.earlier_of_exception = std::move(earlier);
}

void note_process_trouble(std::string what) {
  Jobs& all = jobs();
  const std::lock_guard guard(all.mutex);
  if (all.trouble.empty()) all.trouble = shortened(std::move(what));
}

void tell_process_failure(const std::string& unless_noted) {
  note_process_failure(unless_noted);
  Jobs& all = jobs();
  std::vector<std::shared_ptr<Fabric>> fabrics;
  std::string why;
  std::vector<int> earlier;
  {
    const std::lock_guard guard(all.mutex);
    if (all.why.empty()) return;
    why = all.why;
    earlier = all.earlier;
    fabrics = open_fabrics(all);
  }
  for (const auto& fabric : fabrics) fabric->fail_rank(why, earlier);
}

void follow_process_failure(const std::shared_ptr<Fabric>& fabric) {
  Jobs& all = jobs();
  const std::lock_guard guard(all.mutex);
  if (all.terminate_before == nullptr) {
    if (::on_exit(&on_process_exit, nullptr) != 0)
      log(LogLevel::warning,
          "no handler for this process's exit can be registered: if it ends without "
          "destroy_process_group, the other ranks see only that it is gone");
    // Known before the handler can run.
    all.terminate_before = std::get_terminate();
    std::set_terminate(&on_terminate);
  }
  std::erase_if(all.fabrics, [](const auto& each) { return each.expired(); });
  all.fabrics.push_back(fabric);
}

}  // namespace muster::transport

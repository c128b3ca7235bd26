#include "muster/transport/process_failure.h"

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
#include <system_error>
#include <thread>
#include <typeinfo>
#include <utility>

namespace muster::transport {
namespace {

// A thread that terminates may hold any lock: the others are told by another one, for which it
// waits so long.
constexpr auto kTerminateLimit = std::chrono::milliseconds(1500);  // limit: of an ending process
// Of a reason. What is longer helps nobody in the middle of another rank's error.
constexpr std::size_t kMostText = 1000;  // limit: of a sentence

struct Jobs {
  std::mutex mutex;
  std::vector<std::weak_ptr<Fabric>> fabrics;
  std::string why;
  std::vector<int> earlier;
  std::terminate_handler terminate_before = nullptr;
};

// Never destroyed: exit handlers and other threads may come late.
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

[[noreturn]] void on_terminate() {
  struct Told {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  static std::atomic_flag begun = ATOMIC_FLAG_INIT;
  if (!begun.test_and_set()) {
    const auto told = std::make_shared<Told>();
    try {
      std::thread([told, exception = std::current_exception()] {
        tell_process_failure(described(exception));
        const std::lock_guard guard(told->mutex);
        told->done = true;
        told->changed.notify_all();
      }).detach();
      std::unique_lock lock(told->mutex);
      told->changed.wait_for(lock, kTerminateLimit, [&] { return told->done; });
    } catch (const std::system_error&) {  // no thread to be had: the others see this process end
    }
  }
  if (jobs().terminate_before != nullptr) jobs().terminate_before();
  std::abort();
}

void on_process_exit(int status, void*) {
  const bool failed = status != EXIT_SUCCESS;
  tell_process_failure(failed ? "its process ended with exit status " + std::to_string(status) +
                                    " and had not called destroy_process_group"
                              : std::string());
}

}  // namespace

void note_process_failure(std::string why, std::vector<int> earlier) {
  Jobs& all = jobs();
  const std::lock_guard guard(all.mutex);
  if (!all.why.empty() || why.empty()) return;
  all.why = std::move(why);
  all.why.resize(std::min(all.why.size(), kMostText));
  all.earlier = std::move(earlier);
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
    for (const auto& each : all.fabrics) {
      if (auto fabric = each.lock()) fabrics.push_back(std::move(fabric));
    }
  }
  for (const auto& fabric : fabrics) fabric->fail_rank(why, earlier);
}

void follow_process_failure(const std::shared_ptr<Fabric>& fabric) {
  Jobs& all = jobs();
  const std::lock_guard guard(all.mutex);
  if (all.terminate_before == nullptr) {
    ::on_exit(&on_process_exit, nullptr);
    all.terminate_before = std::set_terminate(&on_terminate);
  }
  std::erase_if(all.fabrics, [](const auto& each) { return each.expired(); });
  all.fabrics.push_back(fabric);
}

}  // namespace muster::transport

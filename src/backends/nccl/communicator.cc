// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/communicator.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/group/errors.h"
#include "core/tunables/tunables.h"
#include "muster/clock.h"

namespace muster::nccl {

NcclSettings::NcclSettings(const NcclLibrary& library, const ProcessGroupOptions* given) {
  if (const auto* ours = dynamic_cast<const ProcessGroupNCCL::Options*>(given)) given_ = *ours;
  if (group::take(env_flag("TORCH_NCCL_HIGH_PRIORITY")).value_or(false))
    given_.is_high_priority_stream = true;
  const auto& config = given_.config;
  if (config.blocking.value_or(0) != 0)
    group::invalid(
        "ProcessGroupNCCL.Options: config.blocking cannot be set: NCCL cannot abort a communicator "
        "whose calls block, and timeouts and errors abort");
  constexpr int kLater = Config::kLater;
  const struct {
    bool is_set;
    const char* name;
    int since;
  } fields[] = {
      {config.cga_cluster_size.has_value(), "cga_cluster_size", 21700},
      {config.min_ctas.has_value(), "min_ctas", 21700},
      {config.max_ctas.has_value(), "max_ctas", 21700},
      {config.net_name.has_value(), "net_name", 21700},
      {config.split_share.has_value(), "split_share", 21800},
      {config.traffic_class.has_value(), "traffic_class", kLater},
      {config.comm_name.has_value(), "comm_name", kLater},
      {config.collnet_enable.has_value(), "collnet_enable", kLater},
      {config.cta_policy.has_value(), "cta_policy", kLater},
      {config.shrink_share.has_value(), "shrink_share", kLater},
      {config.nvls_ctas.has_value(), "nvls_ctas", kLater},
  };
  for (const auto& field : fields) {
    if (!field.is_set) continue;
    is_later_ = is_later_ || field.since == kLater;
    if (library.version_code() < field.since)  // it would ignore the field
      throw DistBackendError("ProcessGroupNCCL.Options: config." + std::string(field.name) +
                                 " came with NCCL 2." + std::to_string(field.since / 100 % 100) +
                                 ", and this is " + library.text(),
                             Code::unsupported);
  }
}

Config NcclSettings::config() const {
  const auto& given = given_.config;
  Config config;
  config.blocking = 0;
  const auto set = [](int& field, const std::optional<int>& value) {
    if (value) field = *value;
  };
  set(config.cga_cluster_size, given.cga_cluster_size);
  set(config.min_ctas, given.min_ctas);
  set(config.max_ctas, given.max_ctas);
  set(config.split_share, given.split_share);
  if (given.net_name) config.net_name = given.net_name->c_str();
  if (!is_later_) return config;
  config.size = sizeof(Config);
  config.version = Config::kLater;
  set(config.traffic_class, given.traffic_class);
  set(config.collnet_enable, given.collnet_enable);
  set(config.cta_policy, given.cta_policy);
  set(config.shrink_share, given.shrink_share);
  set(config.nvls_ctas, given.nvls_ctas);
  if (given.comm_name) config.comm_name = given.comm_name->c_str();
  return config;
}

NcclCommunicator::~NcclCommunicator() {
  if (handle_ == nullptr || abandoned_) return;
  if (revoked_ || !connected_) {
    abort();
    return;
  }
  const c10::DeviceGuard on(device_);
  library_->functions().comm_destroy(handle_);
}

std::string NcclCommunicator::explanation(ErrorCode code) const {
  std::string detail;
  if (const char* const last = library_->functions().get_last_error(nullptr))
    if (*last != 0) detail = std::string(" (") + last + ")";
  return library_->error_text(code) + detail + ", says " + library_->text() +
         "; NCCL_DEBUG=INFO shows more";
}

void NcclCommunicator::fail(const std::string& what, ErrorCode code) const {
  throw DistBackendError(what + ": " + explanation(code), Code::internal);
}

void NcclCommunicator::check(ErrorCode result, const char* function) const {
  if (result != kSuccess && result != kInProgress) fail(function, result);
}

UniqueId NcclCommunicator::unique_id(const NcclLibrary& library) {
  UniqueId id{};
  if (const auto code = library.functions().get_unique_id(&id); code != kSuccess)
    throw DistBackendError("ncclGetUniqueId: " + library.error_text(code) + ", says " +
                               library.text() + "; NCCL_DEBUG=INFO shows more",
                           Code::internal);
  return id;
}

void NcclCommunicator::open(std::vector<UniqueId> ids, int ranks, int rank, const GiveUp& give_up) {
  const c10::DeviceGuard on(device_);
  const auto& functions = library_->functions();
  auto config = settings_->config();
  const bool is_one = ids.size() == 1;
  const char* const function = is_one ? "ncclCommInitRankConfig" : "ncclCommInitRankScalable";
  ErrorCode code;
  {
    // `handle_` is there from now on, while NCCL still connects: so `abort` can end that.
    const std::lock_guard lock(mutex_);
    code = is_one ? functions.comm_init_rank_config(&handle_, ranks, ids.front(), rank, &config)
                  : functions.comm_init_rank_scalable(
                        &handle_, ranks, rank, static_cast<int>(ids.size()), ids.data(), &config);
  }
  check(code, function);
  poll(function, give_up);
  connected_ = true;
}

void NcclCommunicator::open_from(NcclCommunicator& parent, const char* function,
                                 const Derive& derive, const GiveUp& give_up) {
  const c10::DeviceGuard on(device_);
  auto config = settings_->config();
  ErrorCode code;
  {
    const std::scoped_lock lock(mutex_, parent.mutex_);
    if (parent.handle_ == nullptr)
      throw DistBackendError(std::string(function) + ": the communicator was aborted",
                             Code::aborted);
    code = derive(parent.handle_, &handle_, &config);
  }
  check(code, function);
  parent.poll(function, give_up);  // NCCL tells of the new one's progress by the old one's
  if (handle_ == nullptr) return;
  poll(function, give_up);
  connected_ = true;
}

void NcclCommunicator::open_by_split(NcclCommunicator& parent, int color, int key,
                                     const GiveUp& give_up) {
  open_from(
      parent, "ncclCommSplit",
      [&](CommHandle from, CommHandle* made, Config* config) {
        return library_->functions().comm_split(from, color, key, made, config);
      },
      give_up);
}

void NcclCommunicator::open_by_shrink(NcclCommunicator& parent, std::vector<int> excluded,
                                      const GiveUp& give_up) {
  constexpr int kParentIsQuiet = 0;
  open_from(
      parent, "ncclCommShrink",
      [&](CommHandle from, CommHandle* made, Config* config) {
        return library_->functions().comm_shrink(
            from, excluded.data(), static_cast<int>(excluded.size()), made, config, kParentIsQuiet);
      },
      give_up);
}

void NcclCommunicator::need(const char* function) const {
  if (const auto status = library_->need(function); !status.ok())
    throw DistBackendError(status.message(), status.code());
}

UniqueId NcclCommunicator::growth_id() {
  need("ncclCommGetUniqueId");
  const c10::DeviceGuard on(device_);
  const std::lock_guard lock(mutex_);
  if (handle_ == nullptr)
    throw DistBackendError("ncclCommGetUniqueId: the communicator was aborted", Code::aborted);
  UniqueId id{};
  check(library_->functions().comm_get_unique_id(handle_, &id), "ncclCommGetUniqueId");
  return id;
}

void NcclCommunicator::begin_growth(NcclCommunicator& parent, int ranks, const UniqueId* id) {
  need("ncclCommGrow");
  constexpr int kKeepsItsPlace = -1;
  const c10::DeviceGuard on(device_);
  auto config = settings_->config();
  const std::scoped_lock lock(mutex_, parent.mutex_);
  if (parent.handle_ == nullptr)
    throw DistBackendError("ncclCommGrow: the communicator was aborted", Code::aborted);
  check(
      library_->functions().comm_grow(parent.handle_, ranks, id, kKeepsItsPlace, &handle_, &config),
      "ncclCommGrow");
}

void NcclCommunicator::begin_joining(const UniqueId& id, int ranks, int rank) {
  need("ncclCommGrow");
  const c10::DeviceGuard on(device_);
  auto config = settings_->config();
  const std::lock_guard lock(mutex_);
  check(library_->functions().comm_grow(nullptr, ranks, &id, rank, &handle_, &config),
        "ncclCommGrow");
}

void NcclCommunicator::finish_growth(NcclCommunicator* parent, const GiveUp& give_up) {
  const c10::DeviceGuard on(device_);
  if (parent != nullptr) parent->poll("ncclCommGrow", give_up);
  poll("ncclCommGrow", give_up);
  connected_ = true;
}

void NcclCommunicator::take(NcclCommunicator& opened) {
  const std::scoped_lock lock(mutex_, opened.mutex_);
  handle_ = std::exchange(opened.handle_, nullptr);
  connected_ = opened.connected_.load();
}

namespace {

/// Held while a thread issues operations on that device. NCCL: "it is not safe to issue NCCL
/// operations in parallel to independent communicators located on the same device with multiple
/// threads". It is released before NCCL has enqueued them in the background: the first operations
/// of a communicator connect it with its peers then, so ranks whose threads come in other orders
/// would wait for each other.
std::timed_mutex& issuing_on(c10::Device device) {
  static std::mutex mutex;
  static auto* const all = new std::map<c10::DeviceIndex, std::timed_mutex>;
  const std::lock_guard lock(mutex);
  return (*all)[device.index()];
}

/// NCCL may keep the thread that has it: the others wait only as long as their group goes on.
std::unique_lock<std::timed_mutex> issue_on(c10::Device device,
                                            const NcclCommunicator::GiveUp& give_up) {
  std::unique_lock issuing(issuing_on(device), std::defer_lock);
  while (!issuing.try_lock_for(tunables().nccl_look)) give_up();
  return issuing;
}

}  // namespace

void NcclCommunicator::run(const std::string& what, const Enqueue& enqueue, const GiveUp& give_up) {
  const c10::DeviceGuard on(device_);
  while (!try_run(what, enqueue, give_up)) poll(what, give_up);
  poll(what, give_up);
}

/// Returns false while NCCL is still busy with an earlier call: it would refuse this one.
bool NcclCommunicator::try_run(const std::string& what, const Enqueue& enqueue,
                               const GiveUp& give_up) {
  // Before `mutex_`, which those who abort need.
  const auto issuing = issue_on(device_, give_up);
  const auto lock = hold(give_up);
  if (aborted_ || revoked_ || handle_ == nullptr)
    throw DistBackendError(what + ": the communicator was aborted", Code::aborted);
  const auto& functions = library_->functions();
  // With such an error NCCL would refuse the call, without a word of where it comes from.
  ErrorCode state = kSuccess;
  check(functions.comm_get_async_error(handle_, &state), "ncclCommGetAsyncError");
  if (state == kInProgress) return false;
  if (state != kSuccess) throw AsyncError(what, explanation(state));
  check(functions.group_start(), "ncclGroupStart");
  try {
    enqueue(handle_);
  } catch (...) {
    functions.group_end();
    throw;
  }
  if (const auto code = functions.group_end(); code != kSuccess && code != kInProgress)
    fail(what, code);
  return true;
}

std::unique_lock<std::timed_mutex> NcclCommunicator::hold(const GiveUp& give_up) {
  std::unique_lock lock(mutex_, std::defer_lock);
  while (!lock.try_lock_for(tunables().nccl_look)) give_up();
  return lock;
}

/// Releases the lock between two looks, so that `stop` and `abort` get it.
void NcclCommunicator::poll(const std::string& what, const GiveUp& give_up) {
  for (std::int64_t polls = 0;; ++polls) {
    ErrorCode state = kSuccess;
    {
      const auto lock = hold(give_up);
      if (aborted_) throw DistBackendError(what + ": the communicator was aborted", Code::aborted);
      check(library_->functions().comm_get_async_error(handle_, &state), "ncclCommGetAsyncError");
    }
    if (state == kSuccess) return;
    if (state != kInProgress && connected_) throw AsyncError(what, explanation(state));
    if (state != kInProgress) fail(what, state);
    give_up();
    if (polls < tunables().nccl_polls)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(tunables().nccl_poll);
  }
}

std::string NcclCommunicator::async_error() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || handle_ == nullptr) return {};
  ErrorCode state = kSuccess;
  const auto code = library_->functions().comm_get_async_error(handle_, &state);
  if (code != kSuccess) state = code;
  if (state == kSuccess || state == kInProgress) return {};
  return explanation(state);
}

namespace {

/// Returns false, as what cannot be revoked must be aborted.
bool is_aborted_instead(const std::exception& error) {
  log(LogLevel::info, std::string(error.what()) + "; the communicator is aborted instead");
  return false;
}

}  // namespace

std::function<bool()> NcclCommunicator::begin_revoke(const AbortLimits& limits) {
  if (!library_->can_revoke()) return [] { return false; };
  try {
    const c10::DeviceGuard on(device_);
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!lock.try_lock_until(limits.of_next_thread())) {
      abandoned_ = true;
      throw DistBackendError("ncclCommRevoke: a thread is in NCCL", Code::timed_out);
    }
    if (handle_ == nullptr) {
      aborted_ = true;
      return [] { return true; };
    }
    if (std::exchange(revoked_, true)) return [] { return true; };
    check(library_->functions().comm_revoke(handle_, 0), "ncclCommRevoke");
  } catch (const std::exception& error) {
    return [revoked = is_aborted_instead(error)] { return revoked; };
  }
  return [this, limit = limits.threads] {
    try {
      const c10::DeviceGuard on(device_);
      poll("ncclCommRevoke", [limit] {
        if (steady_clock().now() >= limit)
          throw DistBackendError("ncclCommRevoke: no end", Code::timed_out);
      });
      return true;
    } catch (const std::exception& error) {
      return is_aborted_instead(error);
    }
  };
}

bool NcclCommunicator::can_shrink() {
  const std::unique_lock lock(mutex_, tunables().nccl_look);
  return lock.owns_lock() && revoked_ && handle_ != nullptr;
}

CommHandle NcclCommunicator::take_to_abort(TimePoint limit) {
  if (abandoned_) return nullptr;
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!lock.try_lock_until(limit)) {
    log(LogLevel::error, "a thread has been in NCCL for " + describe(tunables().nccl_abort_grace) +
                             " and does not return: its communicator cannot be aborted");
    abandoned_ = true;
    return nullptr;
  }
  aborted_ = true;
  return std::exchange(handle_, nullptr);
}

namespace {

constexpr auto kAbortThread = "the thread that aborts communicators of NCCL";

/// Handles to abort, and whether that has ended. Shared with the thread that does it.
struct AbortGroup {
  std::shared_ptr<const NcclLibrary> library = {};
  std::vector<std::pair<c10::Device, CommHandle>> handles = {};
  std::mutex mutex = {};  // guards the following
  std::condition_variable changed = {};
  bool ended = false;
  ErrorCode failed = kSuccess;  // the first

  void run() {
    const auto& functions = library->functions();
    ErrorCode first = kSuccess;
    const auto note = [&](ErrorCode code) {
      if (first == kSuccess && code != kInProgress) first = code;
    };
    note(functions.group_start());
    for (const auto& [device, handle] : handles) {
      const c10::DeviceGuard on(device);
      note(functions.comm_abort(handle));
    }
    note(functions.group_end());
    const std::lock_guard lock(mutex);
    ended = true;
    failed = first;
    changed.notify_all();
  }
};

}  // namespace

NcclCommunicator::AbortLimits NcclCommunicator::AbortLimits::from_now() {
  const auto grace = tunables().nccl_abort_grace;
  const auto threads = steady_clock().now() + grace;
  return {threads, threads + grace};
}

TimePoint NcclCommunicator::AbortLimits::of_next_thread() const {
  return std::max(threads, deadline_after(steady_clock(), tunables().nccl_look));
}

std::function<bool()> NcclCommunicator::begin_abort(
    const std::vector<NcclCommunicator*>& communicators, const AbortLimits& limits) {
  if (communicators.empty()) return [] { return true; };
  const auto aborted = std::make_shared<AbortGroup>();
  aborted->library = communicators.front()->library_;
  bool all = true;
  for (auto* const communicator : communicators) {
    if (auto* const handle = communicator->take_to_abort(limits.of_next_thread()))
      aborted->handles.emplace_back(communicator->device_, handle);
    all = all && !communicator->abandoned_;
  }
  if (aborted->handles.empty()) return [all] { return all; };
  auto thread = start_thread(kAbortThread, [aborted] { aborted->run(); });
  if (thread.ok())
    (*thread).detach();
  else
    aborted->run();
  const auto end = std::min(limits.end, steady_clock().now() + tunables().nccl_abort_grace);
  return [aborted, end, all] {
    std::unique_lock lock(aborted->mutex);
    const bool ended = aborted->changed.wait_until(lock, end, [&] { return aborted->ended; });
    const auto count = std::to_string(aborted->handles.size());
    if (!ended)
      log(LogLevel::error, "NCCL has not ended the abort of " + count + " communicators within " +
                               describe(tunables().nccl_abort_grace) +
                               ", which all of their members must abort; it goes on with that on "
                               "its own");
    else if (aborted->failed != kSuccess)
      log(LogLevel::error, "NCCL cannot abort " + count +
                               " communicators: " + aborted->library->error_text(aborted->failed));
    return all && ended && aborted->failed == kSuccess;
  };
}

namespace {

constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

/// Swaps the calling thread's mode with `mode`, if the process has CUDA.
void exchange_capture_mode(int& mode) {
  using Exchange = int(int* mode);
  static auto* const exchange =
      reinterpret_cast<Exchange*>(cuda_driver_function("cuThreadExchangeStreamCaptureMode"));
  if (exchange != nullptr) exchange(&mode);
}

}  // namespace

QueriesDuringCapture::QueriesDuringCapture() : mode_(kRelaxed) { exchange_capture_mode(mode_); }
QueriesDuringCapture::~QueriesDuringCapture() { exchange_capture_mode(mode_); }

}  // namespace muster::nccl

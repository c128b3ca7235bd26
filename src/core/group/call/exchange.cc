// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/group/backends/native.h"
#include "core/group/call/call_builder.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/security/secret.h"

namespace muster::group {
namespace {

constexpr Duration kAbortPollInterval = std::chrono::milliseconds(500);  // limit: delay of an error

/// The engine's communicator for CPU memory; null if another backend serves the CPU.
collective::Communicator* native_engine(const ProcessGroup& group) {
  for (const auto& [device, backend] : core_of(group).parts().backends) {
    if (device != c10::DeviceType::CPU) continue;
    const auto* native = dynamic_cast<const NativeBackend*>(backend.get());
    return native == nullptr ? nullptr : native->communicator().get();
  }
  return nullptr;
}

/// Runs `call`, which waits for other members on this thread and polls `give_up` meanwhile.
template <class Call>
void run_polling(ProcessGroup& group, collective::Communicator& engine,
                 const std::function<Status()>& give_up, Call call) {
  Status aborted;
  const auto idle_callback = engine.on_idle([&] {
    if (!aborted.ok()) return;
    aborted = give_up();
    if (!aborted.ok()) core_of(group).abort(aborted.message());
  });
  try {
    call();
  } catch (const DistError&) {
    if (aborted.ok()) throw;
  }
  if (!aborted.ok()) raise(aborted);
}

void run(ProcessGroup& group, Call call, const std::function<Status()>& give_up) {
  CallBuilder(call).check();
  if (!give_up) {
    core_of(group).submit(call);
    return;
  }
  if (auto* engine = native_engine(group))
    return run_polling(group, *engine, give_up, [&] { core_of(group).submit(call); });
  call.make_async();
  const auto work = core_of(group).submit(call);
  if (work == nullptr) return;
  for (;;) {
    try {
      work->wait(kAbortPollInterval);
      return;
    } catch (const DistError&) {
      // The call may just have ended; then its own result counts, not the wait's.
      if (work->is_completed()) {
        work->wait();
        return;
      }
    }
    if (const auto status = give_up(); !status.ok()) {
      core_of(group).abort(status.message());
      raise(status);
    }
  }
}

constexpr FunctionName kExchange = "exchange_text";

/// A member's announcement of its text (size and hash), and its note.
struct CallAnnouncement {
  std::int64_t bytes = 0;
  decltype(short_hash("")) hash{};
  CallNote note{};
  bool same_text(const CallAnnouncement& other) const {
    return bytes == other.bytes && hash == other.hash;
  }
};
constexpr std::int64_t kAnnouncedWords = 5;
static_assert(std::is_trivially_copyable_v<CallAnnouncement> &&
              sizeof(CallAnnouncement) == kAnnouncedWords * sizeof(std::int64_t));

std::vector<CallAnnouncement> announce(ProcessGroup& group, const std::string& mine,
                                       const CallNote& note, TimePoint limit,
                                       const std::function<Status()>& give_up) {
  const CallAnnouncement own{static_cast<std::int64_t>(mine.size()), short_hash(mine), note};
  std::vector<CallAnnouncement> all(static_cast<std::size_t>(group.size()));
  Call call(group, Op::all_gather, kExchange, time_left(steady_clock(), limit));
  if (native_engine(group) != nullptr) {
    // Uses memory instead of tensors; creating tensors takes longer than the rest of a group's
    // creation.
    CallBuilder(call).add_input_memory(at::kLong, std::as_bytes(std::span(&own, 1)));
    for (auto& one : all)
      CallBuilder(call).add_output_memory(std::as_writable_bytes(std::span(&one, 1)));
    run(group, std::move(call), give_up);
    return all;
  }
  auto word = at::empty({kAnnouncedWords}, at::kLong);
  std::memcpy(word.mutable_data_ptr(), &own, sizeof own);
  const auto device = core_of(group).exchange_device();
  word = word.to(device);
  auto words = at::empty({group.size(), kAnnouncedWords}, word.options());
  CallBuilder(call).add_output_parts(words, word);
  run(group, std::move(call), give_up);
  words = words.cpu();
  std::memcpy(all.data(), words.const_data_ptr(), all.size() * sizeof(CallAnnouncement));
  return all;
}

std::vector<std::string> gather_texts(ProcessGroup& group, const std::string& mine,
                                      const std::vector<CallAnnouncement>& announced,
                                      TimePoint limit, const std::function<Status()>& give_up) {
  Call texts(group, Op::all_gather, kExchange, time_left(steady_clock(), limit));
  auto text = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  if (!mine.empty()) std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
  const auto device = core_of(group).exchange_device();
  text = text.to(device);
  CallBuilder(texts).add_input(text);
  std::vector<at::Tensor> received;
  for (std::size_t i = 0; i < announced.size(); ++i) {
    const auto bytes = announced[i].bytes;
    if (bytes < 0 || bytes > kMaxTextBytes)
      invalid("rank " + std::to_string(i) + " of group " + group.name() + " announced a text of " +
              std::to_string(bytes) + " bytes");
    received.push_back(at::empty({bytes}, text.options()));
  }
  CallBuilder(texts).add_output(received);
  run(group, std::move(texts), give_up);
  std::vector<std::string> all;
  for (const auto& one : received) {
    const auto here = one.cpu();
    all.emplace_back(static_cast<const char*>(here.const_data_ptr()),
                     static_cast<std::size_t>(here.numel()));
  }
  return all;
}

TimePoint limit_of(const ProcessGroup& group, std::optional<TimePoint> deadline) {
  return deadline.value_or(deadline_after(steady_clock(), group.timeout()));
}

}  // namespace

std::vector<std::string> exchange_text(const Group& group, const std::string& mine,
                                       std::optional<TimePoint> deadline,
                                       const std::function<Status()>& give_up) {
  const auto limit = limit_of(*group, deadline);
  return gather_texts(*group, mine, announce(*group, mine, {}, limit, give_up), limit, give_up);
}

std::vector<CallNote> compare_calls(const Group& group, const std::string& mine,
                                    std::optional<TimePoint> deadline,
                                    const std::function<Status()>& give_up, const CallNote& note) {
  const auto limit = limit_of(*group, deadline);
  const auto announced = announce(*group, mine, note, limit, give_up);
  if (std::ranges::all_of(announced, [&](const CallAnnouncement& one) {
        return one.same_text(announced.front());
      })) {
    std::vector<CallNote> notes;
    for (const auto& one : announced) notes.push_back(one.note);
    return notes;
  }
  const auto calls = gather_texts(*group, mine, announced, limit, give_up);
  for (std::size_t i = 1; i < calls.size(); ++i) {
    if (calls[i] == calls[0]) continue;
    const auto rank = [&](std::size_t position) {
      return std::to_string(core_of(group).first_rank_of(static_cast<int>(position)));
    };
    throw DistError(
        "the ranks made different groups at the same time: rank " + rank(0) + " called " +
            calls[0] + ", rank " + rank(i) + " called " + calls[i] +
            "; all ranks must make the same groups in the same order, or use_local_synchronization",
        Code::mismatch, {core_of(group).first_rank_of(static_cast<int>(i))});
  }
  raise(Status(Code::internal, "the ranks announced different calls and showed the same"));
}

}  // namespace muster::group

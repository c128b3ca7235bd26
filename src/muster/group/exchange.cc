#include "muster/group/exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#include "muster/base/secret.h"
#include "muster/group/errors.h"

namespace muster::group {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{16} << 20;  // of one text: what a member claims is checked before it allocates
constexpr Duration kAskEvery = std::chrono::milliseconds(500);

void carry_out_looking(ProcessGroup& group, Request request, const std::function<Status()>& give_up) {
  Status hopeless;
  const std::function<void()> look = [&] {
    if (!hopeless.ok()) return;
    hopeless = give_up();
    if (!hopeless.ok()) group.abort(hopeless.message());
  };
  request.while_waiting = &look;
  try {
    group.submit(std::move(request));
  } catch (const DistError&) {
    if (hopeless.ok()) throw;
    raise(hopeless);
  }
}

void carry_out(ProcessGroup& group, Request request, const std::function<Status()>& give_up) {
  if (!give_up) {
    group.submit(std::move(request));
    return;
  }
  if (group.parts().backends.front().second->looks_while_waiting()) return carry_out_looking(group, std::move(request), give_up);
  request.async_op = true;
  const auto work = group.submit(std::move(request));
  if (work == nullptr) return;
  for (;;) {
    try {
      work->wait(kAskEvery);
      return;
    } catch (const DistError&) {
      if (work->is_completed()) {  // in that very moment, perhaps: its own word counts, not that of the wait
        work->wait();
        return;
      }
    }
    if (const auto status = give_up(); !status.ok()) {
      group.abort(status.message());
      raise(status);
    }
  }
}

/// What a member says of its text before it shows it.
struct Announced {
  std::int64_t bytes = 0;
  decltype(short_hash("")) hash{};
  Note note{};
  bool same_text(const Announced& other) const { return bytes == other.bytes && hash == other.hash; }
};
static_assert(std::is_trivially_copyable_v<Announced> && sizeof(Announced) == 5 * sizeof(std::int64_t));

std::vector<Announced> announce(ProcessGroup& group, const std::string& mine, const Note& note, TimePoint limit,
                                const std::function<Status()>& give_up) {
  Request request{.op = Op::all_gather, .name = "exchange_text"};
  const Announced own{static_cast<std::int64_t>(mine.size()), short_hash(mine), note};
  constexpr auto kWords = static_cast<std::int64_t>(sizeof(Announced) / sizeof(std::int64_t));
  auto word = at::empty({kWords}, at::kLong);
  std::memcpy(word.mutable_data_ptr(), &own, sizeof own);
  auto all = at::empty({group.size(), kWords}, at::kLong);
  request.inputs = {{word}};
  for (std::int64_t i = 0; i < group.size(); ++i) request.outputs.push_back({all.select(0, i)});
  request.timeout = time_left(steady_clock(), limit);
  carry_out(group, std::move(request), give_up);
  std::vector<Announced> announced(static_cast<std::size_t>(group.size()));
  std::memcpy(announced.data(), all.const_data_ptr(), announced.size() * sizeof(Announced));
  return announced;
}

std::vector<std::string> show(ProcessGroup& group, const std::string& mine, const std::vector<Announced>& announced, TimePoint limit,
                              const std::function<Status()>& give_up) {
  Request texts{.op = Op::all_gather, .name = "exchange_text"};
  auto text = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  if (!mine.empty()) std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
  texts.inputs = {{text}};
  std::vector<at::Tensor> received;
  for (std::size_t i = 0; i < announced.size(); ++i) {
    const auto bytes = announced[i].bytes;
    if (bytes < 0 || bytes > kMaxBytes)
      invalid("rank " + std::to_string(i) + " of group " + group.name() + " announced a text of " + std::to_string(bytes) + " bytes");
    received.push_back(at::empty({bytes}, at::kByte));
    texts.outputs.push_back({received.back()});
  }
  texts.timeout = time_left(steady_clock(), limit);
  carry_out(group, std::move(texts), give_up);
  std::vector<std::string> all;
  for (const auto& one : received) all.emplace_back(static_cast<const char*>(one.const_data_ptr()), static_cast<std::size_t>(one.numel()));
  return all;
}

TimePoint limit_of(const ProcessGroup& group, std::optional<TimePoint> deadline) {
  return deadline.value_or(deadline_after(steady_clock(), group.timeout()));
}

}  // namespace

std::vector<std::string> exchange_text(const Group& group, const std::string& mine, std::optional<TimePoint> deadline,
                                       const std::function<Status()>& give_up) {
  const auto limit = limit_of(*group, deadline);
  return show(*group, mine, announce(*group, mine, {}, limit, give_up), limit, give_up);
}

std::vector<Note> compare_calls(const Group& group, const std::string& mine, std::optional<TimePoint> deadline,
                                const std::function<Status()>& give_up, const Note& note) {
  const auto limit = limit_of(*group, deadline);
  const auto announced = announce(*group, mine, note, limit, give_up);
  const auto other = std::ranges::find_if(announced, [&](const Announced& one) { return !one.same_text(announced.front()); });
  if (other == announced.end()) {
    std::vector<Note> notes;
    for (const auto& one : announced) notes.push_back(one.note);
    return notes;
  }
  const auto calls = show(*group, mine, announced, limit, give_up);
  const auto at = static_cast<std::size_t>(other - announced.begin());
  const auto rank = [&](std::size_t position) { return group->first_rank_of(static_cast<int>(position)); };
  throw DistError("the ranks made different groups at the same time: rank " + std::to_string(rank(0)) + " called " + calls[0] + ", rank " +
                      std::to_string(rank(at)) + " called " + calls[at] +
                      "; all ranks must make the same groups in the same order, or use_local_synchronization",
                  Code::mismatch, {rank(at)});
}

}  // namespace muster::group

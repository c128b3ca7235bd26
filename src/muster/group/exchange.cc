#include "muster/group/exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "muster/base/secret.h"
#include "muster/group/errors.h"

namespace muster::group {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{16} << 20;  // of one text: what a member claims is checked before it allocates
constexpr Duration kAskEvery = std::chrono::milliseconds(500);

void carry_out(ProcessGroup& group, Request request, const std::function<Status()>& give_up) {
  if (!give_up) {
    group.submit(std::move(request));
    return;
  }
  const auto driving = group.drive_here();  // this thread waits at once; no other need be woken for it
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

/// What a member says of its text before it shows it: the length and a hash.
using Announced = std::array<std::int64_t, 3>;

std::vector<Announced> announce(ProcessGroup& group, const std::string& mine, TimePoint limit, const std::function<Status()>& give_up) {
  Request request{.op = Op::all_gather, .name = "exchange_text"};
  Announced own{static_cast<std::int64_t>(mine.size())};
  const auto hash = short_hash(mine);
  static_assert(sizeof hash == 2 * sizeof(std::int64_t));
  std::memcpy(&own[1], hash.data(), sizeof hash);
  constexpr auto kWords = static_cast<std::int64_t>(std::tuple_size_v<Announced>);
  auto word = at::empty({kWords}, at::kLong);
  std::memcpy(word.mutable_data_ptr(), own.data(), sizeof own);
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
    const auto bytes = announced[i][0];
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
  return show(*group, mine, announce(*group, mine, limit, give_up), limit, give_up);
}

void compare_calls(const Group& group, const std::string& mine, std::optional<TimePoint> deadline, const std::function<Status()>& give_up) {
  const auto limit = limit_of(*group, deadline);
  const auto announced = announce(*group, mine, limit, give_up);
  if (std::adjacent_find(announced.begin(), announced.end(), std::not_equal_to<>()) == announced.end()) return;
  const auto calls = show(*group, mine, announced, limit, give_up);
  for (std::size_t i = 1; i < calls.size(); ++i) {
    if (calls[i] == calls[0]) continue;
    const auto rank = [&](std::size_t position) { return std::to_string(group->first_rank_of(static_cast<int>(position))); };
    throw DistError("the ranks made different groups at the same time: rank " + rank(0) + " called " + calls[0] + ", rank " + rank(i) +
                        " called " + calls[i] + "; all ranks must make the same groups in the same order, or use_local_synchronization",
                    Code::mismatch, {group->first_rank_of(static_cast<int>(i))});
  }
}

}  // namespace muster::group

#include "muster/group/exchange.h"

#include <ATen/ops/empty.h>

#include <chrono>
#include <cstring>
#include <utility>

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

}  // namespace

std::vector<std::string> exchange_text(const Group& group, const std::string& mine, std::optional<TimePoint> deadline,
                                       const std::function<Status()>& give_up) {
  const auto limit = deadline.value_or(deadline_after(steady_clock(), group->timeout()));
  const auto size = static_cast<std::size_t>(group->size());
  Request lengths{.op = Op::all_gather, .name = "exchange_text"};
  auto length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(mine.size());
  auto all_lengths = at::empty({group->size()}, at::kLong);
  lengths.inputs = {{length}};
  for (std::int64_t i = 0; i < group->size(); ++i) lengths.outputs.push_back({all_lengths.narrow(0, i, 1)});
  lengths.timeout = time_left(steady_clock(), limit);
  carry_out(*group, std::move(lengths), give_up);

  Request texts{.op = Op::all_gather, .name = "exchange_text"};
  auto text = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  if (!mine.empty()) std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
  texts.inputs = {{text}};
  std::vector<at::Tensor> received;
  for (std::size_t i = 0; i < size; ++i) {
    const auto bytes = all_lengths.const_data_ptr<std::int64_t>()[i];
    if (bytes < 0 || bytes > kMaxBytes)
      invalid("rank " + std::to_string(i) + " of group " + group->name() + " announced a text of " + std::to_string(bytes) + " bytes");
    received.push_back(at::empty({bytes}, at::kByte));
    texts.outputs.push_back({received.back()});
  }
  texts.timeout = time_left(steady_clock(), limit);
  carry_out(*group, std::move(texts), give_up);

  std::vector<std::string> all;
  for (const auto& one : received) all.emplace_back(static_cast<const char*>(one.const_data_ptr()), static_cast<std::size_t>(one.numel()));
  return all;
}

void compare_calls(const Group& group, const std::string& mine, std::optional<TimePoint> deadline, const std::function<Status()>& give_up) {
  const auto calls = exchange_text(group, mine, deadline, give_up);
  for (std::size_t i = 1; i < calls.size(); ++i) {
    if (calls[i] == calls[0]) continue;
    const auto rank = [&](std::size_t position) { return std::to_string(group->first_rank_of(static_cast<int>(position))); };
    throw DistError("the ranks made different groups at the same time: rank " + rank(0) + " called " + calls[0] + ", rank " + rank(i) +
                        " called " + calls[i] + "; all ranks must make the same groups in the same order, or use_local_synchronization",
                    Code::mismatch, {group->first_rank_of(static_cast<int>(i))});
  }
}

}  // namespace muster::group

#include "core/transport/failure/failure_news.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace muster::transport {
namespace {

// Number of failures kept for streams that are established later.
constexpr std::size_t kNewsKept = 64;  // limit: memory

}  // namespace

void FailureNews::spread_channel_failure(std::uint32_t channel, std::span<const int> members,
                                         const Status& cause, int source) {
  FrameHeader header;
  header.kind = FrameKind::channel_failure;
  header.channel = channel;
  spread({members.begin(), members.end()}, header, encode_cause(cause), source);
}

void FailureNews::spread_rank_failure(int rank, const Status& cause, RankNews news, int source) {
  FrameHeader header;
  header.kind = FrameKind::rank_failure;
  header.message = static_cast<std::uint64_t>(rank);
  header.amount = static_cast<std::uint64_t>(news);
  std::vector<int> all_ranks(static_cast<std::size_t>(engine_.world_size()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  spread(std::move(all_ranks), header, encode_cause(cause), source);
}

void FailureNews::spread(std::vector<int> members, const FrameHeader& header, std::string record,
                         int source) {
  News news{std::move(members), header, std::move(record)};
  tell(news, source);
  told_.push_back(std::move(news));
  if (told_.size() > kNewsKept) told_.pop_front();
}

/// Sends over every established link, and to the members at distances 1, 2, 4, ..., whose links are
/// opened for it. Each rank forwards the news once in the same way, so all receive it in
/// logarithmically many steps, even if some die in between.
void FailureNews::tell(const News& news, int source) {
  const std::vector<int>& members = news.members;
  const auto size = static_cast<int>(members.size());
  const auto me =
      static_cast<int>(std::find(members.begin(), members.end(), engine_.rank()) - members.begin());
  if (me == size) return;
  const auto is_gone = [&](int position) {
    return !engine_.ranks.gone(members[static_cast<std::size_t>(position)]).ok();
  };
  std::vector<bool> finger(members.size());
  for (int distance = 1; distance < size; distance *= 2) {
    int at = (me + distance) % size;
    while (at != me && is_gone(at)) at = (at + 1) % size;
    finger[static_cast<std::size_t>(at)] = true;
  }
  for (int i = 0; i < size; ++i) {
    const int member = members[static_cast<std::size_t>(i)];
    if (i == me || member == source || is_gone(i)) continue;
    const Link* const link = links_.find(member);
    if (finger[static_cast<std::size_t>(i)] || (link != nullptr && link->up_or_connecting()))
      links_.writer.push_control(links_.to(member), news.header, news.record);
  }
}

void FailureNews::tell_earlier(Link& link) {
  for (const News& news : told_) {
    if (news.header.kind == FrameKind::rank_failure &&
        news.header.message == static_cast<std::uint64_t>(link.peer()))
      continue;
    if (std::find(news.members.begin(), news.members.end(), link.peer()) == news.members.end())
      continue;
    link.protocol.out.push_control(news.header, news.record);
  }
}

}  // namespace muster::transport

// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cstring>

#include "testing/sim_job.h"

namespace muster::testing {
namespace {

constexpr std::size_t kPipeBytes = 64 * 1024;  // what a kernel's socket buffer would hold

}  // namespace

SimStream::~SimStream() {
  if (!out_->ended) {
    out_->ended = true;
    out_->end_arrives = std::max(out_->last_arrival, job_.now() + job_.delay());
  }
}

Result<std::size_t> SimStream::write(std::span<const ConstBytes> pieces) {
  if (out_->ended) return Status(Code::network, "the simulated stream was reset");
  std::string bytes;
  std::size_t room = out_->held < kPipeBytes ? kPipeBytes - out_->held : 0;
  if (room > 0 && job_.draw(4) == 0) room = 1 + job_.draw(room);  // a kernel may take any part
  for (const ConstBytes& piece : pieces) {
    const std::size_t take = std::min(room - bytes.size(), piece.size());
    bytes.append(as_text(piece.first(take)));
    if (take < piece.size()) break;
  }
  if (bytes.empty()) return std::size_t{0};
  const std::size_t count = bytes.size();
  job_.note(count);
  out_->sent += count;
  if (out_->cut || job_.partitioned(out_->from, out_->to)) {
    out_->held += count;  // sits in the sender's buffer for ever
    return count;
  }
  out_->last_arrival = std::max(out_->last_arrival, job_.now() + job_.delay());
  out_->held += count;
  out_->parcels.push_back({out_->last_arrival, std::move(bytes)});
  return count;
}

Result<std::size_t> SimStream::read(std::span<const MutableBytes> pieces) {
  std::size_t total = 0;
  for (const MutableBytes& piece : pieces) {
    std::size_t filled = 0;
    while (filled < piece.size() && !in_->parcels.empty() &&
           in_->parcels.front().arrives <= job_.now()) {
      std::string& bytes = in_->parcels.front().bytes;
      const std::size_t take = std::min(bytes.size(), piece.size() - filled);
      std::memcpy(piece.data() + filled, bytes.data(), take);
      bytes.erase(0, take);
      filled += take;
      if (bytes.empty()) in_->parcels.pop_front();
    }
    total += filled;
    if (filled < piece.size()) break;
  }
  if (total > 0) {
    in_->held -= total;
    if (Mailbox* writer = job_.process(in_->from).mailbox) writer->wake();  // there is room again
    return total;
  }
  if (in_->ended && !in_->cut && in_->parcels.empty() && in_->end_arrives <= job_.now()) {
    return Status(Code::closed, "the simulated stream has ended");
  }
  return std::size_t{0};
}

std::optional<LinkFigures> SimStream::figures() const {
  if (!job_.options().figures) return std::nullopt;
  LinkFigures figures = job_.options().figures(out_->from, out_->to);
  figures.sent = out_->sent;
  return figures;
}

}  // namespace muster::testing

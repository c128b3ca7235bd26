#include "muster/store/join.h"

#include <algorithm>
#include <array>

#include "muster/base/secret.h"
#include "muster/store/factory.h"
#include "muster/store/request.h"

namespace muster::store {
namespace {

std::string random_token() {
  std::array<std::byte, 16> token;
  fill_random(token);
  return std::string(as_text(token));
}

Status explain(const Status& status, int rank, const JoinOptions& options) {
  const std::string what = cannot_join(rank, options) + ": ";
  switch (status.code()) {
    case Code::timed_out:
      if (status.ranks().empty()) break;
      return Status(Code::timed_out,
                    what + (status.ranks().size() == 1 ? "rank " : "ranks ") + listed(status.ranks()) +
                        " did not come in time; were they started with the same address" + ", world size and group name? (" +
                        status.message() + ")",
                    status.ranks());
    case Code::mismatch:
      return Status(Code::mismatch,
                    what + "two processes claim one rank, or the world sizes differ; check RANK and WORLD_SIZE of every process (" +
                        status.message() + ")",
                    status.ranks());
    case Code::peer_failed: return Status(Code::peer_failed, what + status.message(), status.ranks());
    default: break;
  }
  return status.with_context(cannot_join(rank, options));
}

}  // namespace

std::string cannot_join(int rank, const JoinOptions& options) {
  const std::string who = rank < 0 ? "this process" : "rank " + std::to_string(rank);
  return who + " of " + std::to_string(options.world_size) + " cannot join " + options.where;
}

Result<Rendezvous> join(const std::shared_ptr<Store>& store, const JoinOptions& options) {
  // The meeting leaves nothing behind in the store, so a process that tries again, or a second run on the same store, finds no old marks.
  // What the members throw together makes a name that nobody had before.
  const std::string key = "muster/join/" + options.scope + "/" + options.group_name;
  const std::string token = random_token();
  int rank = std::max(options.rank, 0);
  auto tokens = store->all_gather(key, rank, options.world_size, token, time_left(steady_clock(), options.deadline));
  while (options.rank < 0 && tokens.status().code() == Code::mismatch && ++rank < options.world_size) {
    tokens = store->all_gather(key, rank, options.world_size, token, time_left(steady_clock(), options.deadline));
  }
  if (!tokens) return explain(tokens.status(), options.rank < 0 ? -1 : rank, options);
  std::string all;
  for (const std::string& each : *tokens) all += each;
  Rendezvous joined;
  joined.rank = rank;
  joined.world_size = options.world_size;
  joined.job = (options.group_name.empty() ? "job" : options.group_name) + "-" + hexadecimal(short_hash(all));
  joined.store = make_prefix_store(joined.job, store);
  if (const auto tcp = options.attend ? std::dynamic_pointer_cast<TcpStore>(store) : nullptr) {
    tcp->set_timeout(time_left(steady_clock(), options.deadline));
    if (Status attends = tcp->attend(joined.job, rank, options.world_size); !attends) return explain(attends, rank, options);
  }
  return joined;
}

}  // namespace muster::store

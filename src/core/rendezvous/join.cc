// SPDX-License-Identifier: BSD-3-Clause
#include "core/rendezvous/join.h"

#include <algorithm>
#include <array>

#include "core/base/exception_status.h"
#include "core/security/secret.h"
#include "core/store/factory.h"
#include "core/store/request.h"
#include "core/store/signed_texts.h"

namespace muster::store {
namespace {

std::string random_token() {
  std::array<std::byte, 16> token;
  fill_random(token);
  return std::string(as_text(token));
}

Status explain(const Status& status, int rank, const MeetingOptions& options) {
  const std::string what = cannot_join(rank, options) + ": ";
  switch (status.code()) {
    case Code::timed_out:
      if (status.ranks().empty()) break;
      return Status(Code::timed_out,
                    what + named_ranks(status.ranks()) +
                        " did not come in time; were they started with the same address" +
                        ", world size and group name? (" + status.message() + ")",
                    status.ranks());
    case Code::mismatch:
      return Status(Code::mismatch,
                    what +
                        "two processes claim one rank, or the world sizes differ; check RANK and "
                        "WORLD_SIZE of every process (" +
                        status.message() + ")",
                    status.ranks());
    case Code::peer_failed:
      return Status(Code::peer_failed, what + status.message(), status.ranks());
    default: break;
  }
  return status.with_context(cannot_join(rank, options));
}

}  // namespace

std::string cannot_join(int rank, const MeetingOptions& options) {
  const std::string who = rank < 0 ? "this process" : "rank " + std::to_string(rank);
  return who + " of " + std::to_string(options.world_size) + " cannot join " + options.where;
}

void abandon(std::shared_ptr<Store> store, const Status& why) {
  while (auto below = underlying_store(*store)) store = std::move(below);
  if (auto* tcp = dynamic_cast<TcpStore*>(store.get())) tcp->abandon(why);
}

namespace {

Result<Rendezvous> join_all(const std::shared_ptr<Store>& store, const MeetingOptions& options) {
  // An all_gather leaves no keys in the store, so a retry, or a second run on the same store, finds
  // no old marks. The members' random tokens together make a job name that was never used before.
  const std::string key = join_key(options.scope, options.group_name);
  const auto secret = Secret::from_environment();
  if (!secret) return secret.status().with_context(cannot_join(options.rank, options));
  const SignedTexts texts(*secret, name_of_run(), options.world_size);
  const std::string token = random_token();
  int rank = std::max(options.rank, 0);
  const auto tcp = options.registers ? std::dynamic_pointer_cast<TcpStore>(store) : nullptr;
  const auto register_member = [&](const std::string& job) {
    tcp->set_timeout(time_left(steady_clock(), options.deadline));
    return tcp->register_member(job, rank, options.world_size);
  };
  // From here on the server notices if a process with a given rank disconnects, also before all
  // have come.
  if (tcp && options.rank >= 0) {
    if (Status registered = register_member(key); !registered)
      return explain(registered, rank, options);
  }
  const auto joins = tcp ? tcp->count_joins() : Result<std::int64_t>(std::int64_t{1});
  std::string mine = texts.sign(key, rank, token);
  auto tokens = store->all_gather(key, rank, options.world_size, mine,
                                  time_left(steady_clock(), options.deadline));
  // No job has joined through this store before, so it belonged to this run and no other will
  // replace it.
  if (tokens.status().code() == Code::network && joins && *joins == 0)
    tokens = Status(Code::peer_failed, tokens.status().message() + ", while the ranks were joining",
                    tokens.status().ranks());
  while (options.rank < 0 && tokens.status().code() == Code::mismatch &&
         ++rank < options.world_size) {
    mine = texts.sign(key, rank, token);
    tokens = store->all_gather(key, rank, options.world_size, mine,
                               time_left(steady_clock(), options.deadline));
  }
  if (!tokens) return explain(tokens.status(), options.rank < 0 ? -1 : rank, options);
  // The result contains this rank's own token, so texts of an earlier job cannot be replayed.
  if (const auto right = texts.open(key, rank, mine, *tokens); !right)
    return explain(right.status(), rank, options);
  std::string all;
  for (const std::string& each : *tokens) all += each;
  Rendezvous joined;
  joined.rank = rank;
  joined.world_size = options.world_size;
  joined.job = job_of(key, all);
  joined.store = make_prefix_store(joined.job, store);
  if (tcp) {
    if (Status registered = register_member(joined.job); !registered)
      return explain(registered, rank, options);
  }
  return joined;
}

}  // namespace

Result<Rendezvous> join(const std::shared_ptr<Store>& store, const MeetingOptions& options) {
  try {
    auto joined = join_all(store, options);
    if (!joined) abandon(store, joined.status());
    return joined;
  } catch (...) {  // a store of the program's, or no memory
    abandon(store, status_of_exception());
    throw;
  }
}

}  // namespace muster::store

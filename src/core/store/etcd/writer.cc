#include "core/store/etcd/writer.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/base/bytes.h"
#include "core/security/secret.h"

namespace muster::store::etcd {
namespace {

// A mark needs to outlive only the attempts of one transaction; then etcd removes it.
constexpr std::int64_t kMarkLeaseSeconds = 7200;             // limit: litter of killed processes
constexpr Duration kRenewMark = std::chrono::minutes(60);    // limit: litter of killed processes
constexpr std::size_t kPieceBytes = std::size_t{512} << 10;  // limit: etcd's requests, 1.5 MiB
constexpr char kWhole = 'v', kInPieces = 'p';

std::string piece_key(const std::string& pieces, std::size_t number) {
  std::array<char, 9> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x", static_cast<unsigned>(number));
  return pieces + digits.data();
}

}  // namespace

std::string random_name() {
  std::array<std::byte, 16> bytes;
  fill_random(bytes);
  return hexadecimal(bytes);
}

Result<Writer::WriteMark> Writer::take_mark(TimePoint deadline) {
  {
    const std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      WriteMark mark = std::move(idle_.back());
      idle_.pop_back();
      if (steady_clock().now() < mark.renew_at) return mark;
    }
  }
  const auto lease = client_->grant(kMarkLeaseSeconds, deadline);
  if (!lease) return lease.status();
  return WriteMark{root_ + "w" + random_name(), 0, lease->id, steady_clock().now() + kRenewMark};
}

Result<Written> Writer::commit(Txn txn, TimePoint deadline) {
  auto mark = take_mark(deadline);
  if (!mark) return mark.status();
  txn.when.push_back({.key = mark->key, .number = mark->version});
  txn.then.push_back(Put{.key = mark->key, .value = {}, .lease = mark->lease});
  txn.otherwise.push_back(KeyRange{.key = mark->key, .keys_only = true});
  auto reply = client_->txn(txn, deadline);
  if (!reply) return reply.status();  // the mark is not used again: its version is not known
  if (reply->replies.size() != (reply->succeeded ? txn.then : txn.otherwise).size())
    return Status(Code::store, "etcd answered a transaction with too few replies");
  Written written;
  written.revision = reply->revision;
  written.done = reply->succeeded;
  const OperationReply& own = reply->replies.back();
  const std::int64_t version = reply->succeeded     ? mark->version + 1
                               : own.values.empty() ? 0
                                                    : own.values[0].version;
  if (!reply->succeeded && version == mark->version + 1) {
    written.done = written.repeated = true;
    written.revision = own.values[0].mod_revision;
  } else if (version < mark->version) {
    return Status(Code::store,
                  "etcd has lost a key that it was to keep for two hours; this process was "
                  "stopped, or somebody deletes keys below \"" +
                      root_ + "\"");
  } else {
    written.replies = std::move(reply->replies);
    written.replies.pop_back();
  }
  mark->version = version;
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(*mark));
  return written;
}

Result<Writer::Long> Writer::prepare(const std::string& prefix, std::string_view value,
                                     TimePoint deadline) {
  if (value.size() <= kPieceBytes) return Long{kWhole + std::string(value), {}};
  const std::string name = random_name();
  Long out{kInPieces + name + std::to_string(value.size()), prefix + name + "/"};
  out.first = piece_key(out.pieces, 0);
  for (std::size_t number = 0; number * kPieceBytes < value.size(); ++number) {
    Txn txn;
    txn.then.push_back(Put{.key = piece_key(out.pieces, number),
                           .value = std::string(value.substr(number * kPieceBytes, kPieceBytes))});
    if (const auto put = client_->txn(txn, deadline); !put) return put.status();
  }
  return out;
}

Result<std::string> Writer::restore(const std::string& prefix, std::string_view stored,
                                    TimePoint deadline) {
  constexpr std::size_t kNameDigits = 32;
  if (stored.starts_with(kWhole)) return std::string(stored.substr(1));
  std::size_t size = 0;
  const std::string_view digits =
      stored.substr(std::min(stored.size(), std::size_t{1} + kNameDigits));
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
  if (!stored.starts_with(kInPieces) || error != std::errc() ||
      stop != digits.data() + digits.size()) {
    return Status(Code::store,
                  "a key of this store holds a value that no muster has written; another program "
                  "writes below the same prefix");
  }
  const std::string pieces = prefix + std::string(stored.substr(1, kNameDigits)) + "/";
  std::string value;
  for (std::size_t number = 0; number * kPieceBytes < size; ++number) {
    Txn txn;
    txn.then.push_back(KeyRange{.key = piece_key(pieces, number)});
    auto reply = client_->txn(txn, deadline);
    if (!reply) return reply.status();
    if (reply->replies.size() != 1 || reply->replies[0].values.empty())
      return Status(Code::closed, "the value has been replaced");
    value += reply->replies[0].values[0].value;
  }
  if (value.size() != size) return Status(Code::closed, "the value has been replaced");
  return value;
}

}  // namespace muster::store::etcd

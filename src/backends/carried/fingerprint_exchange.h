// SPDX-License-Identifier: BSD-3-Clause
/// Exchanges on a group's channel: what members must know of each other before a library gets a
/// call.
#pragma once

#include <span>
#include <type_traits>
#include <vector>

#include "core/base/bytes.h"
#include "core/collective/group_context.h"
#include "muster/status.h"

namespace muster::carried {

/// Every member contributes `mine` and receives those of all members in `all`, in their order.
/// Blocks.
Status exchange_over_channel(const collective::GroupContext& group, ConstBytes mine,
                             MutableBytes all, TimePoint deadline);

/// The same for a value of fixed size, which goes as the bytes that it has in memory.
template <class Value>
Result<std::vector<Value>> exchange_over_channel(const collective::GroupContext& group,
                                                 const Value& mine, TimePoint deadline) {
  static_assert(std::is_trivially_copyable_v<Value>);
  std::vector<Value> all(static_cast<std::size_t>(group.size()), mine);
  if (Status exchanged = exchange_over_channel(group, std::as_bytes(std::span(&mine, 1)),
                                               std::as_writable_bytes(std::span(all)), deadline);
      !exchanged)
    return exchanged;
  return all;
}

/// All members compare a call before it begins. The channel fails, on all of them, if two differ.
class FingerprintExchange {
 public:
  /// `group` must outlive this.
  FingerprintExchange(const collective::GroupContext& group, const transport::Fingerprint& call);
  ~FingerprintExchange();
  FingerprintExchange(const FingerprintExchange&) = delete;

  /// True once every member has entered the same call. Never blocks.
  bool poll();

 private:
  bool arrived() const;

  const collective::GroupContext& group_;
  const transport::Fingerprint call_;
  std::vector<transport::TransferRef> receives_, sends_;
  bool released_ = false;  // the first member has told the others
};

}  // namespace muster::carried

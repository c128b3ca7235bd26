// SPDX-License-Identifier: BSD-3-Clause
/// Exchanges on a group's channel: what members must know of each other before MPI gets a call.
#pragma once

#include <vector>

#include "core/base/bytes.h"
#include "core/collective/group_context.h"
#include "muster/status.h"

namespace muster::carried {

/// Every member contributes `mine` and receives those of all members in `all`, in their order.
/// Blocks.
Status exchange_over_channel(const collective::GroupContext& group, ConstBytes mine,
                             MutableBytes all, TimePoint deadline);

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

// SPDX-License-Identifier: BSD-3-Clause
/// Calls that only move data towards its readers. Each member publishes where its data is; each
/// reader copies what it needs, chunk by chunk, and reduces it on the way if the operation reduces.
/// Also small all_reduces, in which every member reduces everything.
///
/// The sender alone chooses how its data travels, depending on its size and memory, so nothing has
/// to be agreed on. A sender returns once all its data is staged; it waits for readers only if they
/// read its own memory.
#pragma once

#include <cstddef>
#include <vector>

#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/collective/region/member_parts.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/status.h"

namespace muster::collective::region {

class PullTransfer {
 public:
  explicit PullTransfer(MemberParts& parts) : parts_(parts) {}

  /// `published`: this member's line has been published already, with all its data.
  Task<Status> run(const Args& args, const transport::Fingerprint& call, bool published);

 private:
  void order_sources(const TransferPlan& plan);
  void fill_window(const Args& args, const TransferPlan& plan, std::size_t step);
  bool available(const TransferPlan& plan, int source, std::size_t step);
  Task<Status> read_step(const Args& args, const TransferPlan& plan, std::size_t step);
  bool combine(const Args& args, const TransferPlan& plan, std::size_t step);
  Task<Status> await_readers(const TransferPlan& plan);

  MemberParts& parts_;
  std::vector<int> unread_;            // sources of this step that have not been read yet
  bool must_publish_drained_ = false;  // a peer waits for this member's drained counter
};

}  // namespace muster::collective::region

/// Calls whose data only moves towards its readers: each member says where its data stands, each
/// reader takes what it needs, chunk by chunk, and reduces it on the way if the operation reduces.
/// Small all_reduces too: every member then reduces everything.
///
/// The giver alone chooses how its data travels, source by source (by size and by kind of memory),
/// so nothing has to be agreed. A giver returns as soon as all is staged; it waits for its readers
/// only if they read its own memory.
#pragma once

#include <cstddef>
#include <vector>

#include "muster/base/status.h"
#include "muster/base/task.h"
#include "muster/collective/communicator.h"
#include "muster/collective/region/member_parts.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective::region {

class PullTransfer {
 public:
  explicit PullTransfer(MemberParts& parts) : my_(parts) {}

  /// `published`: this member's line is out already, with all that it gives.
  Task<Status> run(const Args& args, const transport::Fingerprint& call, bool published);

 private:
  void line_up(const TransferPlan& plan);
  void fill_window(const Args& args, const TransferPlan& plan, std::size_t step);
  bool available(const TransferPlan& plan, int source, std::size_t step);
  Task<Status> take_step(const Args& args, const TransferPlan& plan, std::size_t step);
  bool combine(const Args& args, const TransferPlan& plan, std::size_t step);
  Task<Status> await_readers(const TransferPlan& plan);

  MemberParts& my_;
  std::vector<int> left_;  // sources of the step that have not been read
  bool drains_ = false;    // a peer waits to hear that this member has read
};

}  // namespace muster::collective::region

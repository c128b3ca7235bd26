/// What the parts of one communicator need of it and know of their group.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/collective/progress.h"
#include "muster/trace/witness.h"
#include "muster/transport/channel.h"
#include "muster/transport/fabric.h"

namespace muster::collective {

struct GroupContext {
  std::shared_ptr<transport::Fabric> fabric;
  std::shared_ptr<transport::Channel> channel;
  std::string name;
  std::shared_ptr<const trace::Witness> witness =
      {};  ///< null: nobody knows what the others did last

  int rank() const { return channel->rank(); }
  int size() const { return channel->size(); }
  int job_rank() const { return fabric->rank(); }
  int job_rank_of(int member) const { return channel->members()[static_cast<std::size_t>(member)]; }
  /// "group 'world'", "a group of 4 ranks".
  std::string text() const {
    return name.empty() ? "a group of " + std::to_string(size()) + " ranks"
                        : "group '" + name + "'";
  }
  /// "group 'world' on rank 3".
  std::string here() const { return text() + " on rank " + std::to_string(job_rank()); }
  TimePoint now() const { return fabric->clock().now(); }
};

class Driver : public Driven {
 public:
  /// Drives all of the communicator's work on this thread until `done()`; false when `limit` has
  /// passed first.
  virtual bool attend(const std::function<bool()>& done, TimePoint limit) = 0;
  /// A thread that computes looks in: goes on as far as it can, and need not be helped for a while.
  virtual void look_in() = 0;
  /// This thread has finished what others may have waited behind without driving the communicator.
  virtual void let_others_go_on() = 0;
};

}  // namespace muster::collective

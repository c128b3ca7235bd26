// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/kept_place.h"

#include <utility>

namespace muster::launch {

PlaceNews KeptPlace::look(TimePoint now, bool has_workers) {
  const Status held = hold_ ? hold_->state() : Status(Code::refused, "it is asked for again");
  if (held) {
    if (!is_out()) return {};
    out_since_ = TimePoint::max();
    returned_at_ = now;
    gave_up_ = false;
    return {PlaceChange::back, false, "this node has its place in the job again"};
  }
  PlaceNews news;
  if (hold_ && held.code() == Code::refused) {
    lost_ = std::exchange(hold_, nullptr);
    news.lost_hold = true;
  }
  if (!is_out()) {
    out_since_ = now;
    news.what = PlaceChange::gone;
    news.text = "this node has lost its place in the job, and asks for it again" +
                (has_workers ? "; its workers go on unless the job goes on without them, or for " +
                                   muster::describe(limits_.out_limit)
                             : std::string()) +
                ": " + held.message();
  } else if (has_workers && !gave_up_ && now - out_since_ >= limits_.out_limit) {
    gave_up_ = true;
    if (hold_) {
      lost_ = std::exchange(hold_, nullptr);
      news.lost_hold = true;
    }
    news.what = PlaceChange::given_up;
    news.text = limits_.service + " has not answered for " + muster::describe(now - out_since_) +
                ": this node ends its workers, asks for another place, and leaves the job if the " +
                "service stays silent for " + muster::describe(limits_.last_call) +
                " more: " + held.message();
  }
  return news;
}

}  // namespace muster::launch

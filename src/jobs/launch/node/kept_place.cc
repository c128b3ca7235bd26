// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/kept_place.h"

#include <algorithm>
#include <utility>

namespace muster::launch {

/// Says what has become of the place, since when, and what the launcher does.
std::string KeptPlace::gone_text(TimePoint now, bool refused, bool has_workers) const {
  std::string text = "this node has lost its place in the job";
  if (held_at_ != TimePoint::max())
    text += ", which it had " + muster::describe(now - held_at_) + " ago";
  text += refused ? ": " + limits_.service +
                        " gives a place up when it does not hear of the launcher in time (one "
                        "that was stopped, a network that failed)"
                  : ": " + limits_.service + " does not answer";
  text += "; the launcher asks for it again";
  if (has_workers)
    text += ", and its workers go on unless the job goes on without them, or for " +
            muster::describe(limits_.out_limit);
  return text;
}

TimePoint KeptPlace::others_return_until(TimePoint now, Duration patience, Duration pause) const {
  const TimePoint silent_until = hold_ ? hold_->silent_until() : TimePoint{};
  if (silent_until == TimePoint::max()) return now + pause;
  const TimePoint since = std::max(returned_at_, silent_until);
  return since == TimePoint{} ? since : since + patience;
}

PlaceNews KeptPlace::look(TimePoint now, bool has_workers) {
  const Status held = hold_ ? hold_->state() : Status(Code::refused, "it is asked for again");
  if (held) {
    held_at_ = now;
    if (!is_out()) return {};
    const Duration out = now - std::exchange(out_since_, TimePoint::max());
    returned_at_ = now;
    gave_up_ = false;
    return {PlaceChange::back,
            false,
            "this node has a place in the job again, after " + muster::describe(out),
            {}};
  }
  PlaceNews news;
  if (hold_ && held.code() == Code::refused) {
    lost_ = std::exchange(hold_, nullptr);
    news.lost_hold = true;
  }
  if (!is_out()) {
    out_since_ = now;
    news.what = PlaceChange::gone;
    news.text = gone_text(now, held.code() == Code::refused, has_workers);
    news.cause = held.message();
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

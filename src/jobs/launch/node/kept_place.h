// SPDX-License-Identifier: BSD-3-Clause
/// The hold on this node's place among the nodes of its job, and how long the node is without one.
/// Values and the time: no request is made here, so it is tested on a clock that stands.
///
/// A hold that the service has declared lost, or has not confirmed for its time to live, puts the
/// node out of its place. The workers stay until the node has been out for `out_limit`; if the hold
/// is confirmed, or another is taken, before that, nothing has happened.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "jobs/membership/membership.h"
#include "muster/clock.h"

namespace muster::launch {

enum class PlaceChange : std::uint8_t {
  none,
  gone,     ///< the node is out of its place since now
  back,     ///< it has its place again
  given_up  ///< its workers shall end; the caller asks for another place
};

struct PlaceNews {
  PlaceChange what = PlaceChange::none;
  bool lost_hold = false;  ///< the hold has become one that is to be given back
  std::string text{};      ///< for people, unless `none`
  std::string cause{};     ///< the service's own words, beside `text`
};

/// For one thread at a time.
class KeptPlace {
 public:
  struct Limits {
    std::string service;  ///< its name, for messages
    Duration out_limit;
    Duration last_call;  ///< for how much longer the caller waits for the service
  };
  explicit KeptPlace(Limits limits) : limits_(std::move(limits)) {}

  /// Null: there is none, and another one is to be taken.
  const std::shared_ptr<membership::Hold>& hold() const { return hold_; }
  void take(std::unique_ptr<membership::Hold> hold) { hold_ = std::move(hold); }
  /// A hold to be given back, by its destructor, which makes a request: null, or the last one.
  std::shared_ptr<membership::Hold> take_lost() { return std::exchange(lost_, nullptr); }
  void give_back(std::shared_ptr<membership::Hold> hold) { lost_ = std::move(hold); }

  bool is_out() const { return out_since_ != TimePoint::max(); }
  TimePoint out_since() const { return out_since_; }  ///< max: it is not
  /// When it came back last; zero: it has never been out.
  TimePoint returned_at() const { return returned_at_; }
  /// Until when others that lost their places as this one did, or while the service was silent
  /// about it, are expected to come back within `patience`. While the service is silent still, that
  /// is to be asked again after `pause`.
  TimePoint others_return_until(TimePoint now, Duration patience, Duration pause) const;

  /// Compares the place with that of the last call. `has_workers`: the node would end some.
  PlaceNews look(TimePoint now, bool has_workers);

 private:
  std::string gone_text(TimePoint now, bool refused, bool has_workers) const;

  const Limits limits_;
  std::shared_ptr<membership::Hold> hold_, lost_;
  TimePoint out_since_ = TimePoint::max();
  TimePoint returned_at_{};
  TimePoint held_at_ = TimePoint::max();  // the last look at which the place was held; max: none
  bool gave_up_ = false;                  // since `out_since_`
};

}  // namespace muster::launch

// SPDX-License-Identifier: BSD-3-Clause
/// A membership of which every call may be the point at which the process stands still. For tests.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "jobs/membership/membership.h"

namespace muster::launch {

enum class PausedCall : std::uint8_t { hold, watch, next, set, commit, release };
inline const char* name_of(PausedCall call) {
  switch (call) {
    case PausedCall::hold: return "hold";
    case PausedCall::watch: return "watch";
    case PausedCall::next: return "next";
    case PausedCall::set: return "set";
    case PausedCall::commit: return "commit";
    case PausedCall::release: return "release";
  }
  return "";
}

/// Before or after the `count`th call of this kind.
struct PausePoint {
  PausedCall call = PausedCall::hold;
  bool after = false;
  int count = 1;
};

/// Counts the points that the threads of a process pass, and stops the process (SIGSTOP) at the
/// wanted one. Thread-safe.
class Pauses {
 public:
  /// `counts`: whether points count now. `tell` is called just before the process stands still.
  Pauses(PausePoint wanted, std::function<bool()> counts, std::function<void()> tell)
      : wanted_(wanted), counts_(std::move(counts)), tell_(std::move(tell)) {}
  void pass(PausedCall call, bool after) {
    {
      const std::lock_guard lock(mutex_);
      if (done_ || !counts_() || call != wanted_.call || after != wanted_.after) return;
      if (++passed_ < wanted_.count) return;
      done_ = true;
    }
    tell_();
    ::kill(::getpid(), SIGSTOP);
  }

 private:
  const PausePoint wanted_;
  const std::function<bool()> counts_;
  const std::function<void()> tell_;
  std::mutex mutex_;  // guards what follows
  int passed_ = 0;
  bool done_ = false;
};

class PausingHold final : public membership::Hold {
 public:
  PausingHold(std::unique_ptr<membership::Hold> hold, std::shared_ptr<Pauses> pauses)
      : hold_(std::move(hold)), pauses_(std::move(pauses)) {}
  ~PausingHold() override {
    pauses_->pass(PausedCall::release, false);
    hold_.reset();
    pauses_->pass(PausedCall::release, true);
  }
  Status set(std::string_view value) override {
    pauses_->pass(PausedCall::set, false);
    Status said = hold_->set(value);
    pauses_->pass(PausedCall::set, true);
    return said;
  }
  Status state() const override { return hold_->state(); }
  TimePoint expires() const override { return hold_->expires(); }
  TimePoint silent_until() const override { return hold_->silent_until(); }

 private:
  std::unique_ptr<membership::Hold> hold_;
  const std::shared_ptr<Pauses> pauses_;
};

class PausingWatch final : public membership::Watch {
 public:
  PausingWatch(std::unique_ptr<membership::Watch> watch, std::shared_ptr<Pauses> pauses)
      : watch_(std::move(watch)), pauses_(std::move(pauses)) {}
  Result<membership::Update> next(Duration timeout) override {
    pauses_->pass(PausedCall::next, false);
    auto update = watch_->next(timeout);
    pauses_->pass(PausedCall::next, true);
    return update;
  }
  void close() override { watch_->close(); }

 private:
  const std::unique_ptr<membership::Watch> watch_;
  const std::shared_ptr<Pauses> pauses_;
};

class PausingMembership final : public membership::Membership {
 public:
  /// `committed` hears of each epoch that is.
  PausingMembership(std::unique_ptr<membership::Membership> membership,
                    std::shared_ptr<Pauses> pauses,
                    std::function<void(const membership::Epoch&)> committed)
      : membership_(std::move(membership)),
        pauses_(std::move(pauses)),
        committed_(std::move(committed)) {}
  Result<std::unique_ptr<membership::Hold>> hold(std::string_view name, std::string_view value,
                                                 Duration ttl) override {
    pauses_->pass(PausedCall::hold, false);
    auto hold = membership_->hold(name, value, ttl);
    pauses_->pass(PausedCall::hold, true);
    if (!hold) return hold;
    return std::unique_ptr<membership::Hold>(
        std::make_unique<PausingHold>(std::move(*hold), pauses_));
  }
  Result<std::unique_ptr<membership::Watch>> watch(std::string_view prefix) override {
    pauses_->pass(PausedCall::watch, false);
    auto watch = membership_->watch(prefix);
    pauses_->pass(PausedCall::watch, true);
    if (!watch) return watch;
    return std::unique_ptr<membership::Watch>(
        std::make_unique<PausingWatch>(std::move(*watch), pauses_));
  }
  Result<std::int64_t> commit(const membership::Epoch& epoch, std::int64_t expected) override {
    pauses_->pass(PausedCall::commit, false);
    auto committed = membership_->commit(epoch, expected);
    if (committed) committed_(epoch);
    pauses_->pass(PausedCall::commit, true);
    return committed;
  }
  const char* kind() const override { return membership_->kind(); }

 private:
  const std::unique_ptr<membership::Membership> membership_;
  const std::shared_ptr<Pauses> pauses_;
  const std::function<void(const membership::Epoch&)> committed_;
};

}  // namespace muster::launch

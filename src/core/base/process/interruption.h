// SPDX-License-Identifier: BSD-3-Clause
/// Cancels waits of threads that serve as ranks.
///
/// Such a thread cannot be killed from outside. The code that runs the ranks binds one
/// `Interruption` to their threads. Waits that have no engine yet (stores, rendezvous) poll the one
/// of their thread and end early with its reason.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// Thread-safe.
class Interruption {
 public:
  /// The first words stay.
  void raise(const std::string& why);
  /// Code::aborted with the words once raised.
  Status status() const;

  /// Makes it one of the calling thread's as long as it lives; earlier ones stay in force.
  class InterruptionBinding {
   public:
    explicit InterruptionBinding(std::shared_ptr<Interruption> interruption);
    ~InterruptionBinding();
    InterruptionBinding(const InterruptionBinding&) = delete;
    InterruptionBinding& operator=(const InterruptionBinding&) = delete;

   private:
    friend class Interruption;
    const std::shared_ptr<Interruption> interruption_;
    const InterruptionBinding* const outer_;
  };

  /// The status of the innermost raised one that is bound to the calling thread; ok if none is.
  static Status of_thread();
  /// The longest that a wait of this thread may go on without asking `of_thread`; no limit if none
  /// is bound.
  static Duration look_every();

 private:
  mutable std::mutex mutex_;
  Status raised_;
};

}  // namespace muster

/// A call that its caller's thread has started under the drive lock, before it is in the queue.
#pragma once

#include <cstdint>

#include "core/collective/call_record.h"
#include "core/collective/control.h"
#include "core/transport/channel/fingerprint.h"

namespace muster::collective {

struct StartingCall {
  /// `control` null: calls are not compared later (for tests of single parts).
  explicit StartingCall(CallRecord& given, Control* later = nullptr)
      : record(given), control(later) {}

  /// Sets the call and its number.
  void assign(const transport::Fingerprint& call, std::uint64_t number) {
    transport::copy_words(fingerprint, call);
    fingerprint.sequence = number;
  }
  /// Records the call for later comparison. Must precede any message of it, since the receivers may
  /// already have reported the calls that they are in.
  void remember() noexcept {
    if (remembered) return;
    remembered = true;
    if (control != nullptr) control->begin(fingerprint);
  }
  /// The other members can see the call now.
  void on_started() noexcept {
    remember();
    record.on_started(fingerprint.sequence);
  }

  CallRecord& record;
  Control* const control;
  transport::Fingerprint fingerprint;
  bool remembered = false;
};

}  // namespace muster::collective

/// A call that its caller's thread has taken in hand, under the drive lock, before it stands in the
/// queue.
#pragma once

#include <cstdint>

#include "muster/collective/call_record.h"
#include "muster/collective/control.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective {

struct StartingCall {
  /// `control` null: nobody compares calls later (in tests of a part alone).
  explicit StartingCall(CallRecord& given, Control* later = nullptr)
      : record(given), control(later) {}

  /// It is `call`, as this number.
  void take(const transport::Fingerprint& call, std::uint64_t number) {
    transport::copy_words(fingerprint, call);
    fingerprint.sequence = number;
  }
  /// Remembers the call for later comparisons; before anything of it is sent to members that may
  /// already have told what they are in.
  void remember() noexcept {
    if (remembered) return;
    remembered = true;
    if (control != nullptr) control->begin(fingerprint);
  }
  /// The other members can see the call.
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

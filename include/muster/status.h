// SPDX-License-Identifier: BSD-3-Clause
/// Errors as values, for the whole torch-free half.
///
/// A `Status` is one pointer: null means success, so passing success costs nothing. A failure is
/// shared and immutable; it states the operation, the peers, what was expected, what arrived and
/// what to try, and it names the ranks at fault so that every survivor reports the same names.
/// `group/` turns failures into exceptions; nothing below it throws.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace muster {

enum class Code : std::uint8_t {
  ok,
  invalid_argument,  ///< the caller's request cannot be carried out; the message says what to
                     ///< change
  timed_out,         ///< a deadline passed; `ranks` are those still missing
  peer_failed,       ///< a rank died, hung or aborted; `ranks` names the first cause
  network,           ///< a socket or address failed for a reason that no rank is to blame for
  store,             ///< a key-value store request failed
  mismatch,          ///< members called different operations; the message holds both calls
  aborted,           ///< this process ended the operation (abort, destroy)
  refused,           ///< a secret, version or permission was not accepted
  exhausted,         ///< memory, descriptors or a stated limit ran out
  unsupported,       ///< the operation, dtype or reduction does not exist here
  closed,            ///< the other end closed in an orderly way
  internal,          ///< a defect of muster
};

/// Lower-case name of a code, for logs and tests.
const char* code_name(Code code);

/// One failure. `ranks` are ranks of the job (not of a group).
struct Failure {
  Code code = Code::internal;
  std::string message;
  std::vector<int> ranks;
};

class [[nodiscard]] Status {
 public:
  Status() = default;  ///< success
  Status(Code code, std::string message, std::vector<int> ranks = {});

  bool ok() const { return failure_ == nullptr; }
  explicit operator bool() const { return ok(); }
  Code code() const { return failure_ ? failure_->code : Code::ok; }
  /// Empty for success.
  const std::string& message() const;
  /// Job ranks at fault; empty if there are none.
  const std::vector<int>& ranks() const;
  /// The same failure with `context + ": "` before its message. Success stays success.
  Status with_context(std::string_view context) const;

 private:
  std::shared_ptr<const Failure> failure_;
};

/// A value or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  /// `status` must be a failure.
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {
    if (std::get<1>(state_).ok())
      state_.template emplace<1>(Code::internal, "a Result was made of a success without a value");
  }

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace muster

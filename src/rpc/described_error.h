/// An exception thrown by a function of another language.
#pragma once

#include <stdexcept>
#include <utility>

#include "rpc/wire/message.h"

namespace muster::rpc {

/// Carries a ready description, which is sent to the caller unchanged; `type` is the exception's
/// name in the other language.
class DescribedError : public std::runtime_error {
 public:
  explicit DescribedError(ErrorText error)
      : std::runtime_error(error.type + ": " + error.text), error_(std::move(error)) {}
  const ErrorText& described() const noexcept { return error_; }

 private:
  ErrorText error_;
};

}  // namespace muster::rpc

/// What another language's function has thrown.
#pragma once

#include <stdexcept>
#include <utility>

#include "muster/rpc/message.h"

namespace muster::rpc {

/// It has been described already, and goes to the caller as that; `type` is the other language's
/// name of it.
class DescribedError : public std::runtime_error {
 public:
  explicit DescribedError(ErrorText error)
      : std::runtime_error(error.type + ": " + error.text), error_(std::move(error)) {}
  const ErrorText& described() const noexcept { return error_; }

 private:
  ErrorText error_;
};

}  // namespace muster::rpc

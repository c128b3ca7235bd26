// SPDX-License-Identifier: BSD-3-Clause
#include <cxxabi.h>

#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "core/base/exception_status.h"
#include "muster/status.h"

namespace muster {

const char* code_name(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::invalid_argument: return "invalid argument";
    case Code::timed_out: return "timed out";
    case Code::peer_failed: return "peer failed";
    case Code::network: return "network";
    case Code::store: return "store";
    case Code::mismatch: return "mismatch";
    case Code::aborted: return "aborted";
    case Code::refused: return "refused";
    case Code::exhausted: return "exhausted";
    case Code::unsupported: return "unsupported";
    case Code::closed: return "closed";
    case Code::internal: return "internal";
  }
  return "unknown";
}

Status::Status(Code code, std::string message, std::vector<int> ranks) {
  if (code != Code::ok)
    failure_ = std::make_shared<const Failure>(Failure{code, std::move(message), std::move(ranks)});
}

const std::string& Status::message() const {
  static const std::string none;
  return failure_ ? failure_->message : none;
}

const std::vector<int>& Status::ranks() const {
  static const std::vector<int> none;
  return failure_ ? failure_->ranks : none;
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  return Status(code(), std::string(context) + ": " + message(), ranks());
}

namespace {

// Made ahead: where it is needed there may be no memory to make it of.
const Status& no_memory() {
  static const Status one(Code::exhausted,
                          "this process gets no more memory; look at what it uses and at its "
                          "limits (ulimit -v, memory.max of the "
                          "control group)");
  return one;
}
[[maybe_unused]] const Status& made_ahead = no_memory();

Code code_of(const std::system_error& error) {
  for (const auto exhausted :
       {std::errc::resource_unavailable_try_again, std::errc::not_enough_memory,
        std::errc::too_many_files_open, std::errc::too_many_files_open_in_system})
    if (error.code() == exhausted) return Code::exhausted;
  return Code::internal;
}

}  // namespace

Status status_of_exception() {
  try {
    try {
      throw;
    } catch (const abi::__forced_unwind&) {
      throw;
    } catch (const std::bad_alloc&) {
      return no_memory();
    } catch (const std::system_error& error) {
      return Status(code_of(error), error.what());
    } catch (const std::exception& error) {
      return Status(Code::internal, std::string("an exception was thrown: ") + error.what());
    } catch (...) {
      return Status(Code::internal, "an exception of an unknown kind was thrown");
    }
  } catch (const abi::__forced_unwind&) {
    throw;
  } catch (...) {
    return no_memory();
  }
}

}  // namespace muster

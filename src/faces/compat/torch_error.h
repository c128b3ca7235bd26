/// From muster's exceptions to the ones that stock torch turns into
/// torch.distributed.DistBackendError and its sisters, and what torch's say.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <type_traits>

#include "core/group/errors.h"

namespace muster::compat {

/// The text of any exception, without the backtrace at the end of torch's exceptions.
inline std::string text_of(const std::exception& error) {
  const auto* theirs = dynamic_cast<const c10::Error*>(&error);
  return theirs == nullptr ? error.what() : theirs->what_without_backtrace();
}

/// Runs `body`; an exception of muster's comes out as torch's class of the same name, with the same
/// text. Where time ran out it begins with the words that programs look for in the errors of
/// torch's own backends.
template <class Body>
auto in_torch_errors(Body body) -> std::invoke_result_t<Body> {
  try {
    return body();
  } catch (const DistBackendError& error) {
    const std::string text = error.what();
    C10_THROW_ERROR(DistBackendError,
                    error.code() == Code::timed_out ? "muster: Timed out waiting: " + text : text);
  } catch (const DistNetworkError& error) {
    C10_THROW_ERROR(DistNetworkError, error.what());
  } catch (const DistStoreError& error) {
    C10_THROW_ERROR(DistStoreError, error.what());
  } catch (const DistError& error) {
    C10_THROW_ERROR(DistError, error.what());
  }
}

/// The same for an exception that is kept.
inline std::exception_ptr as_torch_error(const std::exception_ptr& error) {
  if (!error) return nullptr;
  try {
    in_torch_errors([&] { std::rethrow_exception(error); });
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace muster::compat

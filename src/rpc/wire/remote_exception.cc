// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/wire/remote_exception.h"

#include <cxxabi.h>

#include <c10/util/Exception.h>
#include <cstdlib>
#include <ios>
#include <new>
#include <stdexcept>
#include <system_error>
#include <typeinfo>

#include "core/base/environment.h"
#include "muster/rpc_function.h"

namespace muster::rpc {
namespace {

/// An exception of type Base that also carries the worker it comes from.
template <class Base>
class From final : public Base, public RemoteError {
 public:
  template <class... A>
  From(RemoteError origin, A&&... arguments)
      : Base(std::forward<A>(arguments)...), RemoteError(std::move(origin)) {}
};

class BadAllocation : public std::bad_alloc {
 public:
  explicit BadAllocation(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

using Make = std::exception_ptr (*)(RemoteError origin, const std::string& text);

template <class Base>
std::exception_ptr make(RemoteError origin, const std::string& text) {
  return std::make_exception_ptr(From<Base>(std::move(origin), text));
}

/// Exception types that keep their class across the wire, the most derived first.
struct KnownError {
  const char* name;
  bool (*is)(const std::exception&);
  Make make;
};
template <class T>
bool is(const std::exception& error) {
  return dynamic_cast<const T*>(&error) != nullptr;
}
template <class T>
constexpr KnownError known(const char* name) {
  return {name, &is<T>, &make<T>};
}
constexpr KnownError kKnownErrors[] = {
    known<std::invalid_argument>("std::invalid_argument"),
    known<std::domain_error>("std::domain_error"),
    known<std::length_error>("std::length_error"),
    known<std::out_of_range>("std::out_of_range"),
    known<std::logic_error>("std::logic_error"),
    known<std::range_error>("std::range_error"),
    known<std::overflow_error>("std::overflow_error"),
    known<std::underflow_error>("std::underflow_error"),
    {"std::bad_alloc", &is<std::bad_alloc>, &make<BadAllocation>},
    known<c10::Error>("c10::Error"),
    known<std::runtime_error>("std::runtime_error"),
};
constexpr const char* kOurs = "muster::DistError";

std::string name_of_type(const std::type_info& type) { return detail::type_name(type); }

}  // namespace

ErrorText describe_exception(const std::exception_ptr& error) {
  ErrorText text;
  try {
    std::rethrow_exception(error);
  } catch (const DescribedError& thrown) {
    text = thrown.described();
  } catch (const DistError& thrown) {
    text.code = static_cast<std::uint8_t>(thrown.code());
    text.type = kOurs;
    text.text = thrown.what();
    for (const int rank : thrown.ranks()) text.ranks.push_back(rank);
  } catch (const c10::Error& thrown) {
    text.type = "c10::Error";
    text.text = thrown.what_without_backtrace();
    // torch takes a second to symbolize the frames, so this is done on request only.
    if (env_text("TORCH_SHOW_CPP_STACKTRACES").value_or("0") == "1" && thrown.backtrace())
      text.trace = thrown.backtrace()->get();
  } catch (const std::exception& thrown) {
    text.type = name_of_type(typeid(thrown));
    for (const KnownError& known : kKnownErrors) {
      if (!known.is(thrown)) continue;
      // A type derived from a known one is rethrown as the known one; the text has its own name.
      if (text.type != known.name && text.type.find("muster::rpc::") == std::string::npos)
        text.trace = "thrown as " + text.type;
      text.type = known.name;
      break;
    }
    text.text = thrown.what();
  } catch (...) {
    const auto* type = abi::__cxa_current_exception_type();
    text.type = type != nullptr ? name_of_type(*type) : std::string();
    text.text = "something that is no std::exception";
  }
  return text;
}

std::exception_ptr remote_exception(const std::string& worker, int worker_id,
                                    const std::string& function, ErrorText error) {
  const std::string where =
      "on worker '" + worker + "' (rank " + std::to_string(worker_id) + "), in '" + function + "'";
  const auto named = error.type.empty() ? std::string() : error.type + ": ";
  std::string text = where + ": " + named + error.text;
  const auto code = static_cast<Code>(error.code);
  const auto type = error.type;
  const std::vector<int> ranks(error.ranks.begin(), error.ranks.end());
  RemoteError origin(worker, worker_id, std::move(error.type), std::move(error.text),
                     std::move(error.trace));
  if (type == kOurs) {
    text = where + ": " + origin.text();
    switch (code) {
      case Code::invalid_argument:
        return std::make_exception_ptr(From<DistError>(std::move(origin), text, code, ranks));
      case Code::network:
      case Code::refused:
        return std::make_exception_ptr(
            From<DistNetworkError>(std::move(origin), text, code, ranks));
      case Code::store:
        return std::make_exception_ptr(From<DistStoreError>(std::move(origin), text, code, ranks));
      default:
        return std::make_exception_ptr(
            From<DistBackendError>(std::move(origin), text, code, ranks));
    }
  }
  for (const KnownError& known : kKnownErrors) {
    if (type == known.name) return known.make(std::move(origin), text);
  }
  return std::make_exception_ptr(
      From<DistBackendError>(std::move(origin), text, Code::internal, std::vector<int>{worker_id}));
}

}  // namespace muster::rpc

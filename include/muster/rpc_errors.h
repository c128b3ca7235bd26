/// How exceptions of the callee are rethrown in the caller.
///
/// A standard exception, torch's c10::Error and muster's own errors are rethrown as the same type
/// or a derived one, with the text, the worker's name and, if known, the location. Any other type
/// becomes a DistBackendError with the type's name. All of them also derive from RemoteError:
/// `catch (const rpc::RemoteError& e) { e.worker(); e.type(); }`.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "muster/errors.h"

namespace muster::rpc {

/// The origin of a remote exception. Not an exception by itself.
class RemoteError {
 public:
  RemoteError(std::string worker, int worker_id, std::string type, std::string text,
              std::string trace)
      : worker_(std::move(worker)),
        worker_id_(worker_id),
        type_(std::move(type)),
        text_(std::move(text)),
        trace_(std::move(trace)) {}
  virtual ~RemoteError() = default;
  const std::string& worker() const noexcept { return worker_; }
  int worker_id() const noexcept { return worker_id_; }
  /// "std::out_of_range".
  const std::string& type() const noexcept { return type_; }
  /// The original message, without the worker's name.
  const std::string& text() const noexcept { return text_; }
  /// The callee's stack frames if its type records them; otherwise empty.
  const std::string& trace() const noexcept { return trace_; }

 private:
  std::string worker_;
  int worker_id_;
  std::string type_, text_, trace_;
};

}  // namespace muster::rpc

/// How exceptions of the callee are rethrown in the caller.
///
/// A standard exception, torch's c10::Error and muster's own errors are rethrown as the same type
/// or a derived one, with the text, the worker's name and, if known, the location. Any other type
/// becomes a DistBackendError with the type's name. All of them also derive from RemoteError:
/// `catch (const rpc::RemoteError& e) { e.worker(); e.type(); }`.
#pragma once

#include <exception>
#include <string>

#include "muster/group/errors.h"
#include "muster/rpc/message.h"

namespace muster::rpc {

/// The origin of a remote exception. Not an exception by itself.
class RemoteError {
 public:
  RemoteError(std::string worker, int worker_id, ErrorText error)
      : worker_(std::move(worker)), worker_id_(worker_id), error_(std::move(error)) {}
  virtual ~RemoteError() = default;
  const std::string& worker() const noexcept { return worker_; }
  int worker_id() const noexcept { return worker_id_; }
  /// "std::out_of_range".
  const std::string& type() const noexcept { return error_.type; }
  /// The original message, without the worker's name.
  const std::string& text() const noexcept { return error_.text; }
  /// The callee's stack frames if its type records them; otherwise empty.
  const std::string& trace() const noexcept { return error_.trace; }

 private:
  std::string worker_;
  int worker_id_;
  ErrorText error_;
};

/// Describes an exception for the wire.
ErrorText describe_exception(const std::exception_ptr& error);
/// The exception to rethrow: "worker 'ps' (rank 1): std::out_of_range in 'lookup': no such key".
std::exception_ptr remote_exception(const std::string& worker, int worker_id,
                                    const std::string& function, ErrorText error);

}  // namespace muster::rpc

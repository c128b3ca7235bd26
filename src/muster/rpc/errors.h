/// How what was thrown over there is thrown here.
///
/// A standard exception, torch's c10::Error and muster's own come back as the same type (or one
/// derived from it) with the text, the worker's name and, where it is known, the place; any other
/// type as DistBackendError, with its name. All of them are RemoteError besides: `catch (const
/// rpc::RemoteError& e) { e.worker(); e.type(); }`.
#pragma once

#include <exception>
#include <string>

#include "muster/group/errors.h"
#include "muster/rpc/message.h"

namespace muster::rpc {

/// What is known of where an exception came from. Not an exception by itself.
class RemoteError {
 public:
  RemoteError(std::string worker, int worker_id, ErrorText error)
      : worker_(std::move(worker)), worker_id_(worker_id), error_(std::move(error)) {}
  virtual ~RemoteError() = default;
  const std::string& worker() const noexcept { return worker_; }
  int worker_id() const noexcept { return worker_id_; }
  /// "std::out_of_range".
  const std::string& type() const noexcept { return error_.type; }
  /// Its own words, without those about the worker.
  const std::string& text() const noexcept { return error_.text; }
  /// Frames over there, where its type keeps them; else empty.
  const std::string& trace() const noexcept { return error_.trace; }

 private:
  std::string worker_;
  int worker_id_;
  ErrorText error_;
};

/// What an exception tells of itself.
ErrorText describe_exception(const std::exception_ptr& error);
/// The exception to throw here: "worker 'ps' (rank 1): std::out_of_range in 'lookup': no such key".
std::exception_ptr remote_exception(const std::string& worker, int worker_id,
                                    const std::string& function, ErrorText error);

}  // namespace muster::rpc

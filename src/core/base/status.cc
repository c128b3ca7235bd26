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

}  // namespace muster

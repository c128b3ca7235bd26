#include "muster/group/process_group_backend.h"

#include <utility>

namespace muster {
namespace {

class Resubmitted final : public PreparedCall {
 public:
  Resubmitted(ProcessGroupBackend& backend, Request request) : backend_(backend), request_(std::move(request)) {}
  WorkRef start(TimePoint deadline, std::uint64_t sequence) override {
    Request request = request_;
    request.deadline = deadline;
    request.sequence = sequence;
    return backend_.submit(std::move(request));
  }

 private:
  ProcessGroupBackend& backend_;
  const Request request_;
};

}  // namespace

std::unique_ptr<PreparedCall> ProcessGroupBackend::prepare(Request request) {
  return std::make_unique<Resubmitted>(*this, std::move(request));
}

}  // namespace muster

/// A `collective::Communicator`, muster's own engine or MPI, as a backend: passes tensors to it as
/// spans.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/group/group_core.h"
#include "core/wait/callbacks.h"

namespace muster::group {

/// Supports every operation and dtype. CPU tensors that are not contiguous are copied to contiguous
/// memory, accelerator tensors to pinned host memory.
class NativeBackend : public SpanBackend {
 public:
  /// `name` is the requested name: native, gloo, tcp or mpi. `ranks` are ranks of the default
  /// group, indexed by rank of the communicator.
  NativeBackend(std::string name, std::shared_ptr<collective::Communicator> communicator,
                std::vector<int> ranks);

  const BackendCapabilities& capabilities() const override { return capabilities_; }
  bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                std::string* why) const override;
  WorkRef submit(BackendCall& call) override;
  std::shared_ptr<void> scope(BackendScope kind) override;
  BackendState state() const override;
  Status close(TimePoint deadline) override { return communicator_->close(deadline); }
  void abort(const std::string& reason) override { communicator_->abort(reason); }

  const std::shared_ptr<collective::Communicator>& communicator() const { return communicator_; }

 private:
  WorkRef submit_async(Call& call);
  WorkRef refuse(const Call& call);
  std::shared_ptr<void> manual_progress();
  /// Throws `status`. If the engine found the arguments invalid, the other members are told, as for
  /// any refused call.
  [[noreturn]] void fail(Call& call, const Status& status);

  const std::string name_;
  std::shared_ptr<collective::Communicator> communicator_;
  const BackendCapabilities capabilities_;
  const std::shared_ptr<const std::vector<int>> ranks_;
  std::atomic<bool> refused_{false};
  const std::shared_ptr<CallbackLane> callbacks_ = std::make_shared<CallbackLane>();
  const std::shared_ptr<std::atomic<bool>> shown_ =
      std::make_shared<std::atomic<bool>>(false);  // shared with the Works
};

}  // namespace muster::group

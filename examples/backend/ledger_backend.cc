// SPDX-License-Identifier: BSD-3-Clause
// A backend in a library of its own: every message is an entry of the group's store, as in a
// ledger. Slow, and short enough to copy from.
//
// `muster::load_backend_plugin("libledger_backend.so")` makes its name known;
// `init_process_group({.backend = "ledger"})` uses it. It has all_reduce (SUM), broadcast,
// all_gather and barrier on CPU tensors, and says so of what it has not.
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "muster/backend.h"
#include "muster/errors.h"

namespace {

using muster::Op;

/// Everything is done before `submit` returns.
class DoneWork final : public muster::Work {
 public:
  explicit DoneWork(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}
  bool is_completed() override { return true; }
  bool is_success() override { return true; }
  bool wait(std::optional<muster::Duration>) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }
  int source_rank() override { return -1; }
  std::exception_ptr exception() override { return nullptr; }
  std::vector<at::Tensor> result() override { return outputs_; }

 private:
  std::vector<at::Tensor> outputs_;
};

class LedgerBackend final : public muster::ProcessGroupBackend {
 public:
  explicit LedgerBackend(const muster::DistributedBackendOptions& options)
      : store_(options.store),
        rank_(options.group_rank),
        size_(options.group_size),
        timeout_(options.timeout) {}

  const muster::BackendCapabilities& capabilities() const override {
    static constexpr muster::BackendCapabilities kHas{.name = "ledger"};
    return kHas;
  }

  bool supports(Op op, at::ScalarType, c10::DeviceType device, std::string* why) const override {
    const bool known =
        op == Op::all_reduce || op == Op::broadcast || op == Op::all_gather || op == Op::barrier;
    if (known && device == c10::DeviceType::CPU) return true;
    *why = known ? "it keeps CPU tensors only"
                 : "it has all_reduce, broadcast, all_gather and barrier only";
    return false;
  }

  muster::WorkRef submit(muster::BackendCall& call) override {
    if (call.is_refused()) return nullptr;  // the other members cannot be told
    const std::lock_guard lock(mutex_);
    std::vector<at::Tensor> outputs;
    switch (call.op()) {
      case Op::barrier: exchange(""); break;
      case Op::broadcast: {
        const auto all = exchange(call.root() == rank_ ? bytes_of(call.outputs()[0][0]) : "");
        outputs = {read(all[static_cast<std::size_t>(call.root())], call.outputs()[0][0])};
        call.outputs()[0][0].copy_(outputs[0]);
        break;
      }
      case Op::all_gather: {
        const auto all = exchange(bytes_of(call.inputs()[0][0]));
        for (std::size_t i = 0; i < all.size(); ++i)
          call.outputs()[i][0].copy_(read(all[i], call.outputs()[i][0]));
        break;
      }
      default: {
        if (!(call.reduce_op() == muster::ReduceOp::SUM))
          throw muster::DistBackendError("backend 'ledger' cannot do all_reduce: it only sums",
                                         muster::Code::unsupported);
        const auto& tensor = call.outputs()[0][0];
        auto sum = at::zeros_like(tensor);
        for (const auto& bytes : exchange(bytes_of(tensor))) sum.add_(read(bytes, tensor));
        tensor.copy_(sum);
      }
    }
    for (const auto& slice : call.outputs())
      outputs.insert(outputs.end(), slice.begin(), slice.end());
    return std::make_shared<DoneWork>(std::move(outputs));
  }

  std::shared_ptr<void> scope(muster::BackendScope) override { return nullptr; }
  muster::BackendState state() const override { return {}; }
  muster::Status close(muster::TimePoint) override { return {}; }
  void abort(const std::string&) override {}

 private:
  /// All members' bytes under the next page number.
  std::vector<std::string> exchange(const std::string& mine) {
    return store_->all_gather("page" + std::to_string(page_++), rank_, size_, mine, timeout_);
  }
  static std::string bytes_of(const at::Tensor& tensor) {
    const auto plain = tensor.contiguous();
    return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
  }
  static at::Tensor read(const std::string& bytes, const at::Tensor& like) {
    auto tensor = at::empty_like(like, at::MemoryFormat::Contiguous);
    if (bytes.size() != tensor.nbytes())
      throw muster::DistBackendError("backend 'ledger': a member gave " +
                                         std::to_string(bytes.size()) + " bytes, expected " +
                                         std::to_string(tensor.nbytes()),
                                     muster::Code::mismatch);
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    return tensor;
  }

  const std::shared_ptr<muster::Store> store_;
  const int rank_;
  const int size_;
  const muster::Duration timeout_;
  std::mutex mutex_;
  std::uint64_t page_ = 0;
};

}  // namespace

extern "C" unsigned muster_backend_plugin_abi() { return muster::kBackendPluginAbi; }

extern "C" void muster_register_backends(muster::BackendRegistrar& registrar) {
  registrar.add("ledger",
                [](const muster::DistributedBackendOptions& options,
                   const std::shared_ptr<muster::ProcessGroupOptions>&) {
                  return std::make_shared<LedgerBackend>(options);
                },
                {"cpu"});
}

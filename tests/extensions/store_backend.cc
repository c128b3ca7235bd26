// SPDX-License-Identifier: BSD-3-Clause
// A backend of stock torch in C++, as others ship one: a c10d::Backend in an extension module,
// which registers itself with torch.distributed when it is imported. It knows nothing of muster.
//
// Members leave their bytes in the group's store and read those of all others. It has allreduce
// (SUM), broadcast, allgather and barrier.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkRef = c10::intrusive_ptr<c10d::Work>;

class StoreBackend final : public c10d::Backend {
 public:
  StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "over_store"; }

  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "over_store only sums");
    for (auto& tensor : tensors) {
      auto sum = at::zeros_like(tensor, at::device(at::kCPU));
      for (const auto& one : exchange(tensor)) sum.add_(one);
      tensor.copy_(sum);
    }
    return done("allreduce", tensors);
  }
  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    for (auto& tensor : tensors)
      tensor.copy_(exchange(tensor)[static_cast<std::size_t>(options.rootRank)]);
    return done("broadcast", tensors);
  }
  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    const auto all = exchange(inputs.at(0));
    for (std::size_t i = 0; i < all.size(); ++i) outputs.at(0).at(i).copy_(all[i]);
    return done("allgather", outputs.at(0));
  }
  WorkRef barrier(const c10d::BarrierOptions&) override {
    exchange(at::empty({0}));
    return done("barrier", {});
  }

  /// Names of the calls that it has carried out.
  const std::vector<std::string>& calls() const { return calls_; }

 private:
  /// All members' tensors, on the CPU.
  Tensors exchange(const at::Tensor& tensor) {
    const auto mine = tensor.cpu().contiguous();
    const auto* const bytes = static_cast<const std::uint8_t*>(mine.const_data_ptr());
    const auto page = std::to_string(page_++) + " of ";
    store_->set(page + std::to_string(getRank()),
                std::vector<std::uint8_t>(bytes, bytes + mine.nbytes()));
    Tensors all;
    for (int rank = 0; rank < getSize(); ++rank) {
      const auto theirs = store_->get(page + std::to_string(rank));
      TORCH_CHECK(theirs.size() == mine.nbytes(), "rank ", rank, " gave another size");
      all.push_back(at::empty(mine.sizes(), mine.options()));
      std::memcpy(all.back().mutable_data_ptr(), theirs.data(), theirs.size());
    }
    return all;
  }
  WorkRef done(const char* call, const Tensors& outputs) {
    calls_.emplace_back(call);
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs));
    return c10d::Work::create_from_future(future);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::uint64_t page_ = 0;
  std::vector<std::string> calls_;
};

c10::intrusive_ptr<StoreBackend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                        int size, const std::chrono::duration<double>&) {
  return c10::make_intrusive<StoreBackend>(store, rank, size);
}

}  // namespace

PYBIND11_MODULE(store_backend, module) {
  namespace py = pybind11;
  const auto distributed = py::module_::import("torch.distributed");
  py::class_<StoreBackend, c10d::Backend, c10::intrusive_ptr<StoreBackend>>(module, "StoreBackend")
      .def("calls", &StoreBackend::calls);
  module.def("create", &create);
  distributed.attr("Backend").attr("register_backend")("over_store", module.attr("create"), false,
                                                       py::make_tuple("cpu", "deferred"));
}

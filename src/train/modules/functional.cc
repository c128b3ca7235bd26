// SPDX-License-Identifier: BSD-3-Clause
#include "muster/functional.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "core/group/errors.h"
#include "muster/init.h"
#include "train/modules/backward_frame.h"

namespace muster::nn {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using Shapes = std::vector<std::vector<std::int64_t>>;
using Splits = std::vector<std::int64_t>;

enum class FunctionalCall {
  all_reduce,
  broadcast,
  reduce,
  gather,
  scatter,
  all_gather,
  reduce_scatter,
  all_gather_into_tensor,
  reduce_scatter_tensor,
  all_to_all,
  all_to_all_single
};

/// A collective as a function of tensors.
struct Collective : torch::CustomClassHolder {
  explicit Collective(FunctionalCall kind) : kind(kind) {}

  FunctionalCall kind;
  Group group;
  std::optional<Duration> timeout;
  parallel::BackwardFrame frame;
  ReduceOp op = ReduceOp::SUM;
  int root = 0;                 // a rank of the default group
  bool zeros_off_root = false;  // for a reduce
  Splits output_splits, input_splits;
  Shapes shapes;  // shapes of the results, if they follow neither from the inputs nor from the
                  // caller's outputs

  variable_list run(at::TensorList inputs, variable_list outputs) const;
  c10::intrusive_ptr<Collective> adjoint(at::TensorList inputs) const;

 private:
  variable_list made(const Tensor& like) const {
    variable_list all;
    for (const auto& shape : shapes) all.push_back(at::empty(shape, like.options()));
    return all;
  }
  int members() const { return std::max(group->size(), 0); }
};
using CollectiveRef = c10::intrusive_ptr<Collective>;

variable_list Collective::run(at::TensorList inputs, variable_list outputs) const {
  const auto& first = inputs.front();
  const auto copy = [&] { return first.clone(at::MemoryFormat::Contiguous); };
  if (outputs.empty()) outputs = made(first);
  switch (kind) {
    case FunctionalCall::all_reduce:
      outputs = {copy()};
      muster::all_reduce(outputs[0], {.op = op, .group = group, .timeout = timeout});
      return outputs;
    case FunctionalCall::broadcast:
      outputs = {copy()};
      muster::broadcast(outputs[0], {.src = root, .group = group, .timeout = timeout});
      return outputs;
    case FunctionalCall::reduce:
      outputs = {copy()};
      muster::reduce(outputs[0], {.dst = root, .op = op, .group = group, .timeout = timeout});
      if (zeros_off_root && group->is_member() && get_rank() != root) outputs[0].zero_();
      return outputs;
    case FunctionalCall::gather: {
      const bool here = get_rank() == root;
      for (int i = 0; i < members(); ++i)
        outputs.push_back(here ? at::empty_like(first, at::MemoryFormat::Contiguous)
                               : at::zeros_like(first));
      muster::gather(first, {.gather_list = here ? outputs : TensorList{},
                             .dst = root,
                             .group = group,
                             .timeout = timeout});
      return outputs;
    }
    case FunctionalCall::scatter:
      outputs = {at::zeros_like(first, at::MemoryFormat::Contiguous)};
      muster::scatter(outputs[0], {.scatter_list = get_rank() == root ? inputs.vec() : TensorList{},
                                   .src = root,
                                   .group = group,
                                   .timeout = timeout});
      return outputs;
    case FunctionalCall::all_gather:
      for (int i = 0; shapes.empty() && i < members(); ++i)
        outputs.push_back(at::empty_like(first, at::MemoryFormat::Contiguous));
      muster::all_gather(outputs, first, {.group = group, .timeout = timeout});
      return outputs;
    case FunctionalCall::reduce_scatter:
      muster::reduce_scatter(outputs[0], inputs.vec(),
                             {.op = op, .group = group, .timeout = timeout});
      return outputs;
    case FunctionalCall::all_gather_into_tensor:
      muster::all_gather_into_tensor(outputs[0], first, {.group = group, .timeout = timeout});
      return outputs;
    case FunctionalCall::reduce_scatter_tensor:
      muster::reduce_scatter_tensor(outputs[0], first,
                                    {.op = op, .group = group, .timeout = timeout});
      return outputs;
    case FunctionalCall::all_to_all:
      muster::all_to_all(outputs, inputs.vec(), {.group = group, .timeout = timeout});
      return outputs;
    case FunctionalCall::all_to_all_single:
      muster::all_to_all_single(outputs[0], first,
                                {.output_split_sizes = output_splits,
                                 .input_split_sizes = input_splits,
                                 .group = group,
                                 .timeout = timeout});
      return outputs;
  }
  return outputs;
}

/// The collective that maps gradients of the results to gradients of the inputs.
CollectiveRef Collective::adjoint(at::TensorList inputs) const {
  const auto of = [&](FunctionalCall other) {
    auto made = c10::make_intrusive<Collective>(other);
    made->group = group;
    made->timeout = timeout;
    made->frame = frame;
    made->root = root;
    return made;
  };
  const auto shaped = [&](FunctionalCall other) {
    auto made = of(other);
    for (const auto& input : inputs) made->shapes.push_back(input.sizes().vec());
    return made;
  };
  switch (kind) {
    case FunctionalCall::all_reduce: {
      auto same = of(kind);
      same->op = op;
      return same;
    }
    case FunctionalCall::broadcast: {
      auto back = of(FunctionalCall::reduce);
      back->zeros_off_root = true;
      return back;
    }
    case FunctionalCall::reduce: return of(FunctionalCall::broadcast);
    case FunctionalCall::gather: return of(FunctionalCall::scatter);
    case FunctionalCall::scatter: return of(FunctionalCall::gather);
    case FunctionalCall::all_gather: return shaped(FunctionalCall::reduce_scatter);
    case FunctionalCall::reduce_scatter: return shaped(FunctionalCall::all_gather);
    case FunctionalCall::all_gather_into_tensor:
      return shaped(FunctionalCall::reduce_scatter_tensor);
    case FunctionalCall::reduce_scatter_tensor:
      return shaped(FunctionalCall::all_gather_into_tensor);
    case FunctionalCall::all_to_all: return shaped(FunctionalCall::all_to_all);
    case FunctionalCall::all_to_all_single: {
      auto back = shaped(kind);
      back->output_splits = input_splits;
      back->input_splits = output_splits;
      return back;
    }
  }
  return of(kind);
}

struct Communicate : torch::autograd::Function<Communicate> {
  /// `outputs` is the caller's memory for the results; null: allocated here.
  static variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList inputs,
                               const CollectiveRef& call, const TensorList* outputs) {
    ctx->saved_data["adjoint"] = at::IValue::make_capsule(call->adjoint(inputs));
    return call->run(inputs, outputs != nullptr ? *outputs : variable_list{});
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<Collective>(ctx->saved_data["adjoint"].toCapsule());
    variable_list found;
    const auto communicate = [&] {
      found = apply(at::TensorList(gradients), call, static_cast<const TensorList*>(nullptr));
    };
    try {
      call->frame.wait_in ? call->frame.wait_in(call->group, communicate) : communicate();
    } catch (...) {
      if (call->frame.throw_as) call->frame.throw_as();
      throw;
    }
    found.resize(found.size() + 2);  // `call` and `outputs` have no gradients
    return found;
  }
};

template <class Options>
CollectiveRef collective(FunctionalCall kind, const Options& options) {
  auto made = c10::make_intrusive<Collective>(kind);
  made->group = options.group ? options.group : default_group();
  made->timeout = options.timeout;
  if (options._frame != nullptr) made->frame = *options._frame;
  if constexpr (requires { options.op; }) made->op = options.op;
  return made;
}

template <class Options>
CollectiveRef rooted(FunctionalCall kind, int root, const Options& options) {
  auto made = collective(kind, options);
  made->root = root;
  return made;
}

variable_list results(const CollectiveRef& call, at::TensorList inputs,
                      const TensorList* outputs = nullptr) {
  return Communicate::apply(inputs, call, outputs);
}

/// For a call that writes into one tensor of the caller. As in torch, that tensor stays outside the
/// graph, so that it can be written again.
Tensor result(const CollectiveRef& call, at::TensorList inputs, const Tensor& output) {
  const TensorList outputs{output.detach()};
  return results(call, inputs, &outputs)[0];
}

}  // namespace

Tensor all_reduce(const Tensor& tensor, const ReductionOptions& options) {
  return results(collective(FunctionalCall::all_reduce, options), {tensor})[0];
}

Tensor broadcast(const Tensor& tensor, int src, const FunctionalOptions& options) {
  return results(rooted(FunctionalCall::broadcast, src, options), {tensor})[0];
}

Tensor reduce(const Tensor& tensor, int dst, const ReductionOptions& options) {
  return results(rooted(FunctionalCall::reduce, dst, options), {tensor})[0];
}

TensorList gather(const Tensor& tensor, int dst, const FunctionalOptions& options) {
  return results(rooted(FunctionalCall::gather, dst, options), {tensor});
}

Tensor scatter(const TensorList& tensors, int src, const FunctionalOptions& options) {
  const auto call = rooted(FunctionalCall::scatter, src, options);
  if (call->group->is_member() && tensors.size() != static_cast<std::size_t>(call->group->size()))
    group::invalid("nn::scatter: " + std::to_string(tensors.size()) + " tensors for the " +
                   std::to_string(call->group->size()) +
                   " members of the group; gradients need one for each, off src too");
  if (tensors.empty()) return {};
  return results(call, tensors)[0];
}

TensorList all_gather(const Tensor& tensor, const FunctionalOptions& options) {
  return results(collective(FunctionalCall::all_gather, options), {tensor});
}

Tensor all_gather_into_tensor(const Tensor& output_tensor, const Tensor& input_tensor,
                              const FunctionalOptions& options) {
  return result(collective(FunctionalCall::all_gather_into_tensor, options), {input_tensor},
                output_tensor);
}

Tensor reduce_scatter(const Tensor& output, const TensorList& input_list,
                      const ReductionOptions& options) {
  if (input_list.empty())
    group::invalid("nn::reduce_scatter: input_list is empty; it has one tensor for each member");
  return result(collective(FunctionalCall::reduce_scatter, options), input_list, output);
}

TensorList all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                      const FunctionalOptions& options) {
  if (input_tensor_list.empty() || output_tensor_list.empty())
    group::invalid("nn::all_to_all: a list is empty; each has one tensor for each member");
  return results(collective(FunctionalCall::all_to_all, options), input_tensor_list,
                 &output_tensor_list);
}

Tensor all_to_all_single(const Tensor& output, const Tensor& input,
                         const Splits& output_split_sizes, const Splits& input_split_sizes,
                         const FunctionalOptions& options) {
  const auto call = collective(FunctionalCall::all_to_all_single, options);
  call->output_splits = output_split_sizes;
  call->input_splits = input_split_sizes;
  return result(call, {input}, output);
}

}  // namespace muster::nn

// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/sparse.h"

#include <ATen/Functions.h>

#include <cstring>
#include <string>
#include <utility>

#include "core/group/call/call_builder.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/resolve.h"
#include "core/group/work/finished_work.h"

namespace muster::group {
namespace {

constexpr std::string_view kName = "all_reduce";
constexpr std::size_t kMaxDimensions = 16;

/// Properties the members compare first. All words are int64.
struct Facts {
  std::int64_t nonzero = 0;
  std::int64_t dtype = 0;
  std::int64_t sparse_dimensions = 0;
  std::int64_t dimensions = 0;
  std::int64_t sizes[kMaxDimensions] = {};
};
constexpr std::int64_t kFactWords = sizeof(Facts) / sizeof(std::int64_t);

std::string text_of(const Facts& facts) {
  return std::string(c10::toString(static_cast<at::ScalarType>(facts.dtype))) + " of shape " +
         c10::str(at::IntArrayRef(facts.sizes, static_cast<std::size_t>(facts.dimensions))) +
         " with " + std::to_string(facts.sparse_dimensions) + " sparse dimensions";
}

bool alike(const Facts& a, const Facts& b) {
  return std::memcmp(reinterpret_cast<const std::byte*>(&a) + sizeof a.nonzero,
                     reinterpret_cast<const std::byte*>(&b) + sizeof b.nonzero,
                     sizeof(Facts) - sizeof a.nonzero) == 0;
}

Facts facts_of(const at::Tensor& tensor) {
  Facts facts;
  facts.nonzero = tensor._nnz();
  facts.dtype = static_cast<std::int64_t>(tensor.scalar_type());
  facts.sparse_dimensions = tensor.sparse_dim();
  facts.dimensions = tensor.dim();
  for (std::int64_t i = 0; i < tensor.dim(); ++i) facts.sizes[i] = tensor.size(i);
  return facts;
}

void check(const at::Tensor& tensor, ReduceOp op) {
  if (op != ReduceOp::SUM)
    invalid(
        "sparse tensors can be reduced with SUM only; call to_dense() first to use another "
        "operation");
  if (!tensor.device().is_cpu())
    invalid("the sparse tensor is on " + tensor.device().str() +
            "; only those on the CPU can be reduced");
  if (tensor.dim() > static_cast<std::int64_t>(kMaxDimensions))
    invalid("the sparse tensor has " + std::to_string(tensor.dim()) + " dimensions, at most " +
            std::to_string(kMaxDimensions) + " can be reduced");
  if (std::string why; !collective::reduce_supports(collective::engine_reduce(op),
                                                    to_dtype(tensor.scalar_type()), &why))
    invalid(why);
}

/// Gathers every member's tensor; sizes may differ.
std::vector<at::Tensor> gather(ProcessGroup& group, const at::Tensor& mine,
                               std::vector<at::Tensor> outputs, std::optional<Duration> timeout) {
  Call call(group, Op::all_gather, FunctionName(kName), timeout);
  CallBuilder(call).add_input(mine);
  CallBuilder(call).add_output(outputs);
  CallBuilder(call).check();
  core_of(group).submit(call);
  return outputs;
}

std::vector<Facts> compare(ProcessGroup& group, const Facts& mine,
                           std::optional<Duration> timeout) {
  const auto words = at::empty({kFactWords}, at::kLong);
  std::memcpy(words.mutable_data_ptr(), &mine, sizeof mine);
  const auto all = at::empty({group.size(), kFactWords}, at::kLong);
  gather(group, words, all.unbind(), timeout);
  std::vector<Facts> facts(static_cast<std::size_t>(group.size()));
  std::memcpy(facts.data(), all.const_data_ptr(), facts.size() * sizeof(Facts));
  const int first = core_of(group).first_rank_of(0);
  for (std::size_t member = 0; member < facts.size(); ++member) {
    const int other = core_of(group).first_rank_of(static_cast<int>(member));
    const auto on = std::string(kName) + " of sparse tensors on rank " +
                    std::to_string(core_of(group).first_rank_of(group.rank())) + " (group " +
                    group.name() + "): ";
    if (!alike(facts[member], facts[0]))
      throw DistError(on + "rank " + std::to_string(first) + " gave " + text_of(facts[0]) +
                          ", rank " + std::to_string(other) + " gave " + text_of(facts[member]) +
                          "; all must be alike",
                      Code::mismatch, {first, other});
    double places = 1;  // a coalesced tensor has at most as many values as places
    for (std::int64_t i = 0; i < facts[member].sparse_dimensions; ++i)
      places *= static_cast<double>(facts[member].sizes[i]);
    if (facts[member].nonzero < 0 || static_cast<double>(facts[member].nonzero) > places)
      throw DistError(on + "rank " + std::to_string(other) + " announced " +
                          std::to_string(facts[member].nonzero) + " values",
                      Code::mismatch, {other});
  }
  return facts;
}

}  // namespace

WorkRef all_reduce_sparse(const at::Tensor& tensor, const AllReduceOptions& options) {
  const auto group = acting(options.group, kName);
  if (!group) return nullptr;
  at::NoGradGuard no_grad;
  at::Tensor mine;
  try {
    check(tensor, options.op);
    mine = tensor.detach().coalesce();
  } catch (const std::exception& why) {
    core_of(group).refuse(Op::all_reduce, kName, why);
  }
  const auto facts = compare(*group, facts_of(mine), options.timeout);
  std::vector<at::Tensor> indices, values;
  for (const auto& theirs : facts) {
    indices.push_back(at::empty({theirs.sparse_dimensions, theirs.nonzero}, at::kLong));
    auto shape = mine.values().sizes().vec();
    shape.front() = theirs.nonzero;
    values.push_back(at::empty(shape, mine.values().options()));
  }
  indices = gather(*group, mine.indices(), std::move(indices), options.timeout);
  values = gather(*group, mine.values(), std::move(values), options.timeout);
  // torch cannot add sparse 16-bit floats. They are added in float32 and rounded once, like dense
  // ones.
  const bool narrow = mine.scalar_type() == at::kHalf || mine.scalar_type() == at::kBFloat16;
  at::Tensor sum;
  for (std::size_t member = 0; member < facts.size(); ++member) {
    const auto part = narrow ? values[member].to(at::kFloat) : values[member];
    const auto options_of = mine.options().dtype(part.scalar_type());
    const auto theirs =
        at::_sparse_coo_tensor_unsafe(indices[member], part, mine.sizes(), options_of)
            ._coalesced_(true);
    sum = sum.defined() ? sum + theirs : theirs;
  }
  at::Tensor target = tensor;
  target.copy_(sum.coalesce().to(mine.scalar_type()));
  return options.async_op ? std::make_shared<FinishedWork>(TensorList{tensor}) : nullptr;
}

}  // namespace muster::group

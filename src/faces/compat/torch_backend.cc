// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/torch_backend.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "faces/compat/torch_calls.h"
#include "faces/compat/torch_error.h"
#include "faces/compat/torch_versions.h"
#include "faces/compat/torch_work.h"
#include "muster/collectives.h"
#include "muster/debug.h"
#include "muster/point_to_point.h"
#include "muster/shared_memory.h"

namespace muster::compat {
namespace {

using c10d::OpType;

constexpr int kShrinkAbort = 1;  // torch's SHRINK_ABORT
constexpr Duration kLimitBesideRpc = std::chrono::seconds(5);

ReduceOp reduction(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return ReduceOp::SUM;
    case c10d::ReduceOp::AVG: return ReduceOp::AVG;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::PRODUCT;
    case c10d::ReduceOp::MIN: return ReduceOp::MIN;
    case c10d::ReduceOp::MAX: return ReduceOp::MAX;
    case c10d::ReduceOp::BAND: return ReduceOp::BAND;
    case c10d::ReduceOp::BOR: return ReduceOp::BOR;
    case c10d::ReduceOp::BXOR: return ReduceOp::BXOR;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (factor == nullptr)
        group::invalid("PREMUL_SUM without a factor; make it with _make_nccl_premul_sum");
      return ReduceOp::premul_sum(factor->tensor_factor.defined()
                                      ? factor->tensor_factor.item<double>()
                                      : factor->double_factor);
    }
    default: group::invalid("an unknown reduction was asked for");
  }
}

/// The one entry of a list that torch's interface keeps for several devices of one process.
template <class T>
T& only(ProcessGroup& group, Op op, std::vector<T>& list, const char* what,
        std::int64_t index = 0) {
  if (list.size() != 1)
    core_of(group).refuse(
        op, what,
        DistError("one entry is expected, " + std::to_string(list.size()) + " were given"));
  if (index != 0)
    core_of(group).refuse(op, what,
                          DistError("the only tensor is number 0, not " + std::to_string(index)));
  return list.front();
}

/// Splits a tensor into one part per member: any shape if it is contiguous, else along dimension 0.
/// If that is impossible, the other members are told that this one's call was refused.
Tensors parts_of(ProcessGroup& group, Op op, const at::Tensor& whole, const at::Tensor& part,
                 const char* what) {
  const int members = group.size();
  const bool flat_memory = whole.is_contiguous();
  const bool divides = flat_memory || whole.size(0) % members == 0;
  if (whole.numel() != part.numel() * members || !divides) {
    core_of(group).refuse(
        op, what,
        DistError("a tensor of " + std::to_string(part.numel() * members) +
                  " elements is expected, as many from each of " + std::to_string(members) +
                  " ranks, not one of " + std::to_string(whole.numel()) + " elements" +
                  (divides ? ""
                           : ", not contiguous, whose " + std::to_string(whole.size(0)) +
                                 " rows they cannot share equally")));
  }
  Tensors parts;
  const auto shared = flat_memory ? whole.view({-1}) : whole;
  const auto rows = shared.size(0) / members;
  for (int member = 0; member < members; ++member) {
    auto rows_of_member = shared.narrow(0, member * rows, rows);
    parts.push_back(flat_memory ? rows_of_member.view(part.sizes()) : std::move(rows_of_member));
  }
  return parts;
}

Tensors flat(const TorchBackend::Lists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

bool one_dtype(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const auto& each) { return each.dtype() == tensors.front().dtype(); });
}

/// Torch's message around muster's, which names the missing rank.
std::string monitored_text(int rank, const std::optional<Duration>& timeout,
                           const std::string& why) {
  if (rank != 0)
    return "Rank " + std::to_string(rank) +
           " successfully reached monitoredBarrier, but received errors while waiting for "
           "send/recv from rank 0. Please check rank 0 logs "
           "for faulty rank.\n Original exception:\n" +
           why;
  return timeout == Duration::zero()
             ? "Rank 0 timed out in monitoredBarrier after 0 ms.\n Original exception:\n" + why
             : why;
}

/// Position of the member that errors call `first_rank`; -1 if no member is called so.
int position_in(const ProcessGroup& group, int first_rank) {
  int member = group.size() - 1;
  while (member >= 0 && core_of(group).first_rank_of(member) != first_rank) --member;
  return member;
}

/// Groups of muster's own job come and go by muster's functions.
void needs_job(const std::shared_ptr<TorchJob>& job, const char* done, const char* function) {
  if (job == nullptr)
    group::invalid(std::string("a group of muster's cannot be ") + done +
                   " by torch.distributed: call muster." + function);
}

std::chrono::milliseconds milliseconds(Duration timeout) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
}

}  // namespace

c10::intrusive_ptr<TorchBackend> TorchBackend::create(const TorchGroup& made_of) {
  return in_torch_errors([&] {
    auto ranks = made_of.global_ranks;
    auto job = ranks.empty() || made_of.alone ? nullptr : TorchJob::of_default_group();
    const bool whole_job = job == nullptr;
    if (whole_job) {
      job = TorchJob::open(made_of.store, made_of.id, made_of.rank, made_of.size, made_of.timeout);
      if (ranks.empty() && !made_of.alone) job->make_default();
    }
    auto group =
        whole_job ? job->world() : job->make_group(made_of.id, std::move(ranks), made_of.timeout);
    return c10::make_intrusive<TorchBackend>(made_of.backend, std::move(job), std::move(group),
                                             whole_job);
  });
}

c10::intrusive_ptr<TorchBackend> TorchBackend::over(Group group) {
  return in_torch_errors([&] {
    if (group == nullptr || !group->is_member())
      group::invalid("a backend of stock torch needs a group that this process is a member of");
    return c10::make_intrusive<TorchBackend>("muster", nullptr, std::move(group), false);
  });
}

TorchBackend::TorchBackend(std::string name, std::shared_ptr<TorchJob> job, Group group,
                           bool whole_job)
    : Backend(group->rank(), group->size()),
      name_(std::move(name)),
      job_(std::move(job)),
      group_(std::move(group)),
      calls_(name_, group_),
      gloo_words_{group_->rank(), group_->size()},
      whole_job_(whole_job),
      options_(
          c10::make_intrusive<c10d::Backend::Options>(name_, milliseconds(group_->timeout()))) {
  init();
}

TorchBackend::~TorchBackend() = default;

TorchBackend::Works TorchBackend::broadcast(Tensors& tensors,
                                            const c10d::BroadcastOptions& options) {
  const auto words = [&] {
    return gloo_words_.broadcast(tensors, options.rootRank, options.rootTensor);
  };
  const auto call = [&](const at::Tensor& tensor, auto timeout) {
    return muster::broadcast(tensor, {.group = group_,
                                      .async_op = options.asyncOp,
                                      .group_src = static_cast<int>(options.rootRank),
                                      .timeout = timeout});
  };
  if (tensors.size() == 1 && options.rootTensor == 0)
    return calls_.issue(
        OpType::BROADCAST, tensors, tensors, options.timeout,
        [&](auto timeout) { return call(tensors.front(), timeout); }, words);
  const auto give_root_to_all = [&](const Tensors& all) {
    if (options.rootRank == getRank())
      copy_to_all(all, static_cast<std::size_t>(options.rootTensor));
  };
  return calls_.issue_several(Op::broadcast, tensors, options.timeout, words(), give_root_to_all,
                              call);
}

TorchBackend::Works TorchBackend::allreduce(Tensors& tensors,
                                            const c10d::AllreduceOptions& options) {
  const auto words = [&] {
    return gloo_words_.allreduce(tensors, options.reduceOp == c10d::ReduceOp::SUM);
  };
  const auto call = [&](const at::Tensor& tensor, auto timeout) {
    return muster::all_reduce(tensor, {.op = reduction(options.reduceOp),
                                       .group = group_,
                                       .async_op = options.asyncOp,
                                       .timeout = timeout});
  };
  if (tensors.size() == 1)
    return calls_.issue(
        OpType::ALLREDUCE, tensors, tensors, options.timeout,
        [&](auto timeout) { return call(tensors.front(), timeout); }, words);
  return calls_.issue_several(
      Op::all_reduce, tensors, options.timeout, words(),
      [&](const Tensors& all) {
        in_torch_errors([&] { reduce_locally(all, reduction(options.reduceOp)); });
      },
      call);
}

TorchBackend::Works TorchBackend::allreduce_sparse(Tensors& tensors,
                                                   const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);
}

TorchBackend::Works TorchBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const auto with = [&](auto timeout) {
    return AllReduceOptions{.op = reduction(options.reduceOp),
                            .group = group_,
                            .async_op = options.asyncOp,
                            .timeout = timeout};
  };
  return calls_.issue(
      OpType::ALLREDUCE_COALESCED, tensors, tensors, options.timeout,
      [&](auto timeout) { return muster::all_reduce_coalesced(tensors, with(timeout)); },
      [&] { return gloo_words_.allreduce_coalesced(tensors); });
}

TorchBackend::Works TorchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return calls_.issue(
      OpType::REDUCE, tensors, tensors, options.timeout,
      [&](auto timeout) {
        return muster::reduce(only(*group_, Op::reduce, tensors, "reduce", options.rootTensor),
                              {.op = reduction(options.reduceOp),
                               .group = group_,
                               .async_op = options.asyncOp,
                               .group_dst = static_cast<int>(options.rootRank),
                               .timeout = timeout});
      },
      [&] { return gloo_words_.reduce(tensors, options.rootRank, options.rootTensor); });
}

TorchBackend::Works TorchBackend::allgather(Lists& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& options) {
  const auto words = [&] { return gloo_words_.allgather(outputs, inputs); };
  if (inputs.size() > 1 && words().empty()) {
    // Every list of outputs gets all inputs of all members, member by member.
    const auto by_member = [&](const Tensors& list) {
      Lists parts;
      for (auto at = list.begin(); at != list.end();
           at += static_cast<std::ptrdiff_t>(inputs.size()))
        parts.emplace_back(at, at + static_cast<std::ptrdiff_t>(inputs.size()));
      return parts;
    };
    return calls_.issue_each(
        OpType::ALLGATHER, inputs, flat(outputs), options.timeout,
        [&](std::size_t i, auto timeout) {
          return muster::all_gather_coalesced(
              by_member(outputs[i]), inputs,
              {.group = group_, .async_op = options.asyncOp, .timeout = timeout});
        },
        outputs.size());
  }
  return calls_.issue(
      OpType::ALLGATHER, inputs, outputs.empty() ? Tensors{} : outputs.front(), options.timeout,
      [&](auto timeout) {
        return muster::all_gather(
            only(*group_, Op::all_gather, outputs, "allgather"),
            only(*group_, Op::all_gather, inputs, "allgather"),
            {.group = group_, .async_op = options.asyncOp, .timeout = timeout});
      },
      words);
}

TorchBackend::Works TorchBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  return calls_.issue(
      OpType::_ALLGATHER_BASE, {input}, {output}, options.timeout, [&](auto timeout) {
        return muster::all_gather(
            parts_of(*group_, Op::all_gather, output, input, "all_gather_into_tensor"), input,
            {.group = group_, .async_op = options.asyncOp, .timeout = timeout});
      });
}

TorchBackend::Works TorchBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  const CollectiveOptions with{
      .group = group_, .async_op = options.asyncOp, .timeout = given(options.timeout)};
  if (inputs.empty() || one_dtype(inputs))
    return calls_.issue(
        OpType::ALLGATHER_COALESCED, inputs, flat(outputs), options.timeout,
        [&](auto) { return muster::all_gather_coalesced(outputs, inputs, with); },
        [&] { return gloo_words_.allgather_coalesced(outputs, inputs); });
  return calls_.issue_each(OpType::ALLGATHER_COALESCED, inputs, inputs, options.timeout,
                           [&](std::size_t i, auto) {
                             Tensors column;
                             for (const auto& list : outputs) column.push_back(list.at(i));
                             return muster::all_gather(column, inputs[i], with);
                           });
}

TorchBackend::Works TorchBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return calls_.issue_each(
      kAllGatherIntoTensorCoalesced, inputs, outputs, options.timeout,
      [&](std::size_t i, auto timeout) {
        return muster::all_gather(
            parts_of(*group_, Op::all_gather, outputs[i], inputs.at(i),
                     "all_gather_into_tensor_coalesced"),
            inputs.at(i), {.group = group_, .async_op = options.asyncOp, .timeout = timeout});
      });
}

TorchBackend::Works TorchBackend::gather(Lists& outputs, Tensors& inputs,
                                         const c10d::GatherOptions& options) {
  return calls_.issue(
      OpType::GATHER, inputs, outputs.empty() ? Tensors{} : outputs.front(), options.timeout,
      [&](auto timeout) {
        return muster::gather(
            only(*group_, Op::gather, inputs, "gather"),
            {.gather_list =
                 outputs.empty() ? Tensors{} : only(*group_, Op::gather, outputs, "gather"),
             .group = group_,
             .async_op = options.asyncOp,
             .group_dst = static_cast<int>(options.rootRank),
             .timeout = timeout});
      },
      [&] { return gloo_words_.gather(outputs, inputs, options.rootRank); });
}

TorchBackend::Works TorchBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                     const c10d::GatherOptions& options) {
  return calls_.issue(OpType::GATHER, {input}, {output}, options.timeout, [&](auto timeout) {
    const bool root = options.rootRank == getRank();
    return muster::gather(
        input, {.gather_list = root ? parts_of(*group_, Op::gather, output, input, "gather_single")
                                    : Tensors{},
                .group = group_,
                .async_op = options.asyncOp,
                .group_dst = static_cast<int>(options.rootRank),
                .timeout = timeout});
  });
}

TorchBackend::Works TorchBackend::scatter(Tensors& outputs, Lists& inputs,
                                          const c10d::ScatterOptions& options) {
  return calls_.issue(
      OpType::SCATTER, inputs.empty() ? Tensors{} : inputs.front(), outputs, options.timeout,
      [&](auto timeout) {
        return muster::scatter(
            only(*group_, Op::scatter, outputs, "scatter"),
            {.scatter_list =
                 inputs.empty() ? Tensors{} : only(*group_, Op::scatter, inputs, "scatter"),
             .group = group_,
             .async_op = options.asyncOp,
             .group_src = static_cast<int>(options.rootRank),
             .timeout = timeout});
      },
      [&] { return gloo_words_.scatter(outputs, inputs, options.rootRank); });
}

TorchBackend::Works TorchBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  return calls_.issue(
      OpType::REDUCE_SCATTER, inputs.empty() ? Tensors{} : inputs.front(), outputs, options.timeout,
      [&](auto timeout) {
        return muster::reduce_scatter(only(*group_, Op::reduce_scatter, outputs, "reduce_scatter"),
                                      only(*group_, Op::reduce_scatter, inputs, "reduce_scatter"),
                                      {.op = reduction(options.reduceOp),
                                       .group = group_,
                                       .async_op = options.asyncOp,
                                       .timeout = timeout});
      },
      [&] { return gloo_words_.reduce_scatter(outputs, inputs); });
}

TorchBackend::Works TorchBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& options) {
  return calls_.issue(
      OpType::_REDUCE_SCATTER_BASE, {input}, {output}, options.timeout, [&](auto timeout) {
        return muster::reduce_scatter(
            output, parts_of(*group_, Op::reduce_scatter, input, output, "reduce_scatter_tensor"),
            {.op = reduction(options.reduceOp),
             .group = group_,
             .async_op = options.asyncOp,
             .timeout = timeout});
      });
}

TorchBackend::Works TorchBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return calls_.issue_each(OpType::REDUCE_SCATTER_TENSOR_COALESCED, inputs, outputs,
                           options.timeout, [&](std::size_t i, auto timeout) {
                             return muster::reduce_scatter(
                                 outputs[i],
                                 parts_of(*group_, Op::reduce_scatter, inputs.at(i), outputs[i],
                                          "reduce_scatter_tensor_coalesced"),
                                 {.op = reduction(options.reduceOp),
                                  .group = group_,
                                  .async_op = options.asyncOp,
                                  .timeout = timeout});
                           });
}

TorchBackend::Works TorchBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<std::int64_t>& output_splits,
                                                std::vector<std::int64_t>& input_splits,
                                                const c10d::AllToAllOptions& options) {
  return calls_.issue(
      OpType::ALLTOALL_BASE, {input}, {output}, options.timeout,
      [&](auto timeout) {
        return muster::all_to_all_single(output, input,
                                         {.output_split_sizes = output_splits,
                                          .input_split_sizes = input_splits,
                                          .group = group_,
                                          .async_op = options.asyncOp,
                                          .timeout = timeout});
      },
      [&] {
        const auto of_input = gloo_words_.alltoall_base(input, input_splits);
        return of_input.empty() ? gloo_words_.alltoall_base(output, output_splits) : of_input;
      });
}

TorchBackend::Works TorchBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllToAllOptions& options) {
  return calls_.issue(
      OpType::ALLTOALL, inputs, outputs, options.timeout,
      [&](auto timeout) {
        return muster::all_to_all(
            outputs, inputs, {.group = group_, .async_op = options.asyncOp, .timeout = timeout});
      },
      [&] { return gloo_words_.alltoall(outputs, inputs); });
}

TorchBackend::Works TorchBackend::barrier(const c10d::BarrierOptions& options) {
  return calls_.issue(OpType::BARRIER, {}, {}, options.timeout, [&](auto timeout) {
    return muster::barrier({.group = group_, .async_op = options.asyncOp, .timeout = timeout});
  });
}

void TorchBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  // Here a zero timeout is a real one: ranks that have not arrived yet are late.
  const auto timeout = options.timeout < std::chrono::milliseconds::zero()
                           ? std::nullopt
                           : std::optional<Duration>(options.timeout);
  in_torch_errors([&] {
    try {
      muster::monitored_barrier(
          {.group = group_, .timeout = timeout, .wait_all_ranks = wait_all_ranks});
    } catch (const DistBackendError& error) {
      C10_THROW_ERROR(DistBackendError, monitored_text(getRank(), timeout, error.what()));
    }
  });
}

TorchBackend::Works TorchBackend::send(Tensors& tensors, int destination, int tag) {
  return calls_.issue(
      OpType::SEND, tensors, {}, c10d::kUnsetTimeout,
      [&](auto) {
        return muster::isend(only(*group_, Op::send, tensors, "send"),
                             {.group = group_, .tag = tag, .group_dst = destination});
      },
      [&] { return gloo_words_.message(tensors); });
}

TorchBackend::Works TorchBackend::recv(Tensors& tensors, int source, int tag) {
  return calls_.issue(
      OpType::RECV, tensors, tensors, c10d::kUnsetTimeout,
      [&](auto) {
        return muster::irecv(only(*group_, Op::recv, tensors, "recv"),
                             {.group = group_, .tag = tag, .group_src = source});
      },
      [&] { return gloo_words_.message(tensors); });
}

TorchBackend::Works TorchBackend::recvAnysource(Tensors& tensors, int tag) {
  return calls_.issue(
      OpType::RECVANYSOURCE, tensors, tensors, c10d::kUnsetTimeout,
      [&](auto) {
        return muster::irecv(only(*group_, Op::recv, tensors, "recv"),
                             {.group = group_, .tag = tag});
      },
      [&] { return gloo_words_.message(tensors); });
}

c10::intrusive_ptr<c10d::Backend> TorchBackend::split(
    const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) return nullptr;
  return in_torch_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
    needs_job(job_, "split", "split_group");
    std::vector<int> of_job;
    for (const int rank : ranks) of_job.push_back(group_->global_rank_of(rank));
    auto group = job_->make_group(options->group_name, std::move(of_job), options->timeout);
    return c10::make_intrusive<TorchBackend>(name_, job_, std::move(group), false);
  });
}

c10::intrusive_ptr<c10d::Backend> TorchBackend::shrink(
    const std::vector<std::int64_t>& ranks_to_exclude, int flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  return in_torch_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
    needs_job(job_, "shrunk", "shrink_group");
    if (flags == kShrinkAbort) core_of(group_).abort("shrink_group was called with SHRINK_ABORT");
    const auto stays = [&](int rank) {
      return std::ranges::find(ranks_to_exclude, rank) == ranks_to_exclude.end();
    };
    const auto before = left_.value_or(TorchJob::Left{job_, group_});
    std::vector<int> exclude;
    for (int rank = 0; rank < getSize(); ++rank) {
      const int member = position_in(*before.group, core_of(group_).first_rank_of(rank));
      if (member >= 0 && !stays(rank)) exclude.push_back(member);
    }
    if (!left_ || !exclude.empty())
      left_ =
          before.job->shrink(before.group, exclude, options ? options->timeout : group_->timeout());
    std::vector<int> lost;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (stays(rank) && position_in(*left_->group, core_of(group_).first_rank_of(rank)) < 0)
        lost.push_back(rank);
    }
    if (!lost.empty())
      throw DistBackendError("shrink_group: ranks " + group::list(lost) +
                                 " of the group died too; call it again with ranks_to_exclude "
                                 "naming all that are lost",
                             Code::peer_failed, lost);
    if (!shut_down_.exchange(true) && !whole_job_) job_->retire(group_);
    const auto left = *std::exchange(left_, std::nullopt);
    return c10::make_intrusive<TorchBackend>(name_, left.job, left.group, whole_job_);
  });
}

void TorchBackend::setTimeout(std::chrono::milliseconds timeout) {
  group_->set_timeout(timeout);
  options_->timeout = timeout;
}

at::Tensor TorchBackend::allocate_shared(std::int64_t size, const at::TensorOptions& options) {
  return in_torch_errors([&] {
    try {
      return empty_shared({size}, options);
    } catch (const DistError& error) {
      if (error.code() != Code::exhausted) throw;
      return at::empty({size}, options);
    }
  });
}

/// For torch's Reducer, which takes complex gradients as pairs of reals.
at::Tensor TorchBackend::allocateTensor(long size, at::TensorOptions options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  return c10::isComplexType(dtype)
             ? allocate_shared(2 * size, options.dtype(c10::toRealValueType(dtype)))
             : allocate_shared(size, options);
}

c10d::ErrorType TorchBackend::getError() {
  switch (group_->failure().code()) {
    case Code::ok: return c10d::ErrorType::SUCCESS;
    case Code::timed_out: return c10d::ErrorType::TIMEOUT;
    case Code::peer_failed: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

void TorchBackend::abort() {
  if (!shut_down_)
    core_of(group_).abort("the process group was aborted on rank " +
                          std::to_string(group_->global_rank_of(group_->rank())));
}

void TorchBackend::shutdown() {
  if (shut_down_.exchange(true)) return;
  if (whole_job_) {
    // If torch's RPC is running, the others may wait for this rank in remote calls before they get
    // here.
    const bool others_may_wait = torch::distributed::rpc::RpcAgent::isCurrentRpcAgentSet();
    job_->close(others_may_wait ? std::min(group_->timeout(), kLimitBesideRpc) : group_->timeout());
  } else if (job_ != nullptr) {
    job_->retire(group_);
  }
}

}  // namespace muster::compat

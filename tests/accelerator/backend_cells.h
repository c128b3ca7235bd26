// SPDX-License-Identifier: BSD-3-Clause
/// Every operation with every dtype and reduction, as calls that a test can make on tensors of any
/// device, and what a group's backends lack of them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/op.h"
#include "core/group/call/dense_tensor.h"
#include "nccl_ranks.h"

namespace muster::testing {

inline const std::vector<ReduceOp> kReductions{
    ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,          ReduceOp::BAND,
    ReduceOp::BOR, ReduceOp::BXOR,    ReduceOp::AVG, ReduceOp::premul_sum(3)};

/// A call: makes its tensors from this rank's values by `place`, and returns its results.
using Place = std::function<at::Tensor(const at::Tensor&)>;
using BackendCell = std::function<TensorList(const Place&)>;
using BackendCells = std::vector<std::pair<std::string, BackendCell>>;

inline at::Tensor on_cpu(const at::Tensor& tensor) { return tensor.clone(); }
inline Place on_device_of(int rank) {
  return [rank](const at::Tensor& tensor) { return deferred::on_device(tensor, rank); };
}

inline TensorList blanks(const Place& place, const at::Tensor& like, int count) {
  TensorList tensors;
  for (int i = 0; i < count; ++i) tensors.push_back(place(torch::zeros_like(like)));
  return tensors;
}

inline BackendCells reductions(int rank, int ranks, at::ScalarType dtype, ReduceOp op) {
  const auto mine = values(rank, {2, 3}, dtype);
  const auto parts = [=] {
    TensorList list;
    for (int i = 0; i < ranks; ++i) list.push_back(values(rank + i, {2, 3}, dtype));
    return list;
  };
  return {
      {"all_reduce",
       [=](const Place& place) {
         const auto tensor = place(mine);
         all_reduce(tensor, {.op = op});
         return TensorList{tensor};
       }},
      {"reduce",
       [=](const Place& place) {
         const auto tensor = place(mine);
         reduce(tensor, {.dst = ranks - 1, .op = op});
         return TensorList{tensor};
       }},
      {"reduce_scatter",
       [=](const Place& place) {
         TensorList list;
         for (const auto& part : parts()) list.push_back(place(part));
         const auto got = place(mine);
         reduce_scatter(got, list, {.op = op});
         return TensorList{got};
       }},
      {"reduce_scatter, uneven",
       [=](const Place& place) {
         TensorList list;
         for (int i = 0; i < ranks; ++i) list.push_back(place(values(rank + i, {i, 2}, dtype)));
         const auto got = place(torch::zeros({rank, 2}, dtype));
         reduce_scatter(got, list, {.op = op});
         return TensorList{got};
       }},
      {"reduce_scatter_tensor",
       [=](const Place& place) {
         const auto got = place(mine);
         reduce_scatter_tensor(got, place(torch::cat(parts())), {.op = op});
         return TensorList{got};
       }},
      {"all_reduce_coalesced",
       [=](const Place& place) {
         const TensorList list{place(mine), place(values(rank, {5}, dtype))};
         all_reduce_coalesced(list, {.op = op});
         return list;
       }},
  };
}

inline BackendCells moves(int rank, int ranks, at::ScalarType dtype) {
  const auto raw = [](int of, std::int64_t elements, at::ScalarType type) {
    if (type != at::kBool) return testing::raw(of, elements, type);
    return testing::raw(of, elements, at::kByte).remainder(2).to(at::kBool);
  };
  const auto mine = raw(rank, 6, dtype).view({2, 3});
  const auto list_of = [=](const Place& place, bool here) {
    TensorList list;
    for (int i = 0; here && i < ranks; ++i)
      list.push_back(place(raw(rank * 7 + i, 6, dtype).view({2, 3})));
    return list;
  };
  const int root = ranks / 2;
  return {
      {"broadcast",
       [=](const Place& place) {
         const auto tensor = place(mine);
         broadcast(tensor, {.src = root});
         return TensorList{tensor};
       }},
      {"all_gather",
       [=](const Place& place) {
         const auto list = blanks(place, mine, ranks);
         all_gather(list, place(mine));
         return list;
       }},
      {"all_gather, uneven",
       [=](const Place& place) {
         TensorList list;
         for (int i = 0; i < ranks; ++i) list.push_back(place(torch::zeros({i, 2}, dtype)));
         all_gather(list, place(raw(rank, 2 * rank, dtype).view({rank, 2})));
         return list;
       }},
      {"all_gather_into_tensor",
       [=](const Place& place) {
         const auto tensor = place(torch::zeros({ranks, 2, 3}, dtype));
         all_gather_into_tensor(tensor, place(mine));
         return TensorList{tensor};
       }},
      {"gather",
       [=](const Place& place) {
         const auto list = blanks(place, mine, rank == root ? ranks : 0);
         gather(place(mine), {.gather_list = list, .dst = root});
         return list;
       }},
      {"scatter",
       [=](const Place& place) {
         const auto got = place(torch::zeros_like(mine));
         scatter(got, {.scatter_list = list_of(place, rank == root), .src = root});
         return TensorList{got};
       }},
      {"all_to_all",
       [=](const Place& place) {
         const auto got = blanks(place, mine, ranks);
         all_to_all(got, list_of(place, true));
         return got;
       }},
      {"all_to_all_single, uneven",
       [=](const Place& place) {
         // Rank r sends s rows to rank s.
         std::vector<std::int64_t> out, in(static_cast<std::size_t>(ranks), rank);
         std::int64_t total = 0;
         for (int i = 0; i < ranks; ++i) out.push_back(i), total += i;
         const auto got = place(torch::zeros({rank * ranks}, dtype));
         all_to_all_single(got, place(raw(rank, total, dtype)),
                           {.output_split_sizes = in, .input_split_sizes = out});
         return TensorList{got};
       }},
      {"isend and irecv in a ring",
       [=](const Place& place) {
         const auto got = place(torch::zeros_like(mine));
         if (ranks == 1) return TensorList{got};
         const auto sent = isend(place(mine), {.dst = (rank + 1) % ranks});
         const auto received = irecv(got, {.src = (rank + ranks - 1) % ranks});
         sent->wait();
         received->wait();
         return TensorList{got};
       }},
      {"batch_isend_irecv with all",
       [=](const Place& place) {
         TensorList got;
         std::vector<P2POp> ops;
         for (int peer = 0; peer < ranks; ++peer) {
           if (peer == rank) continue;
           got.push_back(place(torch::zeros_like(mine)));
           ops.push_back({isend, place(raw(rank * 7 + peer, 6, dtype).view({2, 3})), peer});
           ops.push_back({irecv, got.back(), peer});
         }
         if (ops.empty()) return got;
         for (const auto& work : batch_isend_irecv(ops)) work->wait();
         return got;
       }},
  };
}

/// Operations of which a backend may lack a part, whatever the dtype.
inline BackendCells parts_of_messages(int rank, int ranks) {
  const auto exchange = [=](const Place& place, std::optional<int> from, std::int64_t tag) {
    const auto got = place(torch::zeros({6}));
    const auto received = irecv(got, {.src = from, .tag = tag});
    const auto sent = isend(place(values(rank, {6})), {.dst = (rank + 1) % ranks, .tag = tag});
    received->wait();
    sent->wait();
    return TensorList{got};
  };
  const int previous = (rank + ranks - 1) % ranks;
  return {{"a tag other than 0", [=](const Place& place) { return exchange(place, previous, 5); }},
          {"a receive from any rank",
           [=](const Place& place) { return exchange(place, std::nullopt, 0); }}};
}

inline bool are_close(const at::Tensor& one, const at::Tensor& other) {
  const bool inexact = other.is_floating_point() || other.is_complex();
  if (!inexact) return same_bytes(one, other);
  if (c10::elementSize(other.scalar_type()) < 2 || !c10::isFloatingType(other.scalar_type()))
    return same_bytes(one, other) || torch::allclose(one, other, 1e-2);
  return torch::allclose(one.to(at::kDouble), other.to(at::kDouble), 1e-2);
}

/// The reductions and dtypes of each operation that the default group's backends refuse on this
/// rank.
class LackedCells {
 public:
  using Kind = std::pair<std::string, at::ScalarType>;  ///< the reduction, if any, and the dtype

  /// Every rank of the default group makes every call, on tensors where `place` puts them. Expects
  /// that what is not refused gives the same as on CPU tensors, if `against_cpu`.
  static LackedCells find(int rank, int ranks, const Place& place, bool against_cpu) {
    LackedCells lacked(place, against_cpu);
    for (const auto dtype : kReducible)
      for (const auto& op : kReductions)
        lacked.play(reductions(rank, ranks, dtype, op),
                    {std::string(collective::name_of(collective::engine_reduce(op))), dtype});
    for (const auto& dtypes : {kReducible, kMovable})
      for (const auto dtype : dtypes) lacked.play(moves(rank, ranks, dtype), {"", dtype});
    lacked.play(parts_of_messages(rank, ranks), {"", at::kFloat});
    return lacked;
  }

  static bool reduces(const std::string& operation) {
    return operation.find("reduce") != std::string::npos;
  }
  /// Whether nothing is lacking but reductions that are not defined on their dtype.
  bool has_all(const std::string& operation) const {
    return operations_.at(operation) == (reduces(operation) ? undefined() : std::set<Kind>{});
  }
  /// By operation, also those of which nothing is lacking.
  const std::map<std::string, std::set<Kind>>& operations() const { return operations_; }

 private:
  LackedCells(Place place, bool against_cpu)
      : place_(std::move(place)), against_cpu_(against_cpu) {}

  static std::set<Kind> undefined() {
    std::set<Kind> kinds;
    for (const auto dtype : kReducible)
      for (const auto& op : kReductions) {
        const auto reduce = collective::engine_reduce(op);
        if (!collective::reduce_supports(reduce, group::to_dtype(dtype)))
          kinds.emplace(collective::name_of(reduce), dtype);
      }
    return kinds;
  }

  void play(const BackendCells& cells, const Kind& kind) {
    for (const auto& [name, cell] : cells) {
      auto& lacked = operations_[name];
      TensorList got;
      const auto refusal = text_of([&, &cell = cell] { got = cell(place_); });
      const auto what = name + " " + kind.first + " of " + c10::toString(kind.second);
      if (!refusal.empty()) {
        if (!kind.first.empty())
          EXPECT_NE(refusal.find(name.substr(0, name.find(','))), std::string::npos) << refusal;
        lacked.insert(kind);
      } else if (against_cpu_) {
        const auto here = cell(on_cpu);
        for (std::size_t i = 0; i < here.size(); ++i)
          EXPECT_TRUE(are_close(got[i].cpu(), here[i])) << what;
      }
    }
  }

  Place place_;
  bool against_cpu_;
  std::map<std::string, std::set<Kind>> operations_;
};

}  // namespace muster::testing

// SPDX-License-Identifier: BSD-3-Clause
/// Which rank owns each of an optimizer's parameters, and how the ranks exchange them: the part of
/// ZeroRedundancyOptimizer that depends neither on the optimizer nor on its language.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/comm_hook.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster::parallel {

/// Keeps the parameters. Not thread-safe.
class ParameterOwners {
 public:
  /// The parameters of an optimizer, by parameter group.
  using Groups = std::vector<std::vector<at::Tensor>>;
  /// The name of a dtype in errors.
  using NameOfDtype = std::function<std::string(at::ScalarType)>;

  /// `in_buckets`: the parameters of a rank are contiguous in memory and are sent as one message.
  /// `group` may be null until the ranks exchange something.
  ParameterOwners(
      Group group, bool in_buckets,
      NameOfDtype name_of_dtype = [](at::ScalarType dtype) { return c10::toString(dtype); });

  /// Every member calls it with its parameters. Throws on every rank if they differ.
  void compare(const Groups& groups) const;
  /// Assigns each parameter to one of `ranks` ranks, as `shard_parameters` does. Local.
  void divide(Groups groups, int ranks);

  /// The parameters of one rank, by parameter group.
  Groups part_of(int rank) const;
  /// The numbers of the parameters in `part_of(rank)`, as an undivided optimizer counts them.
  std::vector<std::int64_t> numbers_of(int rank) const;
  int rank_of(const at::Tensor& parameter) const;
  /// The device of the first parameter.
  at::Device device() const { return owned_.front().parameter.device(); }
  const Group& group() const { return group_; }

  /// Broadcasts all parameters from their owners. Blocks until this rank has them.
  void share();
  /// This rank's update threw `why`, and the other ranks would wait for parameters that it will not
  /// send. Aborts the group. If the update's closure threw (`in_closure`), the other ranks may have
  /// failed alike: then the group stays usable.
  void fail_step(const std::exception& why, bool in_closure) const;

  // One bucket's step within backward: begin_bucket, the update of the parameters that it returned,
  // end_bucket.

  /// Sets the gradients of this rank's parameters in an averaged bucket, and returns the
  /// parameters. DDP sets gradients later; until then they are in the bucket.
  std::vector<at::Tensor> begin_bucket(const GradBucket& bucket, at::Tensor averaged);
  /// Restores the gradients and starts to broadcast the bucket's parameters. Blocks until this rank
  /// has all parameters if it is the last bucket. Returns the averages.
  at::Tensor end_bucket();

 private:
  struct OwnedParameter {
    at::Tensor parameter;
    int owner = 0;
    at::ScalarType dtype = at::kFloat;  // outside of a forward pass in low precision
  };
  struct Bucket {
    int owner = 0;
    at::Tensor memory;
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> places;  // the parameters' locations in `memory`
  };
  struct BucketStep {
    at::Tensor averaged;
    bool is_last = false;
    std::vector<OwnedParameter> updated;
    std::vector<at::Tensor> mine, gradients_before;
  };

  void lay_out();
  void restore_buckets();
  void send(const at::Tensor& tensor, int owner);
  void wait_for_all();

  Group group_;
  bool in_buckets_;
  NameOfDtype name_of_dtype_;
  Groups groups_;
  std::vector<std::vector<int>> owners_;                // of groups_
  std::vector<OwnedParameter> owned_;                   // without duplicates
  std::unordered_map<const void*, std::size_t> index_;  // in owned_, by TensorImpl
  std::vector<Bucket> buckets_;                         // if in_buckets_
  BucketStep step_;                                     // between begin_bucket and end_bucket
  std::vector<WorkRef> in_flight_;
};

}  // namespace muster::parallel

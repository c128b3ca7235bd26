#include "muster/model_averaging.h"

#include <utility>

#include "core/group/errors.h"
#include "muster/subgroups.h"

namespace muster {

PostLocalSGDState::PostLocalSGDState(const PostLocalSGDOptions& options) : options_(options) {
  if (options_.start_localSGD_iter < 0)
    group::invalid("post-local SGD: start_localSGD_iter must not be negative");
  if (options_.post_local_gradient_allreduce && !options_.subgroup)
    options_.subgroup = new_subgroups({}, {.group = options_.process_group}).first;
}

CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state) {
  const auto& options = state->options();
  auto everybody = all_reduce_hook(options.process_group);
  auto nearby =
      options.post_local_gradient_allreduce ? all_reduce_hook(options.subgroup) : CommHook();
  return [state = std::move(state), everybody = std::move(everybody),
          nearby = std::move(nearby)](const GradBucket& bucket) -> std::function<at::Tensor()> {
    const bool together = state->iteration_ < state->options_.start_localSGD_iter;
    if (bucket.is_last) ++state->iteration_;
    if (together) return everybody(bucket);
    if (nearby) return nearby(bucket);
    return [buffer = bucket.buffer] { return buffer; };
  };
}

}  // namespace muster

#include "muster/parallel/distributed_data_parallel.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "muster/group/collectives.h"
#include "muster/group/errors.h"
#include "muster/group/exchange.h"
#include "muster/group/init.h"
#include "muster/parallel/reducer.h"

namespace muster::parallel {
namespace {

std::string described(const NamedTensors& tensors) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    text += name + " " + c10::str(tensor.sizes()) + " " + c10::toString(tensor.scalar_type());
    text += tensor.requires_grad() ? " trained\n" : "\n";
  }
  return text;
}

std::string first_line_that_differs(const std::string& ours, const std::string& theirs) {
  std::size_t begin = 0;
  while (begin < ours.size()) {
    const std::size_t end = ours.find('\n', begin);
    if (theirs.compare(begin, end + 1 - begin, ours, begin, end + 1 - begin) != 0) break;
    begin = end + 1;
  }
  const auto line = [begin](const std::string& text) {
    return begin < text.size() ? "'" + text.substr(begin, text.find('\n', begin) - begin) + "'" : std::string("nothing more");
  };
  return line(ours) + " on rank 0 and " + line(theirs);
}

/// Throws on every rank where the modules differ.
void compare_modules(const Group& group, const std::string& mine) {
  const auto all = group::exchange_text(group, mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw DistError("DistributedDataParallel: the ranks' modules differ: the first difference is " +
                        first_line_that_differs(all[0], all[rank]) + " on rank " + std::to_string(rank) +
                        "; build the same module on every rank",
                    Code::mismatch, {group->global_rank_of(static_cast<int>(rank))});
  }
}

void check_devices(const NamedTensors& parameters, const DistributedDataParallelOptions& options) {
  const auto say = [](const std::string& text) { group::invalid("DistributedDataParallel: " + text); };
  if (!(options.bucket_cap_mb > 0)) say("bucket_cap_mb must be more than 0");
  if (options.output_device && !options.device_ids) say("output_device needs device_ids");
  if (!options.device_ids) return;
  if (options.device_ids->size() > 1)
    say("device_ids has " + std::to_string(options.device_ids->size()) +
        " entries; one process drives one device: give one, or none for a module on several devices");
  const bool cuda = std::all_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.second.is_cuda(); });
  if (!cuda) say("device_ids is for modules on one CUDA device; leave it out for modules on the CPU or on several devices");
}

}  // namespace

struct DataParallelCore::State {
  Group group;  // of this module alone
  std::vector<at::Tensor> buffers;
  bool broadcast_buffers = true;
  bool require_sync = true;
  bool buffers_may_differ = true;
  std::unique_ptr<Reducer> reducer;

  void send_from_rank_0(const std::vector<at::Tensor>& tensors) const {
    const at::NoGradGuard no_grad;
    std::vector<WorkRef> works;
    for (const at::Tensor& tensor : tensors)
      works.push_back(broadcast(tensor.detach(), {.group = group, .async_op = true, .group_src = 0}));
    for (const WorkRef& work : works) work->wait();
  }
};

DataParallelCore::DataParallelCore(NamedTensors parameters, NamedTensors buffers, const DistributedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  check_devices(parameters, options);
  const Group given = options.process_group ? options.process_group : default_group();
  if (!given->is_member()) group::invalid("DistributedDataParallel: this rank is not a member of process_group");
  compare_modules(given, described(parameters) + described(buffers));
  state_->group = new_group({.ranks = given->ranks(), .timeout = given->timeout(), .use_local_synchronization = true});
  state_->broadcast_buffers = options.broadcast_buffers;

  ReducerOptions reducing;
  reducing.group = state_->group;
  reducing.bucket_cap_bytes = static_cast<std::int64_t>(std::ceil(options.bucket_cap_mb * (1 << 20)));
  reducing.first_bucket_bytes = std::min(reducing.first_bucket_bytes, reducing.bucket_cap_bytes);
  reducing.find_unused_parameters = options.find_unused_parameters;
  reducing.gradient_as_bucket_view = options.gradient_as_bucket_view;
  reducing.static_graph = options.static_graph;
  std::vector<at::Tensor> trained, everything;
  for (const auto& [name, parameter] : parameters) {
    everything.push_back(parameter);
    if (!parameter.requires_grad()) continue;
    trained.push_back(parameter);
    reducing.names.push_back(name);
  }
  for (const auto& [name, buffer] : buffers) {
    everything.push_back(buffer);
    state_->buffers.push_back(buffer);
  }
  state_->reducer = std::make_unique<Reducer>(std::move(trained), std::move(reducing));
  state_->send_from_rank_0(everything);
}

DataParallelCore::~DataParallelCore() = default;

void DataParallelCore::before_forward() {
  State& state = *state_;
  const bool reduces = at::GradMode::is_enabled() && state.require_sync;
  if (reduces) state.reducer->prepare_forward();
  if (state.broadcast_buffers && state.buffers_may_differ && !state.buffers.empty()) state.send_from_rank_0(state.buffers);
}

void DataParallelCore::after_forward(const std::vector<at::Tensor>& outputs) {
  State& state = *state_;
  const bool reduces = at::GradMode::is_enabled() && state.require_sync;
  // As in torch: buffers are sent again after each pass that reduced, not between passes whose gradients only add up.
  state.buffers_may_differ = reduces;
  if (reduces) {
    state.reducer->prepare_backward(outputs);
  } else if (at::GradMode::is_enabled()) {
    state.reducer->skip_backward();
  }
}

void DataParallelCore::set_require_sync(bool on) { state_->require_sync = on; }
bool DataParallelCore::require_sync() const { return state_->require_sync; }
void DataParallelCore::register_comm_hook(CommHook hook) { state_->reducer->set_hook(std::move(hook)); }
const Group& DataParallelCore::group() const { return state_->group; }
std::vector<std::int64_t> DataParallelCore::bucket_bytes() const { return state_->reducer->bucket_bytes(); }
bool DataParallelCore::buckets_rebuilt() const { return state_->reducer->rebuilt(); }

}  // namespace muster::parallel

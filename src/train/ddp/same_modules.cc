// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/same_modules.h"

#include <torch/types.h>

#include <algorithm>

#include "core/group/call/exchange.h"
#include "core/group/errors.h"

namespace muster::parallel {
namespace {

using Named = ModuleParts::Named;

}  // namespace

std::string first_difference(const std::string& ours, int our_rank, const std::string& theirs,
                             int their_rank) {
  std::size_t begin = 0;
  while (begin < ours.size()) {
    const std::size_t end = std::min(ours.find('\n', begin), ours.size() - 1);
    if (theirs.compare(begin, end + 1 - begin, ours, begin, end + 1 - begin) != 0) break;
    begin = end + 1;
  }
  const auto line = [begin](const std::string& text, int rank) {
    return (begin < text.size() ? "'" + text.substr(begin, text.find('\n', begin) - begin) + "'"
                                : std::string("nothing more")) +
           " on rank " + std::to_string(rank);
  };
  return line(ours, our_rank) + " and " + line(theirs, their_rank);
}

std::string described(const std::vector<Named>& tensors) {
  std::string text;
  std::vector<c10::Device> devices;  // in order of appearance: device numbers differ between ranks
  for (const auto& [name, tensor, sparse] : tensors) {
    text += name + " " + c10::str(tensor.sizes()) + " " + c10::toString(tensor.scalar_type());
    const auto place = std::find(devices.begin(), devices.end(), tensor.device()) - devices.begin();
    if (place == std::ssize(devices)) devices.push_back(tensor.device());
    if (place > 0) text += " on device " + std::to_string(place + 1);
    if (!tensor.is_contiguous())
      text +=
          " strides " +
          c10::str(tensor.strides());  // gradients are reduced in their parameters' memory layout
    text += tensor.requires_grad() ? " trained" : "";
    text += sparse ? " sparse\n" : "\n";
  }
  return text;
}

std::string described(const DistributedDataParallelOptions& options) {
  const auto flag = [](const char* name, bool on) {
    return std::string(name) + (on ? " on\n" : " off\n");
  };
  std::string text = "bucket_cap_mb " + c10::str(options.bucket_cap_mb) + "\n";
  text += flag("gradient_as_bucket_view", options.gradient_as_bucket_view);
  text += flag("find_unused_parameters", options.find_unused_parameters);
  text += flag("static_graph", options.static_graph);
  text += flag("broadcast_buffers", options.broadcast_buffers);
  text += flag("mixed_precision", options.mixed_precision.has_value());
  text +=
      "delayed parameters " + std::to_string(options.delay_all_reduce_named_params.size()) + "\n";
  return text;
}

void compare_modules(const std::string& what, const Group& group, const std::string& mine) {
  const auto all = group::exchange_text(group, mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw DistError(what + ": the ranks' modules or options differ: the first difference is " +
                        first_difference(all[0], 0, all[rank], static_cast<int>(rank)) +
                        "; build the same module with the same options on every rank",
                    Code::mismatch, {group->global_rank_of(static_cast<int>(rank))});
  }
}

}  // namespace muster::parallel

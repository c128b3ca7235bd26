// SPDX-License-Identifier: BSD-3-Clause
#include "train/local_sgd/alike_senders.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "muster/point_to_point.h"

namespace muster::parallel {
namespace {

constexpr std::size_t kPackBytes = std::size_t{64} << 20;  // limit: memory

/// The first tensors of `rest` that are sent together: of one dtype and device, and at most
/// kPackBytes unless the first alone has more.
std::span<const at::Tensor> first_pack(std::span<const at::Tensor> rest) {
  std::size_t count = 1, bytes = rest[0].nbytes();
  for (; count < rest.size(); ++count) {
    const at::Tensor& next = rest[count];
    bytes += next.nbytes();
    if (bytes > kPackBytes || next.scalar_type() != rest[0].scalar_type() ||
        next.device() != rest[0].device())
      break;
  }
  return rest.first(count);
}

/// A tensor alone is not copied if it is dense: it may be larger than all others.
bool is_sent_in_place(std::span<const at::Tensor> pack) {
  return pack.size() == 1 && pack[0].is_contiguous();
}

at::Tensor packed(std::span<const at::Tensor> tensors) {
  if (is_sent_in_place(tensors)) return tensors[0].view({-1});
  std::vector<at::Tensor> flat;
  for (const at::Tensor& each : tensors) flat.push_back(each.flatten());
  return at::cat(flat);
}

/// The memory in which a receiver has what `packed` gives.
at::Tensor memory_for(std::span<const at::Tensor> tensors) {
  if (is_sent_in_place(tensors)) return tensors[0].view({-1});
  std::int64_t elements = 0;
  for (const at::Tensor& each : tensors) elements += each.numel();
  return at::empty({elements}, tensors[0].options());
}

void unpack(const at::Tensor& flat, std::span<const at::Tensor> tensors) {
  if (is_sent_in_place(tensors)) return;
  std::int64_t at = 0;
  for (const at::Tensor& each : tensors) {
    each.copy_(flat.narrow(0, at, each.numel()).view(each.sizes()));
    at += each.numel();
  }
}

/// This sender's.
at::Tensor part_of(const at::Tensor& flat, std::size_t sender, std::size_t senders) {
  const auto bound = [&](std::size_t part) {
    return flat.numel() * static_cast<std::int64_t>(part) / static_cast<std::int64_t>(senders);
  };
  return flat.narrow(0, bound(sender), bound(sender + 1) - bound(sender));
}

}  // namespace

std::vector<at::Tensor> parts_to_send(const Group& group, const std::vector<int>& senders,
                                      const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  const auto me = std::ranges::find(senders, group->rank()) - senders.begin();
  std::vector<at::Tensor> parts;
  for (std::span<const at::Tensor> rest(tensors); !rest.empty();) {
    const auto pack = first_pack(rest);
    rest = rest.subspan(pack.size());
    const at::Tensor part = part_of(packed(pack), static_cast<std::size_t>(me), senders.size());
    if (part.numel() > 0) parts.push_back(part.clone());
  }
  return parts;
}

std::vector<WorkRef> start_sending(const Group& group, const std::vector<int>& receivers,
                                   const std::vector<at::Tensor>& parts, std::int64_t tag) {
  std::vector<WorkRef> works;
  for (const at::Tensor& part : parts)
    for (const int receiver : receivers)
      works.push_back(isend(part, {.group = group, .tag = tag, .group_dst = receiver}));
  return works;
}

void send_alike(const Group& group, const std::vector<int>& senders,
                const std::vector<int>& receivers, const std::vector<at::Tensor>& tensors,
                std::int64_t tag) {
  const at::NoGradGuard no_grad;
  const int me = group->rank();
  const bool sends = std::ranges::find(senders, me) != senders.end();
  if (receivers.empty() || (!sends && std::ranges::find(receivers, me) == receivers.end())) return;
  for (std::span<const at::Tensor> rest(tensors); !rest.empty();) {
    const auto pack = first_pack(rest);
    rest = rest.subspan(pack.size());
    const at::Tensor flat = sends ? packed(pack) : memory_for(pack);
    std::vector<P2POp> messages;
    for (std::size_t i = 0; i < senders.size(); ++i) {
      const at::Tensor part = part_of(flat, i, senders.size());
      if (part.numel() == 0) continue;
      if (!sends) messages.emplace_back(irecv, part, std::nullopt, group, tag, senders[i]);
      for (const int receiver : receivers)
        if (me == senders[i])
          messages.emplace_back(isend, part, std::nullopt, group, tag, receiver);
    }
    if (messages.empty()) continue;
    for (const WorkRef& work : batch_isend_irecv(messages)) work->wait();
    if (!sends) unpack(flat, pack);
  }
}

}  // namespace muster::parallel

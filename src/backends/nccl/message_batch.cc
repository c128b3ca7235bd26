// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/message_batch.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace muster::nccl {
namespace {

thread_local std::vector<MessageBatch*> open_batches;

}  // namespace

MessageBatch::MessageBatch(const void* backend, Post post)
    : backend_(backend), post_(std::move(post)) {
  open_batches.push_back(this);
}

MessageBatch::~MessageBatch() {
  post();
  std::erase(open_batches, this);
}

MessageBatch* MessageBatch::of(const void* backend) {
  for (auto* const batch : open_batches)
    if (batch->backend_ == backend) return batch;
  return nullptr;
}

void MessageBatch::add(int peer, bool sends, std::shared_ptr<NcclWork> work) {
  auto& posts = posts_[peer];
  (sends ? posts.sends : posts.receives).push_back(std::move(work));
}

void MessageBatch::post() {
  for (auto& [peer, posts] : std::exchange(posts_, {})) post_(peer, std::move(posts));
}

void post_open_batches() {
  for (auto* const batch : open_batches) batch->post();
}

}  // namespace muster::nccl

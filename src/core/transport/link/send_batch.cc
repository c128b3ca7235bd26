// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/link/send_batch.h"

#include <utility>

#include "core/transport/fabric.h"

namespace muster::transport {
namespace {

constinit thread_local SendBatch* innermost = nullptr;

}  // namespace

SendBatch::SendBatch(Fabric& fabric) : fabric_(fabric), inner_(of(fabric) != nullptr) {
  if (!inner_) outer_ = std::exchange(innermost, this);
}

SendBatch::~SendBatch() {
  if (inner_) return;
  SendBatch** place = &innermost;  // batches of two fabrics may end in any order
  while (*place != nullptr && *place != this) place = &(*place)->outer_;
  if (*place == this) *place = outer_;
  flush();
}

SendBatch* SendBatch::of(const Fabric& fabric) {
  SendBatch* each = innermost;
  while (each != nullptr && &each->fabric_ != &fabric) each = each->outer_;
  return each;
}

void SendBatch::flush() {
  if (std::exchange(holds_messages_, false)) fabric_.write_batches();
}

SendBatch::Suspension::Suspension() : kept_(std::exchange(innermost, nullptr)) {
  for (SendBatch* each = kept_; each != nullptr; each = each->outer_) each->flush();
}

SendBatch::Suspension::~Suspension() { innermost = kept_; }

}  // namespace muster::transport

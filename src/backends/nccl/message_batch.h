// SPDX-License-Identifier: BSD-3-Clause
/// Messages that a thread posts together.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "backends/nccl/device_messages.h"

namespace muster::nccl {

/// While it lives, the messages that its thread starts on one backend are held back; they are
/// posted when it is destroyed, on the same thread, or when the thread waits for a message.
class MessageBatch {
 public:
  /// Must not throw.
  using Post = std::function<void(int peer, MessagePosts posts)>;
  MessageBatch(const void* backend, Post post);
  ~MessageBatch();
  MessageBatch(const MessageBatch&) = delete;

  /// The calling thread's for that backend; null: there is none.
  static MessageBatch* of(const void* backend);
  void add(int peer, bool sends, std::shared_ptr<NcclWork> work);
  void post();

 private:
  const void* const backend_;
  const Post post_;
  std::map<int, MessagePosts> posts_;
};

}  // namespace muster::nccl

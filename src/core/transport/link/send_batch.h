// SPDX-License-Identifier: BSD-3-Clause
/// Small messages that share a write (TCP's cork).
#pragma once

namespace muster::transport {

class Fabric;

/// One thread's batch of sends (`Fabric::batch_sends`). While it lives, small messages (up to 4
/// KiB) that the thread sends on the fabric's channels are copied into their links' buffers. Each
/// link writes its buffer in one piece: when the batch ends, before the thread polls the fabric or
/// waits in it, or as soon as 32 KiB are in it. Such a send is done once it has been copied. If the
/// link breaks before the write, the channel fails, as it does for a link that breaks while the
/// kernel still holds the bytes. Order is kept: any other message to the same peer (a larger one,
/// one of another thread) is written at once, behind what the buffer holds.
///
/// A batch without small messages, and a batch inside another of the same fabric and thread, cost a
/// few instructions. Peers wait for what the buffers hold, so a batch is no place for long work. It
/// ends on its thread, and before the fabric.
class SendBatch {
 public:
  explicit SendBatch(Fabric& fabric);
  ~SendBatch();
  SendBatch(const SendBatch&) = delete;
  SendBatch& operator=(const SendBatch&) = delete;

  // For the fabric.
  /// This thread's; null if it has none.
  static SendBatch* of(const Fabric& fabric);
  /// A buffer holds a message.
  void note() { holds_messages_ = true; }
  /// Writes what the buffers hold.
  void flush();

  /// Around a wait: the thread's batches are flushed, and what it sends meanwhile is written at
  /// once. Simulated ranks that run on this thread meanwhile may have batches of their own.
  class Suspension {
   public:
    Suspension();
    ~Suspension();
    Suspension(const Suspension&) = delete;
    Suspension& operator=(const Suspension&) = delete;

   private:
    SendBatch* const kept_;
  };

 private:
  Fabric& fabric_;
  const bool inner_;
  SendBatch* outer_ = nullptr;
  bool holds_messages_ = false;
};

}  // namespace muster::transport

// SPDX-License-Identifier: BSD-3-Clause
/// Messages of all groups on one device: launched once both ends have posted them, one after
/// another in the order of message_order.h.
///
/// Why no kernel of a message waits for ever. NCCL's kernels take room on their device when they
/// start and keep it until their peers have come, and a device has room for a few. NCCL's page on
/// communicators says of several on one device that operations "might work provided they can fit
/// within the GPU, but could deadlock at any time if NCCL operations were to use more CUDA blocks"
/// (see also NVIDIA/nccl#522, #574, #783). So ranks hang if kernels wait for each other in a
/// circle: by their inputs, by the order of a stream, or for room. Here:
///
/// - Inputs. A message is posted to its peer once the work that precedes it on its caller's stream
///   is done, so its kernel waits for its peer's kernel and for nothing else. Otherwise the stream
///   of messages would pass on every wait of every caller's stream: rank 0's first message may come
///   after collective A, and on rank 1 A may come after the second message; in one order for both
///   ranks the second waits for the first, the first for A, and A for the second.
/// - Order. All rounds of a device run on one stream, in an order that is the same on all ranks.
///   Take the earliest round of the job that is not done: both of its kernels are at the heads of
///   their streams. So it runs, given room.
/// - Room. The stream of messages takes one place. The collectives of a communicator run one after
///   another, so they take one place per group whose collectives are in flight at once. A device
///   with room for those, which NCCL asks for without any messages, and for one kernel more never
///   hangs. With less room, only an agreement of all members before every collective would help.
/// - Exchanges and batches. NCCL may keep a send waiting for its receive, so what two ranks have
///   for each other is one group on one communicator. A batch with several peers is one round per
///   peer, which the order covers. One group for all of it would have to begin together with the
///   batches of all peers, and of their peers: ranks would have to agree on such sets first.
///
/// The price: a message is not queued on the device ahead of its inputs, and `wait` on it blocks
/// the thread until both ends are ready. A device runs one round at a time, so a ring takes several
/// steps (message_order.h keeps them few), and a peer that stands still between the agreement on a
/// round and its kernel holds up the messages of all groups.
///
/// Messages of a captured graph run on the stream that they were called on, apart from all that:
/// nothing is known of when they run, and their order in a replay is the program's care.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "backends/nccl/communicator.h"
#include "backends/nccl/message_order.h"
#include "backends/nccl/nccl_work.h"
#include "core/collective/communicator.h"

namespace muster::nccl {

/// Messages for one peer, in the order of the calls in each direction.
struct MessagePosts {
  std::vector<std::shared_ptr<NcclWork>> sends = {}, receives = {};
};

/// The messages of one group between this rank and one other, and their communicator.
class PairMessages {
 public:
  /// Refers to nothing that goes with the group: NCCL may keep the thread that launches messages
  /// for longer.
  struct PairTerms {
    MessagePair pair;
    int me = -1, peer = -1;                     ///< in the group
    int my_job_rank = -1, peers_job_rank = -1;  ///< for words
    std::shared_ptr<collective::Communicator> links;
    NcclCommunicator::GiveUp give_up;
    /// Connects the communicator; both ranks are in it.
    std::function<void(NcclCommunicator&)> open;
    /// Fails the group. Returns why it has failed.
    std::function<std::exception_ptr(const std::exception&)> on_error;
  };
  PairMessages(PairTerms terms, std::shared_ptr<const NcclLibrary> library, c10::Device device,
               std::shared_ptr<const NcclSettings> settings)
      : terms_(std::move(terms)), communicator_(std::move(library), device, std::move(settings)) {}

  NcclCommunicator& communicator() { return communicator_; }

 private:
  friend class DeviceMessages;
  bool leads() const { return terms_.me < terms_.peer; }
  void launch(const std::vector<std::shared_ptr<NcclWork>>& works, const c10::Stream& stream);

  const PairTerms terms_;
  NcclCommunicator communicator_;
  bool open_ = false;  // the launching thread's
  // Under the lock of DeviceMessages:
  std::deque<MessagePosts> held_;  // not ready on the device; a batch stays together
  std::deque<std::shared_ptr<NcclWork>> sends_, receives_;  // posted to the peer, not launched
  std::size_t met_sends_ = 0, met_receives_ = 0;            // how many of them are in rounds
  // Sizes that one end has told and the other not yet. Kept by the lower rank alone.
  std::deque<MessageSize> my_sends_, my_receives_, their_sends_, their_receives_;
  bool ended_ = false;  // the peer has said that it posts no more
};

/// Thread-safe. Kept by the backends that use it.
class DeviceMessages : public std::enable_shared_from_this<DeviceMessages> {
 public:
  /// That of a device, for one rank of a job: `fabric`. Its stream has the priority that the first
  /// of its groups asks for.
  static std::shared_ptr<DeviceMessages> of(c10::Device device, bool high_priority,
                                            const std::shared_ptr<transport::Fabric>& fabric);
  DeviceMessages(c10::Device device, bool high_priority);
  /// Not on its own thread: `of` sees to that.
  ~DeviceMessages();
  DeviceMessages(const DeviceMessages&) = delete;

  /// Never blocks. A message that cannot be launched fails. The messages are posted to the peer
  /// together, once all of them are ready on the device.
  void post(const std::shared_ptr<PairMessages>& pair, MessagePosts posts);
  /// The group's messages are done: agrees with its members that there are no more. Names those
  /// that have not agreed by the deadline. Ends early if `give_up` throws.
  Status end(std::uint32_t group, TimePoint deadline, const NcclCommunicator::GiveUp& give_up);
  /// Forgets the group: all is done, or it has failed and its communicators have been aborted, so
  /// that `give_up` throws. Waits for the launching thread if that is with the group, but no longer
  /// than for an abort, and not at all if NCCL keeps it: then it is left alone with this object,
  /// for ever, and later groups get another one.
  void drop(std::uint32_t group);
  bool is_abandoned() const { return abandoned_; }

 private:
  using Steps = MessageOrder::MessageSteps;
  static void destroy_elsewhere(DeviceMessages* messages);
  void add(const std::shared_ptr<PairMessages>& pair, MessagePosts posts);
  bool is_holding() const;
  void post_ready();
  void post_ready(PairMessages& pair);
  void take(const Steps& steps);
  void note_met(const MessageRound& round);
  void send_note(const PairMessages& pair, const MessageNote& note);
  void send_sizes(const PairMessages& pair, const std::vector<MessageSize>& sizes);
  void await_note(const PairMessages& pair);
  void await_sizes(const PairMessages& pair, const MessageNote& note);
  void on_note(const MessagePair& pair, const MessageNote& note);
  void on_sizes(const MessagePair& pair, const MessageNote& note,
                const std::vector<MessageSize>& sizes);
  bool agree(PairMessages& pair);
  void run();

  const c10::Stream stream_;
  const bool high_priority_;
  // Guards the following. The links are called with it held, which never block then.
  std::mutex mutex_;
  std::condition_variable changed_;
  MessageOrder order_;
  std::map<MessagePair, std::shared_ptr<PairMessages>> pairs_;
  std::deque<MessageRound> due_;
  bool has_news_ = false;        // a pair holds messages that the thread has not looked at
  std::uint32_t launching_ = 0;  // the group of the round that is being launched
  std::shared_ptr<PairMessages> launching_pair_;
  bool stopping_ = false;
  std::atomic<bool> abandoned_ = false;
  std::thread thread_;  // posts and launches; started with the first message
};

}  // namespace muster::nccl

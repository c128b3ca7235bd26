// SPDX-License-Identifier: BSD-3-Clause
/// The nccl backend: carries out a group's calls on CUDA tensors by NCCL.
#pragma once

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/call_watch.h"
#include "backends/nccl/device_messages.h"
#include "backends/nccl/lane.h"
#include "backends/nccl/link_exchange.h"
#include "backends/nccl/nccl_environment.h"
#include "core/group/call/call.h"
#include "core/group/creation/backend_registry.h"
#include "muster/backend.h"

namespace muster::nccl {

/// Has one communicator for the collectives on each device of this process, and one for the
/// messages with each peer, so that messages may overtake collectives as on every backend. They are
/// opened when they are first used. A member that uses several devices uses them in the same turns
/// as the other members; its messages with one peer are on one device. Messages of all groups on a
/// device are launched in one order (device_messages.h).
class NcclBackend final : public ProcessGroupBackend {
 public:
  /// `links`: a communicator of the members over muster's own links, for this backend alone.
  NcclBackend(std::shared_ptr<const NcclLibrary> library,
              std::shared_ptr<const NcclSettings> settings, group::OwnBackendOptions options,
              std::shared_ptr<collective::Communicator> links, Environment environment);
  ~NcclBackend() override;

  /// Opens the communicator of the collectives on that device ahead of the first.
  void connect(c10::Device device);
  /// Takes `opened`, which the members made of another group's communicator, for the collectives on
  /// its device. Before any call.
  void adopt(std::shared_ptr<NcclCommunicator> opened);
  /// Null if the group was given none.
  const std::shared_ptr<ProcessGroupOptions>& pg_options() const { return options_.pg_options; }
  /// Splits this group's communicator into ones that the parts can `adopt`; every member calls it.
  /// `part`: this member's, -1 if it is in none; `key`: its place there; `settings`: the part's.
  /// Null if NCCL cannot split, or is not connected.
  std::shared_ptr<NcclCommunicator> split(int part, int key,
                                          std::shared_ptr<const NcclSettings> settings,
                                          TimePoint deadline);
  /// After a failure, makes a communicator that `survivors` can adopt; all of its members call it.
  /// `excluded`: ranks of this group. Null if NCCL cannot shrink here or on another survivor.
  std::shared_ptr<NcclCommunicator> shrink(const std::vector<int>& excluded, NcclBackend& survivors,
                                           TimePoint deadline);
  /// Grows `old`'s communicator into one that this new group can adopt, whose first members are
  /// those of `old`; all its members call it. `old` is null on ranks that join. Null if NCCL cannot
  /// grow, or `old` is not connected.
  std::shared_ptr<NcclCommunicator> grow(NcclBackend* old, TimePoint deadline);

  const BackendCapabilities& capabilities() const override;
  bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                std::string* why) const override;
  WorkRef submit(BackendCall& call) override;
  std::shared_ptr<void> scope(BackendScope kind) override;
  BackendState state() const override;
  Status close(TimePoint deadline) override;
  void abort(const std::string& reason) override;

 private:
  WorkRef submit_collective(Call& call);
  WorkRef submit_message(Call& call);
  WorkRef refuse(Op op, std::uint64_t number);
  /// Why NCCL cannot make this call, as the end of a sentence; empty if it can.
  std::string why_not(const Call& call);
  std::shared_ptr<NcclWork> make_work(Call& call, NcclTransferPlan plan, c10::Device device);
  WorkRef finish(Call& call, const std::shared_ptr<NcclWork>& work, bool blocks);
  c10::Device device_of(const Call& call);
  /// The number of the device among those of this member's collectives, in the order of first use:
  /// so the members' communicators correspond.
  std::size_t lane_number(c10::Device device);
  Lane& group_lane(std::size_t number);
  /// The messages with one peer, and those of their device.
  struct PeerMessages {
    std::shared_ptr<PairMessages> pair;
    std::shared_ptr<DeviceMessages> device;
  };
  PeerMessages messages_with(c10::Device device, int peer);
  void post(int peer, MessagePosts posts);
  Status end_messages(TimePoint deadline);
  std::vector<std::shared_ptr<DeviceMessages>> devices_of_messages();
  std::unique_ptr<Lane> make_lane(c10::Device device, Lane::Opening opening);
  /// Throws once the group has failed. Refers to nothing that goes with the group.
  NcclCommunicator::GiveUp give_up() const;
  /// Fails the group because of an exception of NCCL or the links, and returns why it has failed.
  /// `of`: begins the text of what NCCL has found in the background. Refers to nothing that goes
  /// with the group.
  Lane::OnError fail_by(const std::string& of = {}) const;
  /// `order_`, which another thread may hold for as long as NCCL keeps it: throws once the group
  /// has failed.
  std::unique_lock<std::timed_mutex> hold_order();
  /// Null if this member has not called a collective yet.
  Lane* first_lane();
  std::shared_ptr<NcclCommunicator> grow_by_nccl(NcclBackend* old, Lane* lane, TimePoint deadline);
  void throw_if_failed() const;
  std::string async_error();
  std::string words_of_messages(int peer) const;
  /// Communicators stay until `drop_lanes`, which nothing runs beside that uses these lists.
  std::vector<NcclCommunicator*> lane_communicators();
  /// Those of messages, in the same order on all members.
  std::vector<NcclCommunicator*> message_communicators();
  /// After a failure. The communicators of collectives stay for `shrink`, if NCCL can do that.
  /// Returns whether NCCL uses the memory of no call any more.
  bool stop_communicators();
  void drop_messages();
  bool abort_communicators();
  /// Waits for their threads, which use the watch.
  void drop_lanes();

  const std::shared_ptr<const NcclLibrary> library_;
  const group::OwnBackendOptions options_;
  const std::shared_ptr<collective::Communicator> links_;
  LinkExchange exchange_;
  const Environment environment_;
  const std::shared_ptr<const NcclSettings> settings_;
  const std::shared_ptr<GroupFailure> failure_ = std::make_shared<GroupFailure>();

  // Order of locks: order_, lanes_mutex_, a lane's, the device's, its communicator's.
  // Collectives reach the links and NCCL in one order. Timed, because a thread may never return
  // from NCCL.
  std::timed_mutex order_;
  std::mutex lanes_mutex_;            // guards the following three, which stay until drop_lanes
  std::vector<c10::Device> devices_;  // of the group's collectives
  std::vector<std::unique_ptr<Lane>> group_lanes_;
  std::map<int, PeerMessages> messages_;  // by peer
  std::shared_ptr<CallWatch> watch_;
  const std::shared_ptr<CallbackLane> callbacks_ = std::make_shared<CallbackLane>();
};

}  // namespace muster::nccl

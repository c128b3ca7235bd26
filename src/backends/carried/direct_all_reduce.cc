// SPDX-License-Identifier: BSD-3-Clause
#include "backends/carried/direct_all_reduce.h"

#include <algorithm>
#include <string>

#include "backends/carried/call.h"
#include "backends/carried/library.h"
#include "core/collective/kernels/kernels.h"
#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster::carried {

using collective::Args;
using collective::plan::Slice;

bool DirectAllReduce::takes(const Args& args, int size) {
  return args.op == collective::Op::all_reduce && size > 1 &&
         static_cast<std::size_t>(size) <= fixed::kMpiDirect;
}

bool DirectAllReduce::MessageStream::active() const {
  return std::ranges::any_of(slots, [](const StreamSlot& slot) { return slot.request.active; });
}

DirectAllReduce::DirectAllReduce(CallLibrary& library, Comm& comm, int rank, int size)
    : library_(library), comm_(comm), rank_(rank), size_(size) {}

Status DirectAllReduce::begin(const Args& args, const std::byte* in, int tag) {
  args_ = &args;
  in_ = in;
  reduced_ = 0;
  const std::size_t bytes = args.inputs[0].size(), count = elements_in(bytes, args.dtype);
  whole_ = bytes <= fixed::kSmallMessage;
  tag_ = whole_ ? tag + 2 : tag;  // small and large inputs never meet
  place_bytes_ = whole_ ? fixed::kSmallMessage : fixed::kMpiRound / static_cast<std::size_t>(size_);
  chunk_ = elements_in(place_bytes_, args.dtype);
  const auto slice_of = [&](int member) {
    return whole_ ? Slice{0, count} : collective::plan::slice_of(count, size_, member);
  };
  slice_ = slice_of(rank_);
  chunks_ = collective::plan::messages_for(slice_.count, chunk_);
  if (peers_.empty()) {
    inputs_.resize(static_cast<std::size_t>(size_));
    for (int step = 1; step < size_; ++step)
      peers_.emplace_back().member = collective::plan::wrap(rank_ + step, size_);
  }
  const std::size_t needed = peers_.size() * std::min(chunks_, fixed::kReduceDepth) * place_bytes_;
  if (capacity_ < needed) {
    received_ = nullptr;  // its contents are not needed
    received_.reset(static_cast<std::byte*>(::operator new(needed, kPage)));
    capacity_ = needed;
  }
  for (ReducingPeer& peer : peers_) {
    peer.slice = slice_of(peer.member);
    peer.chunks = collective::plan::messages_for(peer.slice.count, chunk_);
    for (MessageStream* stream :
         {&peer.inputs_out, &peer.inputs_in, &peer.results_out, &peer.results_in})
      stream->posted = stream->done = 0;
    if (Status posted = advance(peer); !posted) return posted;
  }
  return {};
}

std::optional<Status> DirectAllReduce::test() {
  for (ReducingPeer& peer : peers_)
    if (Status advanced = advance(peer); !advanced) return advanced;
  while (can_reduce()) {
    reduce_chunk();
    for (ReducingPeer& peer : peers_)
      if (Status advanced = advance(peer); !advanced) return advanced;
  }
  if (!has_ended()) return {};
  return Status();
}

bool DirectAllReduce::active() const {
  return std::ranges::any_of(peers_, [](const ReducingPeer& peer) {
    return peer.inputs_out.active() || peer.inputs_in.active() || peer.results_out.active() ||
           peer.results_in.active();
  });
}

void DirectAllReduce::trim() {
  if (capacity_ <= tunables().kept_scratch) return;
  received_ = nullptr;
  capacity_ = 0;
}

/// Posts what can be posted and ends what has ended. MPI may copy a whole message in a test or a
/// receive, so that the sends go out first: otherwise the other member would wait for that copy.
Status DirectAllReduce::advance(ReducingPeer& peer) {
  std::byte* const out = args_->outputs[0].data();
  while (!whole_ && peer.results_out.posted < reduced_ && peer.results_out.has_room()) {
    const Slice bytes = range(slice_, peer.results_out.posted);
    if (Status posted = send(peer.results_out, peer, {out + bytes.begin, bytes.count}, tag_ + 1);
        !posted)
      return posted;
  }
  while (peer.inputs_out.posted < peer.chunks && peer.inputs_out.has_room()) {
    const Slice bytes = range(peer.slice, peer.inputs_out.posted);
    if (Status posted = send(peer.inputs_out, peer, {in_ + bytes.begin, bytes.count}, tag_);
        !posted)
      return posted;
  }
  for (MessageStream* sends : {&peer.inputs_out, &peer.results_out})
    if (Status polled = poll(*sends, peer, false); !polled) return polled;
  for (MessageStream* receives : {&peer.inputs_in, &peer.results_in})
    if (Status polled = poll(*receives, peer, true); !polled) return polled;
  while (peer.inputs_in.posted < std::min(chunks_, reduced_ + fixed::kReduceDepth)) {
    const std::size_t index = peer.inputs_in.posted;
    const MutableBytes room{place(peer.member, index), place_bytes_};
    if (Status posted = receive(peer.inputs_in, peer, room, range(slice_, index).count, tag_);
        !posted)
      return posted;
  }
  // MPI does not let it receive into memory that it still sends from: the output may be the input.
  while (!whole_ && peer.results_in.posted < peer.inputs_out.done && peer.results_in.has_room()) {
    const Slice bytes = range(peer.slice, peer.results_in.posted);
    if (Status posted =
            receive(peer.results_in, peer, {out + bytes.begin, bytes.count}, bytes.count, tag_ + 1);
        !posted)
      return posted;
  }
  return {};
}

Status DirectAllReduce::poll(MessageStream& stream, const ReducingPeer& peer, bool receives) {
  for (; stream.done < stream.posted; ++stream.done) {
    auto& slot = stream.slots[stream.done % stream.slots.size()];
    bool done = false;
    CarriedArrival arrival;
    const int code = library_.test(slot.request, done, receives ? &arrival : nullptr);
    if (code != 0) return failed(library_, receives ? "MPI_Irecv" : "MPI_Isend", code);
    if (!done) return {};
    note_progress();
    if (receives && static_cast<std::size_t>(arrival.bytes) != slot.bytes)
      return Status(Code::mismatch, "member " + std::to_string(peer.member) + " sent " +
                                        std::to_string(arrival.bytes) + " bytes instead of " +
                                        std::to_string(slot.bytes) +
                                        "; all members must give tensors of the same size");
  }
  return {};
}

Status DirectAllReduce::send(MessageStream& stream, const ReducingPeer& peer, ConstBytes data,
                             int tag) {
  auto& slot = stream.slots[stream.posted % stream.slots.size()];
  const int code =
      comm_.send(data.data(), static_cast<Count>(data.size()), peer.member, tag, slot.request);
  if (code != 0) return failed(library_, "MPI_Isend", code);
  ++stream.posted;
  return {};
}

Status DirectAllReduce::receive(MessageStream& stream, const ReducingPeer& peer, MutableBytes room,
                                std::size_t expected, int tag) {
  auto& slot = stream.slots[stream.posted % stream.slots.size()];
  slot.bytes = expected;
  const int code =
      comm_.receive(room.data(), static_cast<Count>(room.size()), peer.member, tag, slot.request);
  if (code != 0) return failed(library_, "MPI_Irecv", code);
  ++stream.posted;
  return {};
}

Slice DirectAllReduce::range(const Slice& slice, std::size_t index) const {
  const std::size_t width = size_of(args_->dtype);
  const Slice chunk = collective::plan::chunk_of(slice.count, chunk_, index);
  return {(slice.begin + chunk.begin) * width, chunk.count * width};
}

std::byte* DirectAllReduce::place(int member, std::size_t index) const {
  const auto others = static_cast<std::size_t>(size_ - 1);
  const auto peer = static_cast<std::size_t>(collective::plan::wrap(member - rank_ - 1, size_));
  return received_.get() + (index % fixed::kReduceDepth * others + peer) * place_bytes_;
}

bool DirectAllReduce::can_reduce() const {
  return reduced_ < chunks_ && std::ranges::all_of(peers_, [this](const ReducingPeer& peer) {
           // The output may be the input, which is sent whole.
           return peer.inputs_in.done > reduced_ && (!whole_ || peer.inputs_out.done > 0);
         });
}

void DirectAllReduce::reduce_chunk() {
  const Slice bytes = range(slice_, reduced_);
  for (const ReducingPeer& peer : peers_)
    inputs_[static_cast<std::size_t>(peer.member)] = place(peer.member, reduced_);
  inputs_[static_cast<std::size_t>(rank_)] = in_ + bytes.begin;
  if (bytes.count > 0)
    collective::reduce_complete(args_->outputs[0].data() + bytes.begin, inputs_,
                                elements_in(bytes.count, args_->dtype), args_->dtype,
                                args_->reduce);
  ++reduced_;
}

bool DirectAllReduce::has_ended() const {
  if (reduced_ < chunks_) return false;
  return whole_ || std::ranges::all_of(peers_, [this](const ReducingPeer& peer) {
           return peer.inputs_out.done == peer.chunks && peer.results_in.done == peer.chunks &&
                  peer.results_out.done == chunks_;
         });
}

}  // namespace muster::carried

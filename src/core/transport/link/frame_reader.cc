#include "core/transport/link/frame_reader.h"
#include "core/tunables/tunables.h"

#include <algorithm>
#include <cstring>

namespace muster::transport {
namespace {

constexpr std::size_t kDrainBytes = fixed::kIoBuffer;

/// Destination of dropped payloads. Never read.
MutableBytes drain() {
  thread_local const std::unique_ptr<std::byte[]> memory(new std::byte[kDrainBytes]);
  return {memory.get(), kDrainBytes};
}

}  // namespace

FrameReader::FrameReader(LinkEvents& events)
    : events_(events), staging_(new std::byte[kStagingBytes]) {}

std::size_t FrameReader::input(std::array<MutableBytes, 2>& pieces, bool headers_alone) {
  const std::size_t most =
      headers_alone ? sizeof header_ : kStagingBytes;  // fewer bytes than a header are staged here
  const MutableBytes staging(staging_.get() + staged_end_, most - staged_end_);
  if (payload_left_ == 0) {
    pieces[0] = staging;
    return 1;
  }
  // All staged bytes have been delivered, so the staging buffer is empty here.
  if (sink_.empty()) {
    pieces[0] = drain().first(std::min(payload_left_, kDrainBytes));
    return 1;
  }
  pieces[0] = sink_.first(std::min(sink_.size(), payload_left_));
  if (sink_.size() < payload_left_) return 1;
  pieces[1] = staging;
  return 2;
}

Status FrameReader::received(std::size_t bytes) {
  if (broken_) return Status(Code::internal, "the peer broke the protocol before");
  if (payload_left_ > 0) {
    const std::size_t direct =
        std::min(bytes, sink_.empty() ? std::min(payload_left_, kDrainBytes)
                                      : std::min(sink_.size(), payload_left_));
    if (!sink_.empty()) sink_ = sink_.subspan(direct);
    payload_left_ -= direct;
    bytes -= direct;
    if (payload_left_ == 0) {
      if (Status status = finish_frame(); !status) return status;
    }
  }
  staged_end_ += bytes;
  return parse();
}

/// Copies staged bytes of the current payload to their destination; returns how many.
std::size_t FrameReader::place(ConstBytes bytes) {
  const std::size_t take = std::min(bytes.size(), payload_left_);
  const std::size_t keep = std::min(take, sink_.size());
  if (keep > 0) std::memcpy(sink_.data(), bytes.data(), keep);
  sink_ = sink_.subspan(keep);
  payload_left_ -= take;
  return take;
}

Status FrameReader::parse() {
  for (;;) {
    const ConstBytes staged(staging_.get() + staged_begin_, staged_end_ - staged_begin_);
    if (payload_left_ > 0) {
      if (staged.empty()) break;
      staged_begin_ += place(staged);
      if (payload_left_ > 0) break;
    } else {
      if (staged.size() < sizeof header_) break;
      std::memcpy(&header_, staged.data(), sizeof header_);
      staged_begin_ += sizeof header_;
      if (Status status = start_frame(); !status) return status;
      if (payload_left_ > 0) continue;
    }
    if (Status status = finish_frame(); !status) return status;
  }
  // What is left is less than a header, or nothing.
  const std::size_t left = staged_end_ - staged_begin_;
  std::memmove(staging_.get(), staging_.get() + staged_begin_, left);
  staged_begin_ = 0;
  staged_end_ = left;
  return {};
}

Status FrameReader::start_frame() {
  broken_ = true;  // until proved otherwise
  if (Status status = check_header(header_); !status) return status;
  payload_left_ = header_.length;
  sink_ = {};
  if (payload_left_ > 0) {
    if (header_.kind == FrameKind::eager || header_.kind == FrameKind::data) {
      Result<MutableBytes> sink = events_.on_payload(header_);
      if (!sink) return sink.status();
      sink_ = *sink;
    } else {
      record_.resize(payload_left_);  // at most kRecordBytes
      sink_ = std::as_writable_bytes(std::span(record_));
    }
  } else {
    record_.clear();
  }
  broken_ = false;
  return {};
}

Status FrameReader::finish_frame() {
  sink_ = {};
  const bool message = header_.kind == FrameKind::eager || header_.kind == FrameKind::data;
  Status status = events_.on_frame(header_, message ? ConstBytes() : as_bytes(record_));
  broken_ = !status.ok();
  return status;
}

}  // namespace muster::transport

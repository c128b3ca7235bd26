// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/wire/message.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace muster::rpc {
namespace {

constexpr std::uint32_t kMark = 0x3150524d;  // "MRP1"
constexpr std::uint8_t kTensorFlags = TensorHead::kUndefined | TensorHead::kRequiresGrad |
                                      TensorHead::kApart | TensorHead::kElementOrder;
constexpr std::uint8_t kHeadFlags = MessageHead::kWantsAnswer | MessageHead::kObserved |
                                    MessageHead::kPayloadApart | MessageHead::kLong;

/// The fixed part; copied to the wire as it is.
struct Fixed {
  std::uint32_t mark = kMark;
  MessageKind kind = MessageKind::call;
  std::uint8_t flags = 0;
  std::uint16_t zero = 0;
  std::uint32_t name_bytes = 0;
  std::uint32_t note_bytes = 0;
  std::uint32_t tensors = 0;
  std::uint32_t zero_too = 0;
  std::uint64_t call = 0;
  std::int64_t time_left = -1;
  std::uint64_t payload_bytes = 0;
  std::uint64_t first_tag = 0;
};
static_assert(sizeof(Fixed) == 56);

/// Before the sizes and strides of each tensor.
struct FixedTensor {
  std::uint8_t dtype = 0;
  std::uint8_t device_type = 0;
  std::uint8_t device_index = 0;
  std::uint8_t flags = 0;
  std::uint32_t dimensions = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(FixedTensor) == 16);

template <class T>
void put(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

bool known(MessageKind kind) {
  const auto number = static_cast<std::uint8_t>(kind);
  return (number >= static_cast<std::uint8_t>(MessageKind::call) &&
          number <= static_cast<std::uint8_t>(MessageKind::closing)) ||
         (number >= static_cast<std::uint8_t>(MessageKind::rref_first) &&
          number <= static_cast<std::uint8_t>(MessageKind::autograd_last)) ||
         number >= static_cast<std::uint8_t>(MessageKind::user_first);
}

Status wrong(const std::string& what) {
  return Status(Code::internal, "a message that is not one of muster's calls: " + what);
}

/// Bytes of the head without payload and tensors' bytes.
std::size_t plain_size(const MessageHead& head) {
  std::size_t size = sizeof(Fixed) + head.name.size() + head.note.size();
  for (const auto& tensor : head.tensors) size += sizeof(FixedTensor) + 16 * tensor.sizes.size();
  return size;
}

class MessageReader {
 public:
  explicit MessageReader(std::string_view in) : in_(in) {}
  std::size_t left() const { return in_.size(); }
  template <class T>
  bool get(T& value) {
    if (in_.size() < sizeof value) return false;
    std::memcpy(&value, in_.data(), sizeof value);
    in_.remove_prefix(sizeof value);
    return true;
  }
  bool get(std::string_view& text, std::uint64_t bytes) {
    if (bytes > in_.size()) return false;
    text = in_.substr(0, static_cast<std::size_t>(bytes));
    in_.remove_prefix(static_cast<std::size_t>(bytes));
    return true;
  }

 private:
  std::string_view in_;
};

Status read_tensor(MessageReader& in, TensorHead& tensor) {
  FixedTensor fixed;
  if (!in.get(fixed)) return wrong("it ends within a tensor");
  if ((fixed.flags & ~kTensorFlags) != 0) return wrong("unknown flags of a tensor");
  if (fixed.dimensions > kMaxDimensions)
    return wrong("a tensor of " + std::to_string(fixed.dimensions) + " dimensions");
  if (in.left() < std::size_t{16} * fixed.dimensions)
    return wrong("it ends within a tensor's sizes");
  if (fixed.bytes > kMaxTensorBytes)
    return wrong("a tensor of " + std::to_string(fixed.bytes) + " bytes");
  const bool undefined = (fixed.flags & TensorHead::kUndefined) != 0;
  if (undefined && (fixed.bytes != 0 || fixed.dimensions != 0))
    return wrong("a tensor that is none has bytes");
  tensor.dtype = fixed.dtype;
  tensor.device_type = fixed.device_type;
  tensor.device_index = fixed.device_index;
  tensor.flags = fixed.flags;
  tensor.bytes = fixed.bytes;
  tensor.sizes.resize(fixed.dimensions);
  tensor.strides.resize(fixed.dimensions);
  for (auto& size : tensor.sizes) in.get(size);
  for (auto& stride : tensor.strides) in.get(stride);
  const auto negative = [](std::int64_t n) { return n < 0; };
  if (std::any_of(tensor.sizes.begin(), tensor.sizes.end(), negative) ||
      std::any_of(tensor.strides.begin(), tensor.strides.end(), negative))
    return wrong("a tensor of negative sizes or strides");
  return {};
}

Status check_long(const Fixed& fixed, std::size_t bytes) {
  if (bytes != sizeof(Fixed) || fixed.name_bytes != 0 || fixed.note_bytes != 0 ||
      fixed.tensors != 0)
    return wrong("an announcement with contents");
  if (fixed.payload_bytes < sizeof(Fixed) || fixed.payload_bytes > kMaxHeadBytes)
    return wrong("an announcement of " + std::to_string(fixed.payload_bytes) + " bytes");
  return {};
}

}  // namespace

std::vector<int> place_parts(MessageHead& head, std::size_t payload_bytes) {
  std::size_t used = plain_size(head);
  const auto fits = [&](std::uint64_t bytes) {
    return bytes == 0 || (used <= kHeadBytes && bytes <= kHeadBytes - used);
  };
  std::vector<int> apart;
  head.payload_bytes = payload_bytes;
  if (fits(payload_bytes)) {
    used += payload_bytes;
  } else {
    head.flags |= MessageHead::kPayloadApart;
    apart.push_back(kPayloadPart);
  }
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    TensorHead& tensor = head.tensors[i];
    tensor.flags &= static_cast<std::uint8_t>(~TensorHead::kApart);
    if (fits(tensor.bytes)) {
      used += tensor.bytes;
    } else {
      tensor.flags |= TensorHead::kApart;
      apart.push_back(static_cast<int>(i));
    }
  }
  return apart;
}

std::string encode(const MessageHead& head, ConstBytes payload,
                   const std::vector<ConstBytes>& data) {
  std::string out;
  std::size_t size =
      plain_size(head) + ((head.flags & MessageHead::kPayloadApart) != 0 ? 0 : payload.size());
  for (const auto& tensor : head.tensors)
    size += (tensor.flags & TensorHead::kApart) != 0 ? 0 : tensor.bytes;
  out.reserve(size);
  Fixed fixed;
  fixed.kind = head.kind;
  fixed.flags = head.flags;
  fixed.name_bytes = static_cast<std::uint32_t>(head.name.size());
  fixed.note_bytes = static_cast<std::uint32_t>(head.note.size());
  fixed.tensors = static_cast<std::uint32_t>(head.tensors.size());
  fixed.call = head.call;
  fixed.time_left = head.time_left;
  fixed.payload_bytes = head.payload_bytes;
  fixed.first_tag = head.first_tag;
  put(out, fixed);
  out.append(head.name).append(head.note);
  for (const auto& tensor : head.tensors) {
    put(out, FixedTensor{tensor.dtype, tensor.device_type, tensor.device_index, tensor.flags,
                         static_cast<std::uint32_t>(tensor.sizes.size()), tensor.bytes});
    for (const auto size_of : tensor.sizes) put(out, size_of);
    for (const auto stride : tensor.strides) put(out, stride);
  }
  if ((head.flags & MessageHead::kPayloadApart) == 0) out.append(as_text(payload));
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    if ((head.tensors[i].flags & TensorHead::kApart) == 0) out.append(as_text(data[i]));
  }
  return out;
}

std::string encode_announcement(MessageKind kind, std::size_t head_bytes, std::uint64_t tag) {
  Fixed announcement;
  announcement.kind = kind;
  announcement.flags = MessageHead::kLong;
  announcement.payload_bytes = head_bytes;
  announcement.first_tag = tag;
  std::string out;
  put(out, announcement);
  return out;
}

Result<MessageHead> decode(ConstBytes bytes) {
  MessageReader in(as_text(bytes));
  Fixed fixed;
  if (!in.get(fixed)) return wrong("it has " + std::to_string(bytes.size()) + " bytes");
  if (fixed.mark != kMark || fixed.zero != 0 || fixed.zero_too != 0)
    return wrong("its first bytes are others");
  if (!known(fixed.kind)) return wrong("kind " + std::to_string(static_cast<int>(fixed.kind)));
  if ((fixed.flags & ~kHeadFlags) != 0) return wrong("unknown flags");
  MessageHead head;
  head.kind = fixed.kind;
  head.flags = fixed.flags;
  head.call = fixed.call;
  head.time_left = fixed.time_left;
  head.payload_bytes = fixed.payload_bytes;
  head.first_tag = fixed.first_tag;
  if ((fixed.flags & MessageHead::kLong) != 0) {
    if (Status status = check_long(fixed, bytes.size()); !status) return status;
    return head;
  }
  if (fixed.payload_bytes > kMaxPayloadBytes)
    return wrong("a payload of " + std::to_string(fixed.payload_bytes) + " bytes");
  if (fixed.time_left < -1) return wrong("a negative time");
  if (!in.get(head.name, fixed.name_bytes) || !in.get(head.note, fixed.note_bytes))
    return wrong("it ends within its name or note");
  if (fixed.tensors > in.left() / sizeof(FixedTensor))
    return wrong(std::to_string(fixed.tensors) + " tensors");
  head.tensors.resize(fixed.tensors);
  for (auto& tensor : head.tensors) {
    if (Status status = read_tensor(in, tensor); !status) return status;
  }
  if ((head.flags & MessageHead::kPayloadApart) == 0 && !in.get(head.payload, head.payload_bytes))
    return wrong("it ends within its payload");
  head.tensor_bytes.resize(head.tensors.size());
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    const auto& tensor = head.tensors[i];
    if ((tensor.flags & TensorHead::kApart) != 0) {
      if (tensor.bytes == 0) return wrong("an empty tensor that travels apart");
      continue;
    }
    if (!in.get(head.tensor_bytes[i], tensor.bytes))
      return wrong("it ends within a tensor's bytes");
  }
  if ((head.flags & MessageHead::kPayloadApart) != 0 && head.payload_bytes == 0)
    return wrong("an empty payload that travels apart");
  if (in.left() > 0) return wrong("it is longer than it says");
  return head;
}

std::string encode_error(const ErrorText& error) {
  ByteWriter out;
  out.put(error.code)
      .put_text(error.type)
      .put_text(error.text)
      .put_text(error.trace)
      .put(static_cast<std::uint32_t>(error.ranks.size()));
  for (const auto rank : error.ranks) out.put(rank);
  return out.take();
}

Result<ErrorText> decode_error(std::string_view bytes) {
  ByteReader in(bytes);
  ErrorText error;
  error.code = in.get<std::uint8_t>();
  error.type = in.get_text();
  error.text = in.get_text();
  error.trace = in.get_text();
  const auto ranks = in.get<std::uint32_t>();
  if (!in.ok() || in.left() != std::size_t{ranks} * sizeof(std::int32_t))
    return wrong("an error that cannot be read");
  if (error.code > static_cast<std::uint8_t>(Code::internal))
    return wrong("an error of an unknown code");
  error.ranks.resize(ranks);
  for (auto& rank : error.ranks) rank = in.get<std::int32_t>();
  return error;
}

std::string encode_closing(const ClosingNote& note) {
  ByteWriter out;
  out.put(note.word)
      .put(note.round)
      .put(note.sent)
      .put(note.handled)
      .put(static_cast<std::uint8_t>(note.busy))
      .put_text(note.waits_for);
  return out.take();
}

Result<ClosingNote> decode_closing(std::string_view bytes) {
  ByteReader in(bytes);
  ClosingNote note;
  const auto word = in.get<std::uint8_t>();
  note.round = in.get<std::uint64_t>();
  note.sent = in.get<std::uint64_t>();
  note.handled = in.get<std::uint64_t>();
  const auto busy = in.get<std::uint8_t>();
  note.waits_for = in.get_text();
  if (!in.at_end() || word < static_cast<std::uint8_t>(ClosingWord::here) ||
      word > static_cast<std::uint8_t>(ClosingWord::close) || busy > 1)
    return wrong("a word about the end that cannot be read");
  note.word = static_cast<ClosingWord>(word);
  note.busy = busy == 1;
  return note;
}

}  // namespace muster::rpc

// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/wire/message.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "testing/fuzz.h"

// The largest piece that this thread takes from the heap. Sanitizers bring an operator new of their
// own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MUSTER_SEES_ALLOCATIONS 1
namespace {
thread_local std::size_t largest_piece = 0;
}  // namespace
[[gnu::noinline]] void* operator new(std::size_t size) {
  largest_piece = std::max(largest_piece, size);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace muster::rpc {
namespace {

using muster::testing::Fuzz;
using muster::testing::fuzz_for_a_while;

/// Calls `read` on what came and looks whether it took memory on the word of the sender: an entry
/// in memory may be some times as large as on the wire, and errors are sentences.
template <class Read>
auto reading(std::string_view came, Read read) {
#ifdef MUSTER_SEES_ALLOCATIONS
  largest_piece = 0;
  auto result = read(came);
  EXPECT_LE(largest_piece, 8 * came.size() + 1024);
  return result;
#else
  return read(came);
#endif
}

constexpr std::uint8_t kFloat = 6;  // torch's number

TensorHead tensor_head(Fuzz& fuzz) {
  TensorHead head;
  if (fuzz.one_in(8)) {
    head.flags = TensorHead::kUndefined;
    return head;
  }
  head.dtype = kFloat;
  std::int64_t elements = 1;
  for (std::size_t d = fuzz.below(4); d > 0; --d)
    head.sizes.push_back(static_cast<std::int64_t>(fuzz.below(fuzz.one_in(4) ? 200 : 5)));
  head.strides.assign(head.sizes.size(), 1);
  for (std::size_t d = head.sizes.size(); d-- > 0;) {
    head.strides[d] = std::max<std::int64_t>(elements, 1);
    elements *= head.sizes[d];
  }
  head.bytes = static_cast<std::uint64_t>(elements) * 4;
  return head;
}

struct Sent {
  std::string name;
  std::string note;
  std::string payload;
  std::vector<std::string> tensors;
  MessageHead head;
  std::vector<int> apart;
  std::string bytes;  // of the head
};

Sent any_message(Fuzz& fuzz) {
  Sent sent;
  sent.name = fuzz.noise(30);
  sent.note = fuzz.noise(20);
  sent.payload = fuzz.noise(fuzz.one_in(5) ? 40000 : 300);
  sent.head.kind = fuzz.one_in(2) ? MessageKind::call : MessageKind::reply;
  sent.head.flags = static_cast<std::uint8_t>(fuzz.below(4));
  sent.head.call = fuzz.word();
  sent.head.time_left = fuzz.one_in(2) ? -1 : static_cast<std::int64_t>(fuzz.word() >> 1);
  sent.head.first_tag = 1 + fuzz.below(1000);
  std::vector<ConstBytes> data;
  for (std::size_t i = fuzz.one_in(20) ? 700 : fuzz.below(5); i > 0; --i) {
    sent.head.tensors.push_back(tensor_head(fuzz));
    sent.tensors.push_back(
        std::string(sent.head.tensors.back().bytes, static_cast<char>(fuzz.word())));
  }
  for (const auto& bytes : sent.tensors) data.push_back(as_bytes(bytes));
  MessageHead head = sent.head;
  head.name = sent.name;
  head.note = sent.note;
  sent.apart = place_parts(head, sent.payload.size());
  sent.bytes = encode(head, as_bytes(sent.payload), data);
  return sent;
}

TEST(RpcMessage, WhatIsSentIsRead) {
  Fuzz fuzz(1);
  int longs = 0;
  for (int round = 0; round < 300; ++round) {
    const Sent sent = any_message(fuzz);
    if (sent.bytes.size() > kHeadBytes) {
      ++longs;
      const std::string announcement =
          encode_announcement(sent.head.kind, sent.bytes.size(), sent.head.first_tag - 1);
      EXPECT_LE(announcement.size(), kHeadBytes);
      const auto announced = decode(as_bytes(announcement));
      ASSERT_TRUE(announced.ok()) << announced.status().message();
      EXPECT_EQ(announced->kind, sent.head.kind);
      EXPECT_EQ(announced->flags & MessageHead::kLong, MessageHead::kLong);
      EXPECT_EQ(announced->payload_bytes, sent.bytes.size());
      EXPECT_EQ(announced->first_tag, sent.head.first_tag - 1);
    }
    const auto head = decode(as_bytes(sent.bytes));
    ASSERT_TRUE(head.ok()) << head.status().message();
    EXPECT_EQ(head->first_tag, sent.head.first_tag);
    EXPECT_EQ(head->kind, sent.head.kind);
    EXPECT_EQ(head->call, sent.head.call);
    EXPECT_EQ(head->time_left, sent.head.time_left);
    EXPECT_EQ(head->name, sent.name);
    EXPECT_EQ(head->note, sent.note);
    EXPECT_EQ(head->payload_bytes, sent.payload.size());
    std::size_t apart = 0;
    if ((head->flags & MessageHead::kPayloadApart) != 0) {
      ASSERT_LT(apart, sent.apart.size());
      EXPECT_EQ(sent.apart[apart++], kPayloadPart);
    } else {
      EXPECT_EQ(head->payload, sent.payload);
    }
    ASSERT_EQ(head->tensors.size(), sent.tensors.size());
    for (std::size_t i = 0; i < sent.tensors.size(); ++i) {
      EXPECT_EQ(head->tensors[i].sizes, sent.head.tensors[i].sizes);
      EXPECT_EQ(head->tensors[i].strides, sent.head.tensors[i].strides);
      if ((head->tensors[i].flags & TensorHead::kApart) != 0) {
        ASSERT_LT(apart, sent.apart.size());
        EXPECT_EQ(sent.apart[apart++], static_cast<int>(i));
      } else {
        EXPECT_EQ(head->tensor_bytes[i], sent.tensors[i]);
      }
    }
    EXPECT_EQ(apart, sent.apart.size());
  }
  EXPECT_GT(longs, 0);
}

// The parts of an accepted message lie within its frame, and it announces no more than the limits
// allow.
void check_bounds(const MessageHead& head, std::string_view frame) {
  const auto within = [&](std::string_view part) {
    return part.empty() || (part.data() >= frame.data() &&
                            part.data() + part.size() <= frame.data() + frame.size());
  };
  EXPECT_TRUE(within(head.name) && within(head.note) && within(head.payload));
  EXPECT_LE(head.payload_bytes, kMaxPayloadBytes);
  EXPECT_LE(head.tensors.size(), frame.size());
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    EXPECT_TRUE(within(head.tensor_bytes[i]));
    EXPECT_EQ(head.tensors[i].sizes.size(), head.tensors[i].strides.size());
    EXPECT_LE(head.tensors[i].bytes, kMaxTensorBytes);
  }
}

// spec: N2 lengths from the wire are checked before anything is allocated
TEST(RpcMessageFuzz, DamagedHeadsAreRefusedOrHarmless) {
  Fuzz fuzz(2);
  int refused = 0;
  fuzz_for_a_while(3000, [&] {
    const Sent sent = any_message(fuzz);
    const std::string frame = fuzz.one_in(10)  ? fuzz.noise(300)
                              : fuzz.one_in(6) ? fuzz.cut(sent.bytes)
                                               : fuzz.damaged(sent.bytes);
    const auto head =
        reading(frame, [](std::string_view bytes) { return decode(as_bytes(bytes)); });
    if (head.ok()) return check_bounds(*head, frame);
    ++refused;
    EXPECT_EQ(head.status().code(), Code::internal);
  });
  EXPECT_GT(refused, 0);
}

TEST(RpcMessageFuzz, DamagedErrorsAreRefusedOrHarmless) {
  Fuzz fuzz(3);
  const ErrorText error{3, "std::out_of_range", "no such key", "frame", {0, 7}};
  const auto good = encode_error(error);
  const auto back = decode_error(good);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->text, error.text);
  EXPECT_EQ(back->ranks, error.ranks);
  fuzz_for_a_while(5000, [&] {
    const std::string came = fuzz.damaged(good);
    const auto damaged = reading(came, decode_error);
    if (damaged.ok()) {
      EXPECT_LE(damaged->ranks.size(), came.size());
    }
  });
}

TEST(RpcMessageFuzz, DamagedWordsAboutTheEndAreRefusedOrHarmless) {
  Fuzz fuzz(6);
  int refused = 0;
  fuzz_for_a_while(5000, [&] {
    ClosingNote note;
    note.word = static_cast<ClosingWord>(1 + fuzz.below(6));
    note.round = fuzz.word();
    note.sent = fuzz.word();
    note.handled = fuzz.word();
    note.busy = fuzz.one_in(2);
    note.waits_for = fuzz.noise(40);
    const std::string good = encode_closing(note);
    const auto back = decode_closing(good);
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(back->word, note.word);
    EXPECT_EQ(back->handled, note.handled);
    EXPECT_EQ(back->busy, note.busy);
    EXPECT_EQ(back->waits_for, note.waits_for);
    const std::string came = fuzz.one_in(4) ? fuzz.cut(good) : fuzz.damaged(good);
    const auto damaged = reading(came, decode_closing);
    if (!damaged.ok()) {
      ++refused;
    } else {
      EXPECT_EQ(encode_closing(*damaged),
                came);  // what is taken is what was said, to the last byte
    }
  });
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace muster::rpc

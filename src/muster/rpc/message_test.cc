#include "muster/rpc/message.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cereal/types/map.hpp>
#include <map>

#include "muster/rpc/value.h"
#include "muster/testing/fuzz.h"

namespace muster::rpc {
namespace {

using muster::testing::Fuzz;

TensorHead tensor_head(Fuzz& fuzz) {
  TensorHead head;
  if (fuzz.one_in(8)) {
    head.flags = TensorHead::kUndefined;
    return head;
  }
  head.dtype = static_cast<std::uint8_t>(at::kFloat);
  std::int64_t elements = 1;
  for (std::size_t d = fuzz.below(4); d > 0; --d) head.sizes.push_back(static_cast<std::int64_t>(fuzz.below(fuzz.one_in(4) ? 200 : 5)));
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
  Head head;
  EncodedMessage message;
};

Sent any_message(Fuzz& fuzz) {
  Sent sent;
  sent.name = fuzz.noise(30);
  sent.note = fuzz.noise(20);
  sent.payload = fuzz.noise(fuzz.one_in(5) ? 40000 : 300);
  sent.head.kind = fuzz.one_in(2) ? Kind::call : Kind::reply;
  sent.head.flags = static_cast<std::uint8_t>(fuzz.below(4));
  sent.head.call = fuzz.word();
  sent.head.time_left = fuzz.one_in(2) ? -1 : static_cast<std::int64_t>(fuzz.word() >> 1);
  sent.head.first_tag = 1 + fuzz.below(1000);
  std::vector<ConstBytes> data;
  for (std::size_t i = fuzz.one_in(20) ? 700 : fuzz.below(5); i > 0; --i) {
    sent.head.tensors.push_back(tensor_head(fuzz));
    sent.tensors.push_back(std::string(sent.head.tensors.back().bytes, static_cast<char>(fuzz.word())));
  }
  for (const auto& bytes : sent.tensors) data.push_back(as_bytes(bytes));
  Head head = sent.head;
  head.name = sent.name;
  head.note = sent.note;
  sent.message = encode(head, as_bytes(sent.payload), data);
  return sent;
}

TEST(RpcMessage, WhatIsSentIsRead) {
  Fuzz fuzz(1);
  int longs = 0;
  for (int round = 0; round < 300; ++round) {
    const Sent sent = any_message(fuzz);
    ASSERT_LE(sent.message.head.size(), kHeadBytes);
    auto head = decode(as_bytes(sent.message.head));
    ASSERT_TRUE(head.ok()) << head.status().message();
    if (!sent.message.long_head.empty()) {
      ++longs;
      EXPECT_EQ(head->flags & Head::kLong, Head::kLong);
      EXPECT_EQ(head->payload_bytes, sent.message.long_head.size());
      EXPECT_EQ(head->first_tag, sent.head.first_tag);
      head = decode(as_bytes(sent.message.long_head));
      ASSERT_TRUE(head.ok()) << head.status().message();
      EXPECT_EQ(head->first_tag, sent.head.first_tag + 1);
    }
    EXPECT_EQ(head->kind, sent.head.kind);
    EXPECT_EQ(head->call, sent.head.call);
    EXPECT_EQ(head->time_left, sent.head.time_left);
    EXPECT_EQ(head->name, sent.name);
    EXPECT_EQ(head->note, sent.note);
    EXPECT_EQ(head->payload_bytes, sent.payload.size());
    std::size_t apart = 0;
    if ((head->flags & Head::kPayloadApart) != 0) {
      ASSERT_LT(apart, sent.message.apart.size());
      EXPECT_EQ(sent.message.apart[apart++], EncodedMessage::kPayload);
    } else {
      EXPECT_EQ(head->payload, sent.payload);
    }
    ASSERT_EQ(head->tensors.size(), sent.tensors.size());
    for (std::size_t i = 0; i < sent.tensors.size(); ++i) {
      EXPECT_EQ(head->tensors[i].sizes, sent.head.tensors[i].sizes);
      EXPECT_EQ(head->tensors[i].strides, sent.head.tensors[i].strides);
      if ((head->tensors[i].flags & TensorHead::kApart) != 0) {
        ASSERT_LT(apart, sent.message.apart.size());
        EXPECT_EQ(sent.message.apart[apart++], static_cast<int>(i));
      } else {
        EXPECT_EQ(head->tensor_bytes[i], sent.tensors[i]);
      }
    }
    EXPECT_EQ(apart, sent.message.apart.size());
  }
  EXPECT_GT(longs, 0);
}

// What is accepted lies within what came, and no more is promised than its limits allow.
void check_bounds(const Head& head, std::string_view frame) {
  const auto within = [&](std::string_view part) {
    return part.empty() || (part.data() >= frame.data() && part.data() + part.size() <= frame.data() + frame.size());
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
  for (int round = 0; round < muster::testing::fuzz_rounds(3000); ++round) {
    const Sent sent = any_message(fuzz);
    const auto& good = sent.message.long_head.empty() ? sent.message.head : sent.message.long_head;
    const std::string frame = fuzz.one_in(10) ? fuzz.noise(300) : fuzz.one_in(6) ? fuzz.cut(good) : fuzz.damaged(good);
    const auto head = decode(as_bytes(frame));
    if (!head.ok()) {
      ++refused;
      EXPECT_EQ(head.status().code(), Code::internal);
      continue;
    }
    check_bounds(*head, frame);
  }
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
  for (int round = 0; round < muster::testing::fuzz_rounds(5000); ++round) {
    const auto damaged = decode_error(fuzz.damaged(good));
    if (damaged.ok()) {
      EXPECT_LE(damaged->ranks.size(), good.size() + 64);
    }
  }
}

struct Nested {
  std::map<std::string, std::vector<at::Tensor>> tensors;
  std::vector<std::int64_t> numbers;
  std::string text;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(tensors, numbers, text);
  }
};

TEST(RpcValue, NestedObjectsKeepTheirTensors) {
  Nested nested{{{"a", {torch::ones({2}), at::Tensor(), torch::zeros({3})}}, {"b", {}}}, {1, 2, 3}, "text"};
  Value value;
  Passage passage;
  pack(value, passage, nested);
  EXPECT_EQ(value.tensors.size(), 2U);  // one of the three is none
  const auto back = unpack<Nested>(value, passage);
  ASSERT_EQ(back.tensors.at("a").size(), 3U);
  EXPECT_TRUE(torch::equal(back.tensors.at("a")[2], torch::zeros({3})));
  EXPECT_FALSE(back.tensors.at("a")[1].defined());
  EXPECT_EQ(back.numbers, nested.numbers);
  EXPECT_EQ(back.text, "text");
}

TEST(RpcValueFuzz, DamagedValuesThrow) {
  Fuzz fuzz(4);
  const Nested nested{{{"a", {torch::ones({2})}}, {"b", {}}}, {1, 2, 3}, "text"};
  Value good;
  Passage passage;
  pack(good, passage, nested);
  for (int round = 0; round < muster::testing::fuzz_rounds(5000); ++round) {
    Value damaged{fuzz.damaged(good.bytes), good.tensors};
    try {
      unpack<Nested>(damaged, passage);
    } catch (const ValueError&) {
    } catch (const cereal::Exception&) {
    }
  }
}

// spec: N3 what a tensor says of itself is checked before memory is taken for it
TEST(RpcValueFuzz, DamagedTensorHeadsAreRefusedOrHarmless) {
  Fuzz fuzz(5);
  int accepted = 0;
  for (int round = 0; round < muster::testing::fuzz_rounds(5000); ++round) {
    TensorHead head = tensor_head(fuzz);
    if ((head.flags & TensorHead::kUndefined) != 0) continue;
    for (std::size_t times = fuzz.below(3); times > 0; --times) {
      const auto any = static_cast<std::int64_t>(fuzz.one_in(2) ? fuzz.word() >> 1 : fuzz.below(8));
      switch (fuzz.below(5)) {
        case 0: head.dtype = static_cast<std::uint8_t>(fuzz.word()); break;
        case 1:
          if (!head.sizes.empty()) head.sizes[fuzz.below(head.sizes.size())] = any;
          break;
        case 2:
          if (!head.strides.empty()) head.strides[fuzz.below(head.strides.size())] = any;
          break;
        case 3: head.bytes = static_cast<std::uint64_t>(any); break;
        default: head.flags ^= TensorHead::kElementOrder; break;
      }
    }
    if (head.bytes > (1U << 24)) continue;  // memory that nobody writes to costs nothing, but there may be little address space
    auto memory = allocate_tensor(head);
    if (!memory.ok()) continue;
    ++accepted;
    EXPECT_EQ(memory->data.size(), head.bytes);
    std::memset(memory->data.data(), 0, memory->data.size());
    head.device_type = 0;
    if ((head.flags & TensorHead::kElementOrder) != 0 && head.bytes > 4096) continue;
    const auto tensor = assemble_tensor(head, std::move(*memory));
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef(head.sizes));
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace muster::rpc

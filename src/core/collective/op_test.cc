// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/op.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <string>

#include "core/collective/call.h"

namespace muster::collective {
namespace {

// spec: F14 bit operations: integers and bool only; complex: no MIN, MAX, PRODUCT (clear error)
TEST(OpTable, ReductionsAreDefinedWhereTheyMakeSense) {
  for (int d = 0; d < kDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int r = 0; r < kReduces; ++r) {
      const auto reduce = static_cast<Reduce>(r);
      bool expected = is_reducible(dtype);
      if (reduce == Reduce::band || reduce == Reduce::bor || reduce == Reduce::bxor)
        expected = expected && is_integral(dtype);
      if (reduce == Reduce::min || reduce == Reduce::max || reduce == Reduce::product)
        expected = expected && !is_complex(dtype);
      std::string why;
      EXPECT_EQ(reduce_supports(reduce, dtype, &why), expected)
          << name_of(reduce) << " " << name_of(dtype);
      EXPECT_EQ(why.empty(), expected);
      if (!expected) {
        EXPECT_NE(why.find(name_of(reduce)), std::string::npos) << why;
        EXPECT_NE(why.find(name_of(dtype)), std::string::npos) << why;
      }
    }
  }
}

transport::Fingerprint call(Op op) {
  transport::Fingerprint made;
  made.sequence = 3;
  made.op = static_cast<std::uint8_t>(op);
  made.dtype = static_cast<std::uint8_t>(DType::float32);
  return made;
}

TEST(OpTable, CallsReadLikeCalls) {
  const auto& rules = fingerprint_rules();
  auto made = call(Op::all_reduce);
  made.count = 1024;
  EXPECT_EQ(rules.describe(made), "all_reduce(SUM, float32, 1024 elements)");
  made = call(Op::broadcast);
  made.count = 1;
  made.root = 2;
  EXPECT_EQ(rules.describe(made), "broadcast(float32, 1 element, root 2)");
  EXPECT_EQ(rules.describe(call(Op::barrier)), "barrier()");
  EXPECT_EQ(rules.describe(call(Op::all_to_all)), "all_to_all(float32)");
  made.op = 200;
  EXPECT_EQ(rules.describe(made), "operation 200()");
  made = call(Op::all_reduce);
  made.count = 8;
  made.flags = 3 << kEncodingShift;
  EXPECT_EQ(rules.describe(made), "all_reduce(SUM, float32, 8 elements, in int4)");
  made.flags = 9 << kEncodingShift;
  EXPECT_EQ(rules.describe(made), "all_reduce(SUM, float32, 8 elements, in encoding 9)");
  made = call(Op::all_reduce);
  made.dtype = 99;
  made.reduce = 98;
  EXPECT_EQ(rules.describe(made), "all_reduce(reduction 98, dtype 99, 0 elements)");
}

// spec: F18 collectives that differ in nothing but the caller's tag do not agree, and their words
// differ
TEST(OpTable, TagsTellCallsApart) {
  std::array<std::byte, 16> bytes{};
  Args args;
  args.dtype = DType::float32;
  args.inputs = {ConstBytes(bytes)};
  args.outputs = {MutableBytes(bytes)};
  const auto& rules = fingerprint_rules();
  for (const Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::broadcast}) {
    args.op = op;
    args.tag = 1;
    const auto one = fingerprint_of(args, 1);
    const auto signature = signature_of(args);
    EXPECT_TRUE(rules.agree(one, fingerprint_of(args, 1)));
    args.tag = 2;
    const auto other = fingerprint_of(args, 1);
    EXPECT_FALSE(rules.agree(one, other));
    EXPECT_NE(rules.describe(one), rules.describe(other));
    EXPECT_NE(signature, signature_of(args));
  }
}

// spec: F18 the parts of a call with an encoding are compared as that call
TEST(OpTable, PartsAreComparedAsTheWhole) {
  std::array<std::byte, 16> bytes{};
  Args whole, part;
  whole.op = Op::all_reduce;
  whole.dtype = DType::float32;
  whole.inputs = {ConstBytes(bytes)};
  whole.outputs = {MutableBytes(bytes)};
  part.op = Op::all_to_all;
  part.each = bytes.size();
  part.part_of = fingerprint_of(whole, 0);
  part.part_of.flags = 2 << kEncodingShift;
  const auto& rules = fingerprint_rules();
  EXPECT_EQ(rules.describe(fingerprint_of(part, 7)),
            "all_reduce(SUM, float32, 4 elements, in int8)");
  EXPECT_EQ(fingerprint_of(part, 7).sequence, 7u);
  EXPECT_FALSE(rules.agree(fingerprint_of(part, 7), fingerprint_of(whole, 7)));
  EXPECT_EQ(signature_of(part).each, Args::kUnknownLength);
}

// spec: F18 different collectives, or the same with different dtype, op, root, or size do not agree
TEST(OpTable, CallsAgreeOnlyWhereAllThatMattersIsEqual) {
  const auto& rules = fingerprint_rules();
  const auto base = call(Op::reduce);
  EXPECT_TRUE(rules.agree(base, base));
  const auto differs = [&](auto change) {
    auto other = base;
    change(other);
    return !rules.agree(base, other) && !rules.agree(other, base);
  };
  EXPECT_TRUE(differs([](auto& c) { c.op = static_cast<std::uint8_t>(Op::all_reduce); }));
  EXPECT_TRUE(differs([](auto& c) { c.dtype = static_cast<std::uint8_t>(DType::int32); }));
  EXPECT_TRUE(differs([](auto& c) { c.reduce = static_cast<std::uint8_t>(Reduce::max); }));
  EXPECT_TRUE(differs([](auto& c) { c.root = 1; }));
  EXPECT_TRUE(differs([](auto& c) { c.count = 9; }));
  EXPECT_TRUE(differs([](auto& c) { c.digest = 9; }));
  EXPECT_TRUE(differs([](auto& c) { c.flags = 2 << kEncodingShift; }));
}

}  // namespace
}  // namespace muster::collective

// SPDX-License-Identifier: BSD-3-Clause
// Boxes against element-by-element enumeration.

#include "checkpoint/format/plan/box.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "checkpoint/format/plan/division.h"
#include "testing/seed.h"

namespace muster::shards {
namespace {

/// The row-major numbers of a box's elements in a tensor of `sizes`, in the box's own order.
std::vector<std::int64_t> numbers(const Extent& sizes, const Box& box) {
  std::vector<std::int64_t> all;
  for_each_run(box, box_of(sizes), box, [&](std::int64_t from, std::int64_t to, std::int64_t run) {
    EXPECT_EQ(to, static_cast<std::int64_t>(all.size()));
    for (std::int64_t i = 0; i < run; ++i) all.push_back(from + i);
  });
  return all;
}

Extent random_sizes(std::mt19937_64& random) {
  Extent sizes(random() % 5);
  for (auto& each : sizes) each = static_cast<std::int64_t>(1 + random() % 5);
  return sizes;
}

Box random_box(std::mt19937_64& random, const Extent& sizes) {
  Box box;
  for (const std::int64_t size : sizes) {
    const auto begin = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(size));
    box.offsets.push_back(begin);
    box.sizes.push_back(
        1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(size - begin)));
  }
  return box;
}

// spec: S2 any mesh: a stretch of a flattened tensor is at most 2n - 1 boxes of the same elements
// in the same order
TEST(Box, StretchesBecomeBoxesInOrder) {
  std::mt19937_64 random(muster::testing::test_seed());
  for (int round = 0; round < 2000; ++round) {
    const Extent sizes = random_sizes(random);
    const auto all = static_cast<std::uint64_t>(*element_count(sizes));
    const auto first = static_cast<std::int64_t>(random() % all);
    const auto count = static_cast<std::int64_t>(random() % (all - first + 1));
    const auto boxes = boxes_of_stretch(sizes, first, count);
    EXPECT_LE(boxes.size(), sizes.empty() ? 1 : 2 * sizes.size() - 1);
    std::int64_t next = first;
    for (const Box& box : boxes)
      for (const std::int64_t number : numbers(sizes, box)) EXPECT_EQ(number, next++);
    EXPECT_EQ(next, first + count);
  }
}

// spec: S2 what two boxes share is what enumeration finds, and its runs pair the same elements
TEST(Box, IntersectionsAndRunsPairTheSameElements) {
  std::mt19937_64 random(muster::testing::test_seed() + 1);
  for (int round = 0; round < 2000; ++round) {
    const Extent sizes = random_sizes(random);
    const Box a = random_box(random, sizes), b = random_box(random, sizes);
    const auto in_a = numbers(sizes, a), in_b = numbers(sizes, b);
    const std::set<std::int64_t> of_b(in_b.begin(), in_b.end());
    std::set<std::int64_t> expected, found;
    for (const std::int64_t each : in_a)
      if (of_b.contains(each)) expected.insert(each);
    if (const auto common = intersection(a, b))
      for_each_run(*common, a, b, [&](std::int64_t from, std::int64_t to, std::int64_t run) {
        for (std::int64_t i = 0; i < run; ++i) {
          EXPECT_EQ(in_a.at(static_cast<std::size_t>(from + i)),
                    in_b.at(static_cast<std::size_t>(to + i)));
          EXPECT_TRUE(found.insert(in_a.at(static_cast<std::size_t>(from + i))).second);
        }
      });
    EXPECT_EQ(found, expected);
  }
}

// spec: S4 incomplete: parts that leave elements out, overlap or stick out are refused
TEST(Box, DivisionsAreChecked) {
  const Extent sizes{4, 6};
  const Box left{{0, 0}, {4, 3}}, right{{0, 3}, {4, 3}}, middle{{1, 2}, {1, 2}};
  EXPECT_EQ(division_error(sizes, {right, left}), "");
  EXPECT_NE(division_error(sizes, {left}).find("12 of its 24"), std::string::npos);
  EXPECT_NE(division_error(sizes, {left, middle}).find("overlap"), std::string::npos);
  EXPECT_NE(division_error(sizes, {left, right, middle}).find("overlap"), std::string::npos);
  EXPECT_NE(division_error(sizes, {{{0, 4}, {4, 3}}}).find("outside"), std::string::npos);
  EXPECT_NE(division_error(sizes, {{{-1, 0}, {4, 6}}}).find("outside"), std::string::npos);
  EXPECT_EQ(division_error({}, {box_of({})}), "");
  EXPECT_EQ(division_error({0, 3}, {}), "");
  EXPECT_NE(division_error({1LL << 40, 1LL << 40}, {}), "");
}

// spec: S1 what several ranks have is written once, shared out by bytes
TEST(Division, CopiesAreWrittenOnceAndSharedOut) {
  const auto whole = [](const char* name, std::int64_t elements) {
    return Shard{name, "F32", {elements}, {box_of({elements})}};
  };
  const std::vector<Shard> model{whole("a", 100), whole("b", 60), whole("c", 40), whole("s", 1)};
  const auto files = plan_files({model, model});
  ASSERT_TRUE(files.ok()) << files.status().message();
  std::int64_t elements[2] = {0, 0};
  std::size_t pieces = 0;
  for (const auto& file : *files)
    for (const auto& piece : file.pieces) {
      elements[file.rank] += piece.box.elements();
      ++pieces;
    }
  EXPECT_EQ(pieces, 4u);
  EXPECT_LE(std::abs(elements[0] - elements[1]), 1);
}

// spec: S4 incomplete: tensors on which ranks disagree are refused by name and rank
TEST(Division, DisagreementsAreNamed) {
  const Shard a{"w", "F32", {4}, {{{0}, {2}}}}, b{"w", "F32", {5}, {{{2}, {2}}}};
  const auto sizes = plan_files({{a}, {b}});
  ASSERT_FALSE(sizes.ok());
  EXPECT_NE(sizes.status().message().find("'w'"), std::string::npos);
  EXPECT_NE(sizes.status().message().find("rank 1"), std::string::npos);
  EXPECT_FALSE(plan_files({{a}, {a}}).ok());
  EXPECT_FALSE(plan_files({{a, a}}).ok());
}

TEST(Division, DescriptionsTravelAsText) {
  const std::vector<Shard> shards{{"a.b", "BF16", {4, 2}, {{{0, 0}, {1, 2}}, {{3, 0}, {1, 1}}}},
                                  {"s", "I64", {}, {box_of({})}}};
  const auto back = read_shards(text_of_shards(shards));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, shards);
  EXPECT_FALSE(read_shards("[[1]]").ok());
  EXPECT_FALSE(read_shards("{").ok());
}

}  // namespace
}  // namespace muster::shards

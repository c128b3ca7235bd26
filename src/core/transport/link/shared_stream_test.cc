// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/byte_stream.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <random>
#include <thread>
#include <vector>

#include "core/shm/region_layout.h"
#include "core/shm/region_view.h"
#include "core/shm/testing/region_memory.h"

namespace muster::transport {
namespace {

using shm::in_child;
using shm::pattern;
using shm::shape_of;
using shm::TestRegion;

std::size_t write_some(ByteStream& stream, std::uint64_t from, std::size_t bytes,
                       std::mt19937_64& random) {
  std::vector<std::byte> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = pattern(from + i);
  const std::size_t cut = random() % (bytes + 1);
  const std::array<ConstBytes, 3> pieces{ConstBytes(data).first(cut), ConstBytes{},
                                         ConstBytes(data).subspan(cut)};
  return stream.write(pieces).value();
}

/// Reads what is there; false where a byte is not the one that was sent.
bool read_some(ByteStream& stream, std::uint64_t& at, std::size_t bytes, std::mt19937_64& random) {
  std::vector<std::byte> data(bytes);
  const std::size_t cut = random() % (bytes + 1);
  const std::array<MutableBytes, 2> pieces{MutableBytes(data).first(cut),
                                           MutableBytes(data).subspan(cut)};
  const auto got = stream.read(pieces);
  if (!got.ok()) return false;
  for (std::size_t i = 0; i < *got; ++i) {
    if (data[i] != pattern(at + i)) return false;
  }
  at += *got;
  return true;
}

/// Both directions at once, up to `most` bytes a call, as a link does, sleeping on the mailbox when
/// nothing moves.
bool exchange_bytes(shm::HostRegion& region, int peer, std::uint64_t total, std::size_t most,
                    unsigned seed) {
  std::mt19937_64 random(seed);
  auto stream = open_shared_stream(region, peer);
  shm::Mailbox& mailbox = region.mailbox(region.local_rank());
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  const auto pass = [&] {
    const std::uint64_t before = sent + received;
    if (sent < total)
      sent += write_some(*stream, sent, std::min<std::uint64_t>(1 + random() % most, total - sent),
                         random);
    if (received < total && !read_some(*stream, received, 1 + random() % most, random)) return -1;
    return sent + received > before ? 1 : 0;
  };
  while (sent < total || received < total) {
    int moved = pass();
    if (moved == 0) {
      const std::uint32_t ticket = mailbox.prepare_sleep();
      moved = pass();
      if (moved == 0) {
        // Far longer than anything takes: a lost wake-up shows as the test's own time limit.
        mailbox.sleep(ticket, std::chrono::minutes(5));
      } else {
        mailbox.cancel_sleep();
      }
    }
    if (moved < 0) return false;
  }
  return true;
}

class SharedStreams : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, SharedStreams, ::testing::Values(true, false),
                         [](const auto& info) {
                           return info.param ? "memory_file" : "ordinary_memory";
                         });

TEST_P(SharedStreams, RingsCarryBytesBothWaysBetweenThreads) {
  struct Traffic {
    std::size_t ring_bytes;
    std::size_t most;
    std::uint64_t total;
  };
  // The second: calls of many steps, read while they are written.
  for (const Traffic& traffic :
       {Traffic{4096, 6000, 4'000'000}, Traffic{std::size_t{1} << 17, 300'000, 16'000'000}}) {
    TestRegion memory(shape_of(3, traffic.ring_bytes), GetParam());
    auto first = memory.open(0);
    auto second = memory.open(2);
    bool ok = false;
    std::thread other([&] { ok = exchange_bytes(*second, 0, traffic.total, traffic.most, 2); });
    EXPECT_TRUE(exchange_bytes(*first, 2, traffic.total, traffic.most, 1));
    other.join();
    EXPECT_TRUE(ok);
  }
}

TEST_P(SharedStreams, RingTellsItsEndOnceEveryByteWasRead) {
  TestRegion memory(shape_of(2), GetParam());
  auto first = memory.open(0);
  auto second = memory.open(1);
  auto there = open_shared_stream(*first, 1);
  auto back = open_shared_stream(*second, 0);
  const std::array<ConstBytes, 1> out{as_bytes("the end")};
  EXPECT_EQ(there->write(out).value(), 7u);
  there.reset();
  std::array<std::byte, 4> half{};
  const std::array<MutableBytes, 1> in{half};
  EXPECT_EQ(back->read(in).value(), 4u);
  EXPECT_EQ(back->read(in).value(), 3u);
  EXPECT_EQ(back->read(in).status().code(), Code::closed);
  EXPECT_EQ(back->write(out).status().code(), Code::closed) << "nobody would ever read it";
  // An end is final, also for a stream that is opened anew.
  auto again = open_shared_stream(*second, 0);
  EXPECT_EQ(again->read(in).status().code(), Code::closed);
}

TEST_P(SharedStreams, FullRingTakesWhatFitsAndWakesItsWriterWhenThereIsRoom) {
  TestRegion memory(shape_of(2), GetParam());
  auto first = memory.open(0);
  auto second = memory.open(1);
  auto writer = open_shared_stream(*first, 1);
  auto reader = open_shared_stream(*second, 0);
  const std::vector<std::byte> data(10'000, std::byte{7});
  const std::array<ConstBytes, 1> out{data};
  EXPECT_EQ(writer->write(out).value(), 4096u);
  EXPECT_EQ(writer->write(out).value(), 0u);
  const std::uint32_t before = first->mailbox(0).prepare_sleep();
  std::array<std::byte, 100> some{};
  const std::array<MutableBytes, 1> in{some};
  EXPECT_EQ(reader->read(in).value(), 100u);
  EXPECT_NE(first->mailbox(0).word.load(), before) << "the writer was not woken";
  first->mailbox(0).cancel_sleep();
  EXPECT_EQ(writer->write(out).value(), 100u);
}

TEST_P(SharedStreams, RingWithImpossiblePositionsIsRefusedByBothSides) {
  TestRegion memory(shape_of(2), GetParam());
  auto first = memory.open(0);
  auto second = memory.open(1);
  auto writer = open_shared_stream(*first, 1);
  auto reader = open_shared_stream(*second, 0);
  const std::vector<std::byte> data(4096);
  const std::array<ConstBytes, 1> out{data};
  EXPECT_EQ(writer->write(out).value(), 4096u);
  shm::RingControl& control = *static_cast<shm::RegionView&>(*first).ring(0, 1).control;
  control.head.store(5000);
  EXPECT_EQ(writer->write(out).status().code(), Code::internal) << "more was read than was written";
  control.tail.store(10'000);
  std::array<std::byte, 100> some{};
  const std::array<MutableBytes, 1> in{some};
  EXPECT_EQ(reader->read(in).status().code(), Code::internal)
      << "more was written than there is room for";
}

TEST_P(SharedStreams, OpeningAStreamRingsThePeersDoorbell) {
  TestRegion memory(shape_of(3), GetParam());
  auto first = memory.open(0);
  auto second = memory.open(1);
  EXPECT_EQ(shared_stream_doorbell(*second), 0u);
  EXPECT_FALSE(shared_stream_awaits(*second, 0));
  const std::uint32_t before = second->mailbox(1).prepare_sleep();
  auto stream = open_shared_stream(*first, 1);
  EXPECT_EQ(shared_stream_doorbell(*second), 1u);
  EXPECT_TRUE(shared_stream_awaits(*second, 0));
  EXPECT_FALSE(shared_stream_awaits(*second, 2));
  EXPECT_NE(second->mailbox(1).word.load(), before);
  second->mailbox(1).cancel_sleep();
}

// The mapping is inherited here; objects are made after the fork, as each process makes its own.
TEST(SharedStreamsOfProcesses, RingsCarryBytesBetweenProcesses) {
  TestRegion memory(shape_of(2), true);
  const pid_t child =
      in_child([&] { return exchange_bytes(*memory.open(1), 0, 8'000'000, 6000, 4); });
  EXPECT_TRUE(exchange_bytes(*memory.open(0), 1, 8'000'000, 6000, 3));
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(SharedStreamsOfProcesses, ForkedChildDoesNotDisturbItsParentsStreams) {
  TestRegion memory(shape_of(2), true);
  auto region = memory.open(0);
  auto peer = memory.open(1);
  auto stream = open_shared_stream(*region, 1);
  auto back = open_shared_stream(*peer, 0);
  const pid_t child = in_child([&] {
    const std::array<ConstBytes, 1> out{as_bytes("from the child")};
    const bool refused = stream->write(out).status().code() == Code::aborted &&
                         region->claim(1).status().code() == Code::aborted;
    stream.reset();  // would tell the peer that the parent has gone
    return refused;
  });
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  std::array<std::byte, 8> some{};
  const std::array<MutableBytes, 1> in{some};
  EXPECT_EQ(back->read(in).value(), 0u);
  const std::array<ConstBytes, 1> out{as_bytes("still me")};
  EXPECT_EQ(stream->write(out).value(), 8u);
  EXPECT_EQ(back->read(in).value(), 8u);
}

}  // namespace
}  // namespace muster::transport

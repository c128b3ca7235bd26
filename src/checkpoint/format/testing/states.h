// SPDX-License-Identifier: BSD-3-Clause
/// States as ranks divide them: plain, DDP, ZeRO, FSDP and a mesh of two dimensions, filled with
/// values that say which element they are.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/format/files/safetensors.h"
#include "checkpoint/format/load.h"
#include "checkpoint/format/save.h"
#include "core/base/process/temporary_folder.h"

namespace muster::shards::testing {

enum class Way { plain, ddp, zero, fsdp, mesh };
inline constexpr std::array<Way, 5> kWays{Way::plain, Way::ddp, Way::zero, Way::fsdp, Way::mesh};
inline constexpr std::array<int, 6> kRanks{1, 2, 3, 4, 6, 8};

struct TestTensor {
  std::string name, dtype;
  Extent sizes;
};

/// The tensors of a small model and its optimizer: sizes that no rank count divides, a scalar, an
/// empty tensor, a convolution's weight.
inline const std::vector<TestTensor>& tensors() {
  static const std::vector<TestTensor> all{
      {"model.embedding", "BF16", {17, 6}},
      {"model.conv.weight", "F32", {5, 3, 2, 2}},
      {"model.norm.bias", "F32", {7}},
      {"model.mask", "BOOL", {3, 5}},
      {"model.steps", "I64", {}},
      {"model.none", "F32", {0, 4}},
      {"optimizer.state.embedding.exp_avg", "F64", {17, 6}},
      {"optimizer.state.conv.weight.exp_avg", "C64", {5, 3, 2, 2}}};
  return all;
}

/// The byte at `byte` of element `element` of a tensor.
inline std::byte value_of(const std::string& name, std::int64_t element, std::int64_t byte) {
  std::uint64_t x = std::hash<std::string>()(name) + static_cast<std::uint64_t>(element) * 31 +
                    static_cast<std::uint64_t>(byte);
  x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
  return static_cast<std::byte>(x >> 56);
}

inline std::vector<Box> boxes_of(Way way, int rank, int ranks, std::size_t number,
                                 std::int64_t& flat_at) {
  const Extent& sizes = tensors()[number].sizes;
  const std::int64_t elements = *element_count(sizes);
  switch (way) {
    case Way::plain: return rank == 0 ? std::vector{box_of(sizes)} : std::vector<Box>{};
    case Way::ddp: return {box_of(sizes)};
    case Way::zero:
      return static_cast<int>(number) % ranks == rank ? std::vector{box_of(sizes)}
                                                      : std::vector<Box>{};
    case Way::fsdp: {  // all tensors behind each other, cut into equal shards
      std::int64_t all = 0;
      for (const auto& each : tensors()) all += *element_count(each.sizes);
      const std::int64_t shard = (all + ranks - 1) / ranks;
      const std::int64_t begin = std::max(rank * shard, flat_at);
      const std::int64_t end = std::min((rank + 1) * shard, flat_at + elements);
      flat_at += elements;
      return boxes_of_stretch(sizes, begin - flat_at + elements, end - begin);
    }
    case Way::mesh: {  // rows over one dimension, columns over the other; copies of what has fewer
      const int columns = ranks % 2 == 0 ? 2 : 1, rows = ranks / columns;
      if (elements == 0) return {box_of(sizes)};
      Box box = box_of(sizes);
      const int at[2] = {rank / columns, rank % columns}, parts[2] = {rows, columns};
      for (std::size_t d = 0; d < std::min<std::size_t>(2, sizes.size()); ++d) {
        const std::int64_t each = (sizes[d] + parts[d] - 1) / parts[d];
        const std::int64_t begin = std::min(sizes[d], at[d] * each);
        box.offsets[d] = begin;
        box.sizes[d] = std::min(sizes[d], begin + each) - begin;
        if (box.sizes[d] == 0) return {};
      }
      return {box};
    }
  }
  return {};
}

/// One rank's shards of the tensors, and their memory.
struct RankState {
  std::vector<Shard> shards;
  std::vector<std::vector<std::byte>> memory;

  RankState(Way way, int rank, int ranks) {
    std::int64_t flat_at = 0;
    for (std::size_t i = 0; i < tensors().size(); ++i) {
      const auto& [name, dtype, sizes] = tensors()[i];
      shards.push_back({name, dtype, sizes, boxes_of(way, rank, ranks, i, flat_at)});
      memory.emplace_back(
          static_cast<std::size_t>(shards.back().elements() * element_bytes(dtype)));
    }
  }

  /// Calls visit(tensor, its element, bytes of that element) for all.
  template <class Visit>
  void for_each_element(Visit visit) {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto width = element_bytes(shards[i].dtype);
      std::byte* base = memory[i].data();
      for (const Box& box : shards[i].boxes) {
        for_each_run(box, box_of(shards[i].sizes), box,
                     [&](std::int64_t from, std::int64_t to, std::int64_t elements) {
                       for (std::int64_t e = 0; e < elements; ++e)
                         visit(shards[i].name, from + e,
                               std::span(base + (to + e) * width, static_cast<std::size_t>(width)));
                     });
        base += box.elements() * width;
      }
    }
  }
  void fill() {
    for_each_element([](const std::string& name, std::int64_t element, std::span<std::byte> bytes) {
      for (std::size_t b = 0; b < bytes.size(); ++b)
        bytes[b] = value_of(name, element, static_cast<std::int64_t>(b));
    });
  }
  /// How many elements hold something else.
  int wrong() {
    int count = 0;
    for_each_element(
        [&](const std::string& name, std::int64_t element, std::span<std::byte> bytes) {
          for (std::size_t b = 0; b < bytes.size(); ++b)
            if (bytes[b] != value_of(name, element, static_cast<std::int64_t>(b))) {
              ++count;
              return;
            }
        });
    return count;
  }
  std::vector<const std::byte*> data() const {
    std::vector<const std::byte*> all;
    for (const auto& each : memory) all.push_back(each.data());
    return all;
  }
};

/// Texts among threads.
class ThreadExchange {
 public:
  explicit ThreadExchange(int ranks) : ranks_(ranks), texts_(static_cast<std::size_t>(ranks)) {}

  SavingRanks of(int rank) {
    return {rank, ranks_,
            [this, rank](const std::string& mine, ExchangeLimit) { return exchange(rank, mine); }};
  }

 private:
  Result<std::vector<std::string>> exchange(int rank, const std::string& mine) {
    std::unique_lock lock(mutex_);
    texts_[static_cast<std::size_t>(rank)] = mine;
    const int round = round_;
    if (++arrived_ == ranks_) {
      arrived_ = 0;
      last_ = texts_;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    return last_;
  }

  const int ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_, last_;
  int arrived_ = 0, round_ = 0;
};

/// `body(ranks)` on as many threads.
template <class Body>
void on_threads(int count, Body body) {
  ThreadExchange exchange(count);
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int rank = 0; rank < count; ++rank)
    threads.emplace_back([&exchange, &body, rank] { body(exchange.of(rank)); });
  for (auto& thread : threads) thread.join();
}

inline void save_as(Way way, int count, const CommitOptions& options) {
  on_threads(count, [&](const SavingRanks& ranks) {
    RankState state(way, ranks.rank, ranks.size);
    state.fill();
    const Status saved = save(state.shards, state.data(), "{}", options, ranks);
    EXPECT_TRUE(saved.ok()) << saved.message();
  });
}

/// Elements that are not what was saved, over all ranks.
inline int wrong_when_loaded(const Index& index, Way way, int count) {
  int wrong = 0;
  for (int rank = 0; rank < count; ++rank) {
    RankState state(way, rank, count);
    Reader reader(index);
    for (std::size_t i = 0; i < state.shards.size(); ++i) {
      const Status read = reader.read(state.shards[i], state.memory[i]);
      EXPECT_TRUE(read.ok()) << read.message();
    }
    wrong += state.wrong();
  }
  return wrong;
}

/// One rank that writes one tensor.
inline Status save_bytes(const std::vector<std::byte>& bytes, const CommitOptions& options) {
  const Extent sizes{static_cast<std::int64_t>(bytes.size())};
  return save({{"t", "U8", sizes, {box_of(sizes)}}}, {bytes.data()}, "{}", options, {});
}
inline Status save_small(const std::string& path, int keep_last = 0) {
  return save_bytes(std::vector<std::byte>(8),
                    {.path = path, .step = {}, .keep_last = keep_last, .durable = false});
}

inline bool is_whole(const std::string& path) {
  const auto index = open_index(path);
  return index.ok() && verify(*index).empty();
}

}  // namespace muster::shards::testing

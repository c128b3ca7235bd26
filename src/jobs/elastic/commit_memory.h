// SPDX-License-Identifier: BSD-3-Clause
/// One commit of one rank in a memory file, which outlives the process that wrote it as long as
/// another one, the launcher, has a descriptor of it.
///
/// The label is the commit's last word: it is taken away before anything is written and comes back
/// when all is there, so what a killed process leaves behind is a whole commit or none.
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::elastic {

/// Later epochs come after earlier ones: a commit that is made again has the same number.
struct CommitId {
  std::int64_t epoch = 0;
  std::int64_t number = 0;
  auto operator<=>(const CommitId&) const = default;  // NOLINT(modernize-use-nullptr): it has none
};

/// `CommitLabel::world_size` of a commit without parts, of a State that all ranks have alike.
inline constexpr std::int32_t kWholeCommit = 0;

struct CommitLabel {
  CommitId id;
  std::int32_t rank = 0;  ///< whose part of the commit this is
  std::int32_t world_size = 1;
  std::uint64_t description_bytes = 0;
  std::uint64_t data_bytes = 0;
};

/// Not thread-safe; one process at a time.
class CommitMemory {
 public:
  /// Empty.
  static Result<CommitMemory> make();
  /// Maps a file that another process made with `make`. Code::refused for any other file.
  static Result<CommitMemory> open(Descriptor file);
  CommitMemory(CommitMemory&& other) noexcept;
  CommitMemory& operator=(CommitMemory&&) = delete;
  ~CommitMemory();

  int descriptor() const { return file_.get(); }

  /// From now on it holds nothing, and has room for that. Code::exhausted: there is no such memory.
  Status begin(const CommitLabel& label);
  MutableBytes description() { return {at(kFront), label_.description_bytes}; }
  MutableBytes data() { return {at(data_at(label_)), label_.data_bytes}; }
  /// All has been written.
  void finish();
  /// All ranks have finished this commit, so it is one that was made.
  void set_agreed();
  /// It holds nothing from now on.
  void clear();

  /// The label of the commit that it holds, if it holds one.
  std::optional<CommitLabel> label() const;
  bool is_agreed() const;
  ConstBytes held_description() const { return {at(kFront), label()->description_bytes}; }
  ConstBytes held_data() const { return {at(data_at(*label())), label()->data_bytes}; }

 private:
  struct Front;
  static constexpr std::size_t kFront = 4096;

  CommitMemory(Descriptor file, std::byte* memory, std::size_t bytes)
      : file_(std::move(file)), memory_(memory), bytes_(bytes) {}
  static std::size_t data_at(const CommitLabel& label);
  std::byte* at(std::size_t offset) const { return memory_ + offset; }
  Front& front() const;
  Status grow(std::size_t bytes);

  Descriptor file_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
  CommitLabel label_;  // of the commit that is being written
};

}  // namespace muster::elastic

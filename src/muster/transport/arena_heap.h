/// Which bytes of an arena are taken: pure bookkeeping over offsets, kept outside the memory that it describes (peers can write there).
///
/// Small blocks (up to 32 KiB) come in classes of size, cut from spans; larger ones are whole pages, best fit, neighbours joined when
/// freed. Freed large blocks keep their pages for the next user up to a limit; past it the largest are named for
/// punching. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace muster::transport {

class ArenaHeap {
 public:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kSmall = 32 * 1024;

  struct Range {
    std::uint64_t offset;
    std::size_t bytes;
  };

  /// `limit`: bytes of the arena. `keep`: how many bytes of freed memory may hold pages.
  ArenaHeap(std::size_t limit, std::size_t keep) : limit_(limit), keep_(keep) {}

  /// Nothing when no room is left.
  std::optional<std::uint64_t> allocate(std::size_t bytes);
  /// False where no block begins at `offset`. Appends what should be given back to the system; it must be before the next allocate.
  bool free(std::uint64_t offset, std::vector<Range>& punch);
  std::size_t bytes_in_use() const { return in_use_; }
  std::size_t bytes_kept() const { return dirty_; }

 private:
  struct FreeBlock {
    std::size_t bytes;
    std::size_t dirty;  // at most so many bytes of it have pages
  };
  using FreeMap = std::map<std::uint64_t, FreeBlock>;

  std::optional<std::uint64_t> allocate_small(std::size_t bytes);
  std::optional<std::uint64_t> allocate_pages(std::size_t bytes);
  void free_pages(std::uint64_t offset, std::size_t bytes);
  void insert_free(std::uint64_t offset, FreeBlock block);
  FreeMap::iterator erase_free(FreeMap::iterator at);
  void pick_for_punching(std::vector<Range>& punch);

  std::size_t limit_;
  std::size_t keep_;
  std::uint64_t end_ = 0;  // what lies above was never used
  std::size_t in_use_ = 0;
  std::size_t dirty_ = 0;
  std::unordered_map<std::uint64_t, std::size_t> large_;  // in use: offset to bytes
  FreeMap free_;
  std::set<std::pair<std::size_t, std::uint64_t>> by_size_;
  std::vector<std::uint8_t> page_class_;  // of each page: 0, or 1 + the class of the span that it belongs to
  std::vector<std::vector<std::uint64_t>> small_free_;
};

}  // namespace muster::transport

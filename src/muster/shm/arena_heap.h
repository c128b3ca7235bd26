/// Which bytes of an arena are taken: pure bookkeeping over offsets, kept outside the memory that
/// it describes (peers can write there).
///
/// Small blocks (up to 8 KiB) come in classes of size, cut from spans; larger ones are whole pages.
/// Free pages are either warm (the system has given memory for them, which the next user gets as it
/// is) or cold (it has not, or got it back); neighbours of one kind are joined. The best fit among
/// the warm is taken first, then the best fit among the cold. Freed blocks of up to 1 MiB wait in
/// lists by size at first, since the next request is often the same. Of what is warm beyond a limit
/// the ends of the largest blocks are named for punching. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace muster::shm {

/// Free stretches of an arena, all of one kind, joined where they touch.
class FreePages {
 public:
  struct Range {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };
  std::size_t bytes() const { return bytes_; }
  bool empty() const { return at_.empty(); }
  void insert(Range range);
  /// Cuts `bytes` off the start of the smallest stretch that has as many.
  std::optional<std::uint64_t> take(std::size_t bytes);
  /// Cuts up to `bytes` off the end of the largest.
  Range take_end_of_largest(std::size_t bytes);
  /// The stretch that ends at `end`, taken out.
  std::optional<Range> take_before(std::uint64_t end);

 private:
  using Map = std::map<std::uint64_t, std::size_t>;
  Map::iterator add(Range range);
  Map::iterator remove(Map::iterator at);
  Map at_;
  std::set<std::pair<std::size_t, std::uint64_t>> by_size_;
  std::size_t bytes_ = 0;
};

class ArenaHeap {
 public:
  static constexpr std::size_t kAlignment = 64;    // limit: a cache line
  static constexpr std::size_t kPage = 4096;       // limit: of memory
  static constexpr std::size_t kSmall = 8 * 1024;  // limit: two pages
  using Range = FreePages::Range;

  /// A block that is taken. Where `cold` has bytes, the caller gets memory for those pages and says
  /// `warmed` or `refused` before anything else happens to the block.
  struct Taken {
    std::uint64_t offset = 0;
    Range cold;
  };

  /// `space`: bytes of the arena. `limit`: how many of them may have memory at one time. `keep`:
  /// how many of those may be free.
  ArenaHeap(std::size_t space, std::size_t limit, std::size_t keep)
      : space_(space), limit_(limit), keep_(keep) {}

  /// Nothing when no room is left. There may be some once everything that is kept has been punched.
  std::optional<Taken> allocate(std::size_t bytes);
  void warmed(const Taken& block);
  void refused(const Taken& block);
  /// False where no block begins at `offset`. Appends what should be given back to the system; it
  /// is nobody's until it is `punched`.
  bool free(std::uint64_t offset, std::vector<Range>& punch);
  /// Of the block in use that begins at `offset`; 0 where none does.
  std::size_t bytes_at(std::uint64_t offset) const;
  /// The block in use of whole pages that `offset` lies in; no bytes where it lies in none.
  Range pages_around(std::uint64_t offset) const;
  /// Appends all that is kept.
  void trim(std::vector<Range>& punch) { shrink_to(0, punch); }
  void punched(const Range& range);

  /// Of what is allocated from now on.
  void set_limits(std::size_t limit, std::size_t keep);
  std::size_t limit() const { return limit_; }
  std::uint64_t end() const { return end_; }  ///< what lies above is free
  std::size_t bytes_in_use() const { return in_use_; }
  std::size_t bytes_kept() const { return warm_.bytes() + quick_bytes_; }

 private:
  struct Pages {
    std::uint64_t offset;
    bool cold;
  };
  std::optional<Taken> allocate_small(std::size_t bytes);
  std::optional<Pages> take_pages(std::size_t bytes);
  std::optional<Pages> take_cold(std::size_t bytes);
  void list_rest_of_span(std::uint64_t span, std::uint64_t taken);
  void flush_quick();
  void shrink_to(std::size_t bytes, std::vector<Range>& punch);
  void add_cold(const Range& range);
  std::uint32_t& page(std::uint64_t offset);

  std::size_t space_;
  std::size_t limit_;
  std::size_t keep_;
  std::uint64_t end_ = 0;  // what lies above is cold
  std::size_t in_use_ = 0;
  std::size_t in_spans_ = 0;  // pages of spans, warm for ever
  std::size_t in_blocks_ = 0;
  std::size_t punching_ = 0;  // named for punching, not punched yet
  FreePages warm_;
  FreePages cold_;
  // Of each page: 0; the number of pages of the block in use that begins there; or kSpanPage + the
  // class of the span that it belongs to.
  std::vector<std::uint32_t> pages_;
  std::vector<std::vector<std::uint64_t>> small_free_;  // by class
  std::vector<std::vector<std::uint64_t>> quick_;       // freed blocks by number of pages
  std::size_t quick_bytes_ = 0;
};

}  // namespace muster::shm

// SPDX-License-Identifier: BSD-3-Clause
/// Byte streams between the ranks of one communicator of the stand-in, in memory that processes of
/// this host share: one mailbox of 16 KiB for each ordered pair. Simple rather than fast.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace muster::standin {

/// Bytes to send to or to receive from one rank.
struct NcclTransfer {
  int peer;
  bool sends;
  std::byte* data;
  std::size_t bytes;
  bool is_message = false;  // whose other end must have the same size
};

class Mailboxes {
 public:
  /// Every rank opens the same name; the first makes it, and the file is gone once all have.
  /// `device`: the number of the rank's.
  Mailboxes(const std::string& name, int ranks, int rank, int device);
  ~Mailboxes();
  Mailboxes(const Mailboxes&) = delete;

  /// Whether some ranks have opened those of that name, and others have not.
  static bool is_begun(const std::string& name);
  /// Whether every rank has opened it.
  bool all_here() const;
  /// Whether two of those that have opened it are on one device.
  bool share_a_device() const;
  /// Carries out the transfers, all at once; those with one peer in one direction in order. A send
  /// ends when its peer has received it. Ends early if `aborted()` holds, which is polled; false
  /// then.
  bool exchange(std::vector<NcclTransfer> transfers, const std::function<bool()>& aborted);
  /// This rank uses them no more.
  void leave();
  /// Whether every other rank that has opened them has left or died.
  bool have_others_left() const;
  /// Whether the process of a rank has died that had not left. Looks now and then.
  bool has_lost_a_member();
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

 private:
  struct Box;
  struct Header;
  struct Member;
  Member& member(int rank) const;
  Box& box(int from, int to) const;

  const std::string name_;
  const int ranks_, rank_;
  std::size_t size_;
  void* memory_;
  std::atomic<unsigned> looks_{0};
};

}  // namespace muster::standin

// SPDX-License-Identifier: BSD-3-Clause
#include "mailboxes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "kernels.h"

namespace muster::standin {

struct Mailboxes::Header {
  std::atomic<int> here;
};
struct Mailboxes::Member {
  std::atomic<int> process;  // 0: not here yet
  std::atomic<int> left;
  std::atomic<int> device;  // there once `process` is
};
struct Mailboxes::Box {
  static constexpr std::size_t kBytes = 16384;
  std::atomic<std::uint64_t> written, read;  // chunks
  std::uint32_t bytes;                       // of the chunk that is there
  std::uint64_t left;                        // bytes of its transfer, with those of the chunk
  std::byte data[kBytes];
};

namespace {

constexpr std::size_t kHeaderBytes = 64, kMemberBytes = 64;

/// False for one that has ended and that nobody has waited for yet, too.
bool is_alive(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  const auto name_end = text.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= text.size() || text[name_end + 2] != 'Z';
}

}  // namespace

// New memory is zero, which is how all counts begin.
Mailboxes::Mailboxes(const std::string& name, int ranks, int rank, int device)
    : name_(name), ranks_(ranks), rank_(rank) {
  const auto count = static_cast<std::size_t>(ranks);
  size_ = kHeaderBytes + count * kMemberBytes + count * count * sizeof(Box);
  const int file = ::shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(size_)) != 0)
    throw std::runtime_error("no shared memory " + name);
  memory_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory_ == MAP_FAILED) throw std::runtime_error("no mapping of " + name);
  member(rank).device = device;
  member(rank).process = ::getpid();
  if (static_cast<Header*>(memory_)->here.fetch_add(1) + 1 == ranks) ::shm_unlink(name.c_str());
}

Mailboxes::~Mailboxes() {
  if (!all_here()) ::shm_unlink(name_.c_str());
  ::munmap(memory_, size_);
}

bool Mailboxes::is_begun(const std::string& name) {
  const int file = ::shm_open(name.c_str(), O_RDONLY, 0);
  if (file < 0) return false;
  ::close(file);
  return true;
}

bool Mailboxes::all_here() const { return static_cast<Header*>(memory_)->here.load() >= ranks_; }

bool Mailboxes::share_a_device() const {
  std::set<int> devices;
  for (int rank = 0; rank < ranks_; ++rank)
    if (member(rank).process != 0 && !devices.insert(member(rank).device).second) return true;
  return false;
}

Mailboxes::Member& Mailboxes::member(int rank) const {
  auto* const members = static_cast<std::byte*>(memory_) + kHeaderBytes;
  return *reinterpret_cast<Member*>(members + static_cast<std::size_t>(rank) * kMemberBytes);
}

void Mailboxes::leave() { member(rank_).left = 1; }

bool Mailboxes::have_others_left() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto& other = member(rank);
    if (rank != rank_ && other.process != 0 && other.left == 0 && is_alive(other.process))
      return false;
  }
  return true;
}

bool Mailboxes::has_lost_a_member() {
  constexpr unsigned kLook = 64;
  if (looks_.fetch_add(1) % kLook != 0) return false;
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto& other = member(rank);
    if (other.process != 0 && other.left == 0 && !is_alive(other.process)) return true;
  }
  return false;
}

Mailboxes::Box& Mailboxes::box(int from, int to) const {
  auto* const boxes = reinterpret_cast<Box*>(static_cast<std::byte*>(memory_) + kHeaderBytes +
                                             static_cast<std::size_t>(ranks_) * kMemberBytes);
  return boxes[from * ranks_ + to];
}

bool Mailboxes::exchange(std::vector<NcclTransfer> transfers,
                         const std::function<bool()>& aborted) {
  const auto box_of = [&](const NcclTransfer& transfer) -> Box& {
    return transfer.sends ? this->box(rank_, transfer.peer) : this->box(transfer.peer, rank_);
  };
  const auto is_done = [&](const NcclTransfer& transfer) {
    const Box& box = box_of(transfer);
    return transfer.bytes == 0 && (!transfer.sends || box.written.load(std::memory_order_relaxed) ==
                                                          box.read.load(std::memory_order_acquire));
  };
  // One step of a transfer; whether it moved anything.
  const auto step = [&](NcclTransfer& transfer) {
    Box& box = box_of(transfer);
    const bool full =
        box.written.load(std::memory_order_acquire) != box.read.load(std::memory_order_acquire);
    if (full == transfer.sends) return false;
    std::size_t moved = std::min(transfer.bytes, Box::kBytes);
    if (transfer.sends) {
      std::memcpy(box.data, transfer.data, moved);
      box.bytes = static_cast<std::uint32_t>(moved);
      box.left = transfer.bytes;
      box.written.fetch_add(1, std::memory_order_release);
    } else {
      if (transfer.is_message && box.left != transfer.bytes)
        note_violation("a message is received that has another size");
      moved = std::min<std::size_t>(moved, box.bytes);
      std::memcpy(transfer.data, box.data, moved);
      box.read.fetch_add(1, std::memory_order_release);
    }
    transfer.data += moved;
    transfer.bytes -= moved;
    return true;
  };
  for (int idle = 0;;) {
    std::erase_if(transfers, is_done);
    if (transfers.empty()) return true;
    if (aborted()) return false;
    bool moved = false;
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      const bool is_first = std::none_of(
          transfers.begin(), transfers.begin() + static_cast<std::ptrdiff_t>(i),
          [&](const auto& t) {
            return t.peer == transfers[i].peer && t.sends == transfers[i].sends && t.bytes > 0;
          });
      if (is_first && transfers[i].bytes > 0) moved = step(transfers[i]) || moved;
    }
    if (moved) {
      idle = 0;
    } else if (++idle < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

}  // namespace muster::standin

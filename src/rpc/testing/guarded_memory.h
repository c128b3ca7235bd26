// SPDX-License-Identifier: BSD-3-Clause
/// Memory for tensors in which a kernel that reads or returns what it was not given shows: an
/// access outside ends the process (SIGSEGV), and memory that nothing has written to holds a
/// pattern of the test's choice.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <unordered_map>

namespace muster::rpc::testing {

/// While it lives, torch's CPU tensors have pages of their own between two that cannot be accessed.
/// For one thread.
class GuardedMemory final : public c10::Allocator {
 public:
  GuardedMemory() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~GuardedMemory() override { c10::SetCPUAllocator(before_, kPriority); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  /// Tensors from now on: what fresh memory holds, and whether it ends or begins at a guard.
  void set(unsigned char pattern, bool at_end) {
    pattern_ = pattern;
    at_end_ = at_end;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &nothing, at::kCPU};
    TORCH_CHECK(bytes <= kMost, "no memory for so many bytes");
    const std::size_t inside = (bytes + page() - 1) / page() * page();
    void* const all = ::mmap(nullptr, inside + 2 * page(), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(all != MAP_FAILED, "no address space");
    char* const first = static_cast<char*>(all) + page();
    TORCH_CHECK(::mprotect(first, inside, PROT_READ | PROT_WRITE) == 0, "no pages");
    std::memset(first, pattern_, inside);
    const std::size_t wide = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    char* const data = at_end_ ? first + inside - wide : first;
    mapped()[data] = {all, inside + 2 * page()};
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Pages {
    void* all;
    std::size_t bytes;
  };
  static constexpr std::uint8_t kPriority = 100;
  static constexpr std::size_t kAlignment = 64;                // of torch's CPU memory
  static constexpr std::size_t kMost = std::size_t{16} << 20;  // limit: a size by mistake
  static std::size_t page() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }
  static void nothing(void*) {}
  static std::unordered_map<void*, Pages>& mapped() {
    static auto& all = *new std::unordered_map<void*, Pages>;
    return all;
  }
  static void release(void* data) {
    const auto node = mapped().extract(data);
    if (node.empty()) return;  // of no bytes
    ::munmap(node.mapped().all, node.mapped().bytes);
  }

  c10::Allocator* const before_;
  unsigned char pattern_ = 0;
  bool at_end_ = true;
};

}  // namespace muster::rpc::testing

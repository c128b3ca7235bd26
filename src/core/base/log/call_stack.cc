// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/call_stack.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "core/base/descriptor.h"

namespace muster {
namespace {

constexpr std::size_t kLongestName = 240;  // limit: what a person reads

/// The symbol table of a file on disk, which names functions that the loader does not know of:
/// hidden ones, and those of a program.
class SymbolFile {
 public:
  explicit SymbolFile(const char* path) {
    const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
    struct stat facts {};
    if (!file || ::fstat(file.get(), &facts) != 0 || facts.st_size <= 0) return;
    const auto size = static_cast<std::size_t>(facts.st_size);
    void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (memory == MAP_FAILED) return;
    bytes_ = {static_cast<const std::byte*>(memory), size};
    find_symbols();
  }
  ~SymbolFile() {
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  SymbolFile(const SymbolFile&) = delete;
  SymbolFile& operator=(const SymbolFile&) = delete;

  /// The function at an address, given as `loaded_at` plus an offset, or as itself in a program
  /// that is not relocated.
  std::optional<std::string_view> function_at(std::uint64_t address,
                                              std::uint64_t loaded_at) const {
    const std::uint64_t value = relocated_ ? address - loaded_at : address;
    for (const auto& symbol : symbols_) {
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || value < symbol.st_value ||
          value - symbol.st_value >= symbol.st_size || symbol.st_name >= names_.size())
        continue;
      const char* name = names_.data() + symbol.st_name;
      return std::string_view(name, ::strnlen(name, names_.size() - symbol.st_name));
    }
    return std::nullopt;
  }

 private:
  /// Empty where the file is shorter than it says.
  template <class T>
  std::span<const T> at(std::uint64_t offset, std::uint64_t bytes) const {
    if (offset > bytes_.size() || bytes > bytes_.size() - offset || offset % alignof(T) != 0)
      return {};
    return {reinterpret_cast<const T*>(bytes_.data() + offset), bytes / sizeof(T)};
  }

  void find_symbols() {
    const auto head = at<Elf64_Ehdr>(0, sizeof(Elf64_Ehdr));
    if (head.empty() || std::memcmp(head[0].e_ident, ELFMAG, SELFMAG) != 0 ||
        head[0].e_ident[EI_CLASS] != ELFCLASS64)
      return;
    relocated_ = head[0].e_type == ET_DYN;
    const auto sections =
        at<Elf64_Shdr>(head[0].e_shoff, std::uint64_t{head[0].e_shnum} * sizeof(Elf64_Shdr));
    for (const auto& section : sections) {
      if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
      const auto& strings = sections[section.sh_link];
      symbols_ = at<Elf64_Sym>(section.sh_offset, section.sh_size);
      names_ = at<char>(strings.sh_offset, strings.sh_size);
    }
  }

  std::span<const std::byte> bytes_;
  std::span<const Elf64_Sym> symbols_;
  std::span<const char> names_;
  bool relocated_ = true;
};

std::string demangled(std::string_view name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(std::string(name).c_str(), nullptr, nullptr, &status), std::free);
  std::string out = status == 0 && text != nullptr ? text.get() : std::string(name);
  if (out.size() > kLongestName) out = out.substr(0, kLongestName) + "...";
  return out;
}

/// The loader's name for an address: it knows only the functions that the file exports.
std::optional<std::string_view> exported_at(std::uint64_t address, const Dl_info& place,
                                            const ElfW(Sym) * symbol) {
  if (place.dli_sname == nullptr || symbol == nullptr) return std::nullopt;
  const auto begin = reinterpret_cast<std::uint64_t>(place.dli_saddr);
  if (address < begin || address - begin >= symbol->st_size) return std::nullopt;
  return place.dli_sname;
}

}  // namespace

[[gnu::noinline]] CallStack CallStack::here(int skip) {
  CallStack stack;
  stack.end_ = ::backtrace(stack.frames_.data(), kDeepest);
  // A sanitizer's backtrace has a frame of its own before this function's.
  const auto end = stack.frames_.begin() + stack.end_;
  const auto caller = std::find(stack.frames_.begin(), end, __builtin_return_address(0));
  const int own = caller == end ? 1 : static_cast<int>(caller - stack.frames_.begin());
  stack.first_ = std::min(own + skip, stack.end_);
  return stack;
}

std::string CallStack::text() const {
  std::map<std::string, SymbolFile> files;
  std::string out;
  for (int i = first_; i < end_; ++i) {
    // The instruction after the call may be the first of another function.
    const auto address = reinterpret_cast<std::uint64_t>(frames_[static_cast<std::size_t>(i)]) - 1;
    Dl_info place{};
    void* extra = nullptr;
    const bool known =
        ::dladdr1(reinterpret_cast<const void*>(address), &place, &extra, RTLD_DL_SYMENT) != 0;
    out += "  #" + std::to_string(i - first_) + " ";
    char text[32];
    if (!known || place.dli_fname == nullptr) {
      std::snprintf(text, sizeof text, "0x%llx\n", static_cast<unsigned long long>(address));
      out += text;
      continue;
    }
    const std::string file = place.dli_fname;
    const auto base = reinterpret_cast<std::uint64_t>(place.dli_fbase);
    auto name = exported_at(address, place, static_cast<const ElfW(Sym)*>(extra));
    if (!name) {
      auto at = files.find(file);
      // The program's own name may be relative to a folder that it has left.
      if (at == files.end())
        at = files.try_emplace(file, file.find('/') == 0 ? file.c_str() : "/proc/self/exe").first;
      name = at->second.function_at(address, base);
    }
    if (name) out += demangled(*name) + " ";
    std::snprintf(text, sizeof text, "+0x%llx)\n", static_cast<unsigned long long>(address - base));
    out += "(" + file.substr(file.rfind('/') + 1) + text;
  }
  return out;
}

}  // namespace muster

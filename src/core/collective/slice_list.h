// SPDX-License-Identifier: BSD-3-Clause
/// The slices of one side of a call. A list stores two slices inline; memory for more is recycled
/// per thread, so repeated calls do not allocate.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <ranges>
#include <type_traits>

namespace muster::collective {

namespace slice_list_detail {
/// Allocates at least `bytes` and sets `bytes` to the actual size.
void* acquire_memory(std::size_t& bytes);
void release_memory(void* memory, std::size_t bytes) noexcept;
}  // namespace slice_list_detail

/// `T` is a span of bytes. Not thread-safe; may be destroyed on another thread.
template <class T>
class SliceList {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  template <class Range>
  static constexpr bool kIsOther =
      std::ranges::input_range<Range> && !std::same_as<std::remove_cvref_t<Range>, SliceList> &&
      std::convertible_to<std::ranges::range_reference_t<const Range&>, T>;

 public:
  using value_type = T;

  SliceList() = default;
  SliceList(std::initializer_list<T> slices) { append(slices); }
  template <class Range>
  requires kIsOther<Range> SliceList(const Range& slices) { append(slices); }
  SliceList(const SliceList& other) { append(other); }
  SliceList(SliceList&& other) noexcept { move_from(other); }
  SliceList& operator=(const SliceList& other) {
    if (this == &other) return *this;
    clear();
    append(other);
    return *this;
  }
  SliceList& operator=(SliceList&& other) noexcept {
    if (this == &other) return *this;
    free();
    move_from(other);
    return *this;
  }
  ~SliceList() { free(); }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() { return slices_; }
  T* end() { return slices_ + size_; }
  const T* begin() const { return slices_; }
  const T* end() const { return slices_ + size_; }
  T& operator[](std::size_t index) { return slices_[index]; }
  const T& operator[](std::size_t index) const { return slices_[index]; }
  T& front() { return *slices_; }
  const T& front() const { return *slices_; }

  void push_back(const T& slice) {
    if (size_ == capacity_) [[unlikely]] {
      const T kept = slice;  // it may be in the list
      grow();
      slices_[size_++] = kept;
      return;
    }
    slices_[size_++] = slice;
  }
  template <class... Arguments>
  void emplace_back(Arguments&&... arguments) {
    push_back(T(static_cast<Arguments&&>(arguments)...));
  }
  void clear() { size_ = 0; }

 private:
  static constexpr std::size_t kInside = 2;

  T* inside() { return reinterpret_cast<T*>(inside_); }
  template <class Range>
  void append(const Range& slices) {
    for (const T slice : slices) push_back(slice);
  }
  [[gnu::noinline]] void grow() {
    std::size_t bytes = 2 * capacity_ * sizeof(T);
    auto* const larger = static_cast<T*>(slice_list_detail::acquire_memory(bytes));
    std::copy_n(slices_, size_, larger);
    free();
    slices_ = larger;
    capacity_ = bytes / sizeof(T);
  }
  void free() noexcept {
    if (capacity_ > kInside) [[unlikely]]
      slice_list_detail::release_memory(slices_, capacity_ * sizeof(T));
  }
  void move_from(SliceList& other) noexcept {
    size_ = other.size_;
    capacity_ = other.capacity_;
    slices_ =
        capacity_ > kInside ? other.slices_ : std::copy_n(other.slices_, size_, inside()) - size_;
    other.slices_ = other.inside();
    other.size_ = 0;
    other.capacity_ = kInside;
  }

  alignas(T) std::byte inside_[kInside * sizeof(T)];
  T* slices_ = inside();
  std::size_t size_ = 0;
  std::size_t capacity_ = kInside;
};

}  // namespace muster::collective

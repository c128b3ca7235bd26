// SPDX-License-Identifier: BSD-3-Clause
/// A fake accelerator for tests, in host memory. Work enqueued on one of its streams runs only when
/// a thread waits for it, or once the stream's native handle was used to enqueue. Reading a result
/// without waiting for it or ordering after it yields the old bytes. Copies are enqueued.
/// Computations wait for their arguments, run on the CPU and are complete on return.
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/threads/thread_start.h"
#include "core/group/errors.h"

namespace muster::testing::deferred {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kDevices = 8;  // at most

/// How many there are; set it before `install`.
inline std::atomic<c10::DeviceIndex> device_count{kDevices};

/// As a GPU after an illegal memory access: no event can be asked about any more.
inline std::atomic<bool> is_broken{false};

/// The streams from which a graph is captured. As with CUDA, a stream that waits for an event of
/// one of them joins, and none of them may wait for other events. Enqueued tasks are carried
/// out, rather than recorded.
class Captures {
 public:
  static Captures& get() {
    static auto* const captures = new Captures;  // threads of streams live as long as the process
    return *captures;
  }
  void begin(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    streams_[stream.device_index()].insert(stream.id());
  }
  void end(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    streams_.erase(device);
  }
  bool has(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    const auto at = streams_.find(stream.device_index());
    return at != streams_.end() && at->second.contains(stream.id());
  }
  /// `stream` waits for an event, which was recorded on a captured stream or not.
  void wait(const c10::Stream& stream, bool of_captured) {
    TORCH_CHECK(of_captured || !has(stream),
                "dependency created on uncaptured work in another stream");
    if (of_captured) begin(stream);
  }

 private:
  std::mutex mutex_;  // guards streams_
  std::map<c10::DeviceIndex, std::set<c10::StreamId>> streams_;
};

/// The target of `c10::Stream::native_handle`, by which code that knows nothing of torch enqueues.
struct NativeStream {
  /// Enqueues a task. From now on a thread runs the stream, as a device would: the task may wait
  /// for other streams.
  void (*run)(NativeStream* stream, void (*task)(void*), void* argument);
  c10::DeviceIndex device;
  c10::StreamId id;
};

/// The tasks of all streams of all devices, and how many of each stream's are done.
class Timeline {
 public:
  static Timeline& get() {
    static auto* const timeline = new Timeline;  // threads of streams live as long as the process
    return *timeline;
  }
  std::size_t enqueue(const c10::Stream& stream, std::function<void()> task) {
    StreamLine& line = line_of(stream);
    const std::lock_guard lock(line.mutex);
    line.tasks.push_back(std::move(task));
    line.changed.notify_all();
    return line.tasks.size();
  }
  std::size_t length(const c10::Stream& stream) {
    StreamLine& line = line_of(stream);
    const std::lock_guard lock(line.mutex);
    return line.tasks.size();
  }
  /// Runs the tasks enqueued up to `end`.
  void drain(const c10::Stream& stream, std::size_t end) { drain(line_of(stream), end); }
  std::vector<c10::Stream> streams_of(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    std::vector<c10::Stream> streams;
    for (const auto& [place, line] : lines_)
      if (place.first == device)
        streams.emplace_back(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, device),
                             place.second);
    return streams;
  }
  bool is_done(const c10::Stream& stream, std::size_t end) {
    StreamLine& line = line_of(stream);
    const std::lock_guard lock(line.mutex);
    return line.done >= end;
  }
  /// Enqueues `task` and has a thread run this stream from now on.
  void run(const c10::Stream& stream, std::function<void()> task) {
    enqueue(stream, std::move(task));
    start(line_of(stream));
  }
  /// As `is_done`. If not, a thread runs this stream from now on: one who polls must see an end.
  bool query(const c10::Stream& stream, std::size_t end) {
    if (is_done(stream, end)) return true;
    start(line_of(stream));
    return false;
  }
  NativeStream* native(const c10::Stream& stream) { return &line_of(stream).native; }

 private:
  struct StreamLine {
    std::mutex mutex;  // guards the following; a task runs without it
    std::condition_variable changed;
    std::vector<std::function<void()>> tasks;
    std::size_t done = 0;
    bool is_running = false;  // a thread runs a task
    bool has_thread = false;
    NativeStream native;
  };
  static void start(StreamLine& line) {
    const std::lock_guard lock(line.mutex);
    if (std::exchange(line.has_thread, true)) return;
    auto thread = start_thread("the thread of a stream", [&line] {
      for (;;) {
        std::size_t end;
        {
          std::unique_lock wait(line.mutex);
          line.changed.wait(wait, [&] { return line.done < line.tasks.size(); });
          end = line.tasks.size();
        }
        drain(line, end);
      }
    });
    group::take(std::move(thread)).detach();
  }
  static void run_native(NativeStream* stream, void (*task)(void*), void* argument) {
    get().run(c10::Stream(c10::Stream::UNSAFE,
                          c10::Device(c10::DeviceType::PrivateUse1, stream->device), stream->id),
              [task, argument] { task(argument); });
  }
  /// A task may drain another stream, and wait there for what this one has done already.
  static void drain(StreamLine& line, std::size_t end) {
    std::unique_lock lock(line.mutex);
    while (line.done < end) {
      if (line.is_running) {
        line.changed.wait(lock);
        continue;
      }
      line.is_running = true;
      auto task = std::exchange(line.tasks[line.done], nullptr);
      lock.unlock();
      task();
      task = nullptr;  // what it holds may enqueue as it is freed
      lock.lock();
      ++line.done;
      line.is_running = false;
      line.changed.notify_all();
    }
  }
  StreamLine& line_of(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    auto& line = lines_[{stream.device_index(), stream.id()}];
    if (line == nullptr) {
      line = std::make_unique<StreamLine>();
      line->native = {&run_native, stream.device_index(), stream.id()};
    }
    return *line;
  }

  std::mutex mutex_;  // guards lines_, which only grows: lines stay valid without it
  std::map<std::pair<int, c10::StreamId>, std::unique_ptr<StreamLine>> lines_;
};

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kDevices> current_streams{};

inline c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

struct DeferredGuard final : c10::impl::DeviceGuardImplInterface {
  struct EventMark {
    c10::Stream stream;
    std::size_t end;
    bool captured = false;
  };
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType,
            std::exchange(current_device, device.has_index() ? device.index() : current_device)};
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    return stream_of(index, current_streams[static_cast<std::size_t>(index)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream_of(device.has_index() ? device.index() : current_device, ++last);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return Timeline::get().native(stream);
  }
  /// Each device has streams 100 to 131, and 200 to 231 of high priority.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    static std::array<std::atomic<int>, kDevices> next{};
    const auto index = device.has_index() ? device.index() : current_device;
    return stream_of(index,
                     (high_priority ? 200 : 100) + next[static_cast<std::size_t>(index)]++ % 32);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return Captures::get().has(stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto old = std::exchange(current_streams[static_cast<std::size_t>(stream.device_index())],
                                   stream.id());
    return stream_of(stream.device_index(), old);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count.load(); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventMark*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    delete static_cast<EventMark*>(*event);
    *event = new EventMark{stream, Timeline::get().length(stream), Captures::get().has(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Captures::get().wait(stream, static_cast<EventMark*>(event)->captured);
    Timeline::get().enqueue(stream, [mark = *static_cast<EventMark*>(event)] {
      Timeline::get().drain(mark.stream, mark.end);
    });
  }
  bool queryEvent(void* event) const override {
    TORCH_CHECK(!is_broken, "an illegal memory access was encountered");
    const auto* mark = static_cast<EventMark*>(event);
    return mark == nullptr || Timeline::get().query(mark->stream, mark->end);
  }
  void synchronizeEvent(void* event) const override {
    if (const auto* mark = static_cast<EventMark*>(event))
      Timeline::get().drain(mark->stream, mark->end);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Timeline::get().drain(stream, Timeline::get().length(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (const auto& stream : Timeline::get().streams_of(device)) synchronizeStream(stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

/// Whether freed memory is used again, as by CUDA's caching allocator: at once for the stream on
/// which it was allocated, in that stream's order, whatever other streams still do with it; if it
/// was recorded on others (`record_stream`), when these have done what they had to at that time.
/// It is then overwritten with `kReused`.
inline std::atomic<bool> reuses_memory{false};
inline constexpr unsigned char kReused = 0xa5;

/// Memory that was freed and is used again: filled with `kReused`, so that readers that come too
/// late find that, rather than a crash, until 32 MiB more are freed. Writers that come too late are
/// noticed.
class ReusedMemory {
 public:
  static ReusedMemory& get() {
    static auto* const memory = new ReusedMemory;  // threads of streams live as long as the process
    return *memory;
  }
  void add(void* memory, std::size_t bytes) {
    constexpr std::size_t kKeptBytes = std::size_t{32} << 20;
    std::memset(memory, kReused, bytes);
    const std::lock_guard lock(mutex_);
    kept_.emplace_back(memory, bytes);
    kept_bytes_ += bytes;
    while (kept_bytes_ > kKeptBytes) {
      const auto [oldest, size] = kept_.front();
      was_written_ = was_written_ || is_written(oldest, size);
      std::free(oldest);
      kept_bytes_ -= size;
      kept_.pop_front();
    }
  }
  /// Whether any of it has been written since the last call of this function.
  bool was_written() {
    const std::lock_guard lock(mutex_);
    for (const auto& [memory, bytes] : kept_) {
      if (!is_written(memory, bytes)) continue;
      was_written_ = true;
      std::memset(memory, kReused, bytes);
    }
    return std::exchange(was_written_, false);
  }

 private:
  static bool is_written(const void* memory, std::size_t bytes) {
    const auto* const all = static_cast<const unsigned char*>(memory);
    return bytes > 0 && (all[0] != kReused || std::memcmp(all, all + 1, bytes - 1) != 0);
  }

  std::mutex mutex_;  // guards the following
  std::deque<std::pair<void*, std::size_t>> kept_;
  std::size_t kept_bytes_ = 0;
  bool was_written_ = false;
};

/// Memory of a device, if `reuses_memory`.
struct StreamBlock {
  void* memory;
  std::size_t bytes;
  c10::Stream stream;
  std::mutex mutex = {};  // guards users
  std::vector<c10::Stream> users = {};

  void reuse() { ReusedMemory::get().add(memory, bytes); }
  static void free(void* context) {
    const std::shared_ptr<StreamBlock> block(static_cast<StreamBlock*>(context));
    auto& timeline = Timeline::get();
    std::vector<DeferredGuard::EventMark> marks;
    for (const auto& user : block->users) marks.push_back({user, timeline.length(user)});
    if (marks.empty() && timeline.is_done(block->stream, timeline.length(block->stream))) {
      block->reuse();
      return;
    }
    // With users, the memory stays out of use until the next free that finds them done.
    if (marks.empty()) {
      timeline.enqueue(block->stream, [block] { block->reuse(); });
      return;
    }
    static std::mutex waiting_mutex;
    static auto* const waiting = new std::vector<
        std::pair<std::shared_ptr<StreamBlock>, std::vector<DeferredGuard::EventMark>>>;
    const std::lock_guard lock(waiting_mutex);
    waiting->emplace_back(block, std::move(marks));
    std::erase_if(*waiting, [&](const auto& entry) {
      for (const auto& mark : entry.second)
        if (!timeline.is_done(mark.stream, mark.end)) return false;
      entry.first->reuse();
      return true;
    });
  }
};

inline void DeferredGuard::recordDataPtrOnStream(const c10::DataPtr& data,
                                                 const c10::Stream& stream) const {
  if (data.get_deleter() != &StreamBlock::free) return;
  auto& block = *static_cast<StreamBlock*>(data.get_context());
  const std::lock_guard lock(block.mutex);
  if (stream != block.stream) block.users.push_back(stream);
}

/// Memory filled with garbage, so that premature reads are detected.
struct GarbageAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = std::malloc(bytes + 1);
    std::memset(memory, 0x6e, bytes + 1);
    const c10::Device device(kType, current_device);
    if (!reuses_memory) return {memory, memory, &std::free, device};
    const auto stream = c10::impl::VirtualGuardImpl(kType).getStream(device);
    return {memory, new StreamBlock{memory, bytes + 1, stream}, &StreamBlock::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

/// Pinned host memory.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    if (refused) TORCH_CHECK(false, "this device pins no memory");
    void* memory = std::malloc(bytes + 1);
    const std::lock_guard lock(mutex);
    blocks.insert(memory);
    ++given;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* memory) {
    {
      const std::lock_guard lock(mutex);
      blocks.erase(memory);
    }
    std::free(memory);
  }
  static bool holds(const void* memory) {
    const std::lock_guard lock(mutex);
    return blocks.count(const_cast<void*>(memory)) != 0;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  static inline std::mutex mutex;
  static inline std::set<void*> blocks;
  static inline int given = 0;
  static inline std::atomic<bool> refused{false};  // ranks are threads
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count.load(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  bool isPinnedPtr(const void* memory) const override { return PinnedMemory::holds(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory memory;
    return &memory;
  }
};

inline GarbageAllocator memory_of_devices;

inline at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device> device,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device)));
  return at::detail::empty_generic(size, &memory_of_devices,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device)));
  return at::detail::empty_strided_generic(size, stride, &memory_of_devices,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

/// The same memory as a CPU tensor, which keeps it alive.
inline at::Tensor seen_by_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [storage = tensor.storage()](void*) {},
      at::TensorOptions(tensor.scalar_type()));
}

inline at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  const auto size = static_cast<std::int64_t>(source.nbytes() / tensor.element_size());
  return at::native::set_storage_cpu_(tensor, std::move(source), 0, {size}, {});
}

/// Copies on the current stream. As with CUDA, memory that is not pinned is copied before this
/// returns.
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto device = from.is_cpu() ? to.device() : from.device();
  const auto stream = c10::impl::VirtualGuardImpl(kType).getStream(device);
  const auto end = Timeline::get().enqueue(
      stream, [source = seen_by_host(from), target = seen_by_host(to)] { target.copy_(source); });
  const auto stays = [](const at::Tensor& tensor) {
    return !tensor.is_cpu() || PinnedMemory::holds(tensor.storage().data());
  };
  if (!non_blocking || !stays(from) || !stays(to)) Timeline::get().drain(stream, end);
  return to;
}

/// Complete on return, like computations.
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline void compute_on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

/// Registers the device with torch, as "deferred", in this process. Call it before the first
/// backward pass, at which autograd counts the devices.
inline void install() {
  static const bool once = [] {
    c10::register_privateuse1_backend("deferred");
    static const c10::impl::DeviceGuardImplRegistrar guard(kType, new DeferredGuard);
    c10::SetAllocator(kType, &memory_of_devices);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    static torch::Library kernels(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                  __FILE__, __LINE__);
    kernels.impl("empty.memory_format", &empty);
    kernels.impl("empty_strided", &empty_strided);
    kernels.impl("as_strided", &at::native::as_strided_tensorimpl);
    kernels.impl(
        "view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
    kernels.impl("_reshape_alias",
                 static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef, at::IntArrayRef)>(
                     &at::native::_reshape_alias));
    kernels.impl("resize_", static_cast<const at::Tensor& (*)(const at::Tensor&, at::IntArrayRef,
                                                              std::optional<at::MemoryFormat>)>(
                                &at::native::resize_));
    kernels.impl("set_.source_Storage", &set_storage);
    kernels.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    kernels.impl("_copy_from", &copy_from);
    kernels.impl("_copy_from_and_resize", &copy_from_and_resize);
    static torch::Library others(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__,
                                 __LINE__);
    others.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_the_cpu>());
    return true;
  }();
  static_cast<void>(once);
}

/// Copies `tensor` to a device; the copy is enqueued, not done.
inline at::Tensor on_device(const at::Tensor& tensor, int device) {
  const auto pinned =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().pinned_memory(true));
  pinned.copy_(tensor);
  const auto result = at::empty_strided(
      tensor.sizes(), tensor.strides(),
      tensor.options().device(at::Device(kType, static_cast<c10::DeviceIndex>(device))));
  return result.copy_(pinned, /*non_blocking=*/true);
}

/// The current content of its memory, ignoring enqueued work.
inline at::Tensor now(const at::Tensor& tensor) { return seen_by_host(tensor).clone(); }

}  // namespace muster::testing::deferred

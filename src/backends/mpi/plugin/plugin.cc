// SPDX-License-Identifier: BSD-3-Clause
// The calls of MPI that muster makes, for the flavour of MPI whose mpi.h this is compiled with.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string_view>
#include <type_traits>

#include "backends/mpi/library.h"
#include "backends/mpi/plugin/counted.h"

namespace muster::mpi {
namespace {

// Handles are ints or pointers.
std::uint64_t pack(MPI_Request handle) {
  static_assert(sizeof(MPI_Request) <=
                sizeof(std::uint64_t));  // NOLINT(bugprone-sizeof-expression)
  std::uint64_t packed = 0;
  std::memcpy(&packed, &handle, sizeof handle);  // NOLINT(bugprone-sizeof-expression)
  return packed;
}
MPI_Request request_of(const CarriedRequest& request) {
  MPI_Request handle = MPI_REQUEST_NULL;
  std::memcpy(&handle, &request.handle, sizeof handle);  // NOLINT(bugprone-sizeof-expression)
  return handle;
}

MPI_Datatype type_of(Element element) {
  switch (element) {
    case Element::uint8: return MPI_UINT8_T;
    case Element::uint16: return MPI_UINT16_T;
    case Element::uint32: return MPI_UINT32_T;
    case Element::uint64: return MPI_UINT64_T;
    case Element::int8: return MPI_INT8_T;
    case Element::int16: return MPI_INT16_T;
    case Element::int32: return MPI_INT32_T;
    case Element::int64: return MPI_INT64_T;
    case Element::float32: return MPI_FLOAT;
    case Element::float64: return MPI_DOUBLE;
  }
  return MPI_BYTE;
}

// Operations of muster's own, where MPI's do not promise what it does.

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
  return false;
}

/// The smaller or the larger, and NaN if either is. Used for bytes too, since MPICH 4.0 compares
/// them as signed.
struct Smaller {
  template <class T>
  static T of(T a, T b) {
    return is_nan(a) || a < b ? a : b;
  }
};
struct Larger {
  template <class T>
  static T of(T a, T b) {
    return is_nan(a) || b < a ? a : b;
  }
};
/// Wraps around: Open MPI's vectorised sums of 8 and 16 bits saturate.
struct WrappingSum {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  }
};

template <class Operation, class T>
void combine(void* in, void* in_out, int* count, MPI_Datatype*) {
  const T* const a = static_cast<const T*>(in);
  T* const b = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) b[i] = Operation::of(a[i], b[i]);
}

struct OwnOperation {
  CarriedReduction op;
  Element type;
  MPI_User_function* function;
  MPI_Op handle;
};

/// One lock for every call of MPI, if the library gives less than MPI_THREAD_MULTIPLE. `initialize`
/// closes it, before any call that needs it.
class PluginGate {
 public:
  void close() { closed_ = true; }
  [[nodiscard]] std::unique_lock<std::recursive_mutex> pass() const {
    return closed_ ? std::unique_lock(mutex_) : std::unique_lock<std::recursive_mutex>();
  }

 private:
  std::atomic<bool> closed_{false};
  mutable std::recursive_mutex mutex_;
};

class MpiLibrary;

class MpiComm final : public Comm {
 public:
  MpiComm(const MpiLibrary& library, MPI_Comm comm, int size)
      : library_(library), comm_(comm), size_(size) {}

  int free() override;
  int barrier(CarriedRequest& request) override;
  int broadcast(void* data, Count count, Element type, int root, CarriedRequest& request) override;
  int all_reduce(const void* in, void* out, Count count, Element type, CarriedReduction op,
                 CarriedRequest& request) override;
  int reduce(const void* in, void* out, Count count, Element type, CarriedReduction op, int root,
             CarriedRequest& request) override;
  int all_gather(const void* in, void* out, Count each, Element type,
                 CarriedRequest& request) override;
  int gather(const void* in, void* out, Count each, Element type, int root,
             CarriedRequest& request) override;
  int scatter(const void* in, void* out, Count each, Element type, int root,
              CarriedRequest& request) override;
  int reduce_scatter(const void* in, void* out, const Count* counts, Element type,
                     CarriedReduction op, CarriedRequest& request) override;
  int all_to_all_uneven(const void* in, const Count* sent, const Count* sent_places, void* out,
                        const Count* received, const Count* received_places, Element type,
                        CarriedRequest& request) override;
  int send(const void* data, Count bytes, int member, int tag, CarriedRequest& request) override;
  int receive(void* data, Count bytes, int member, int tag, CarriedRequest& request) override;

 private:
  /// Runs `call(&handle)` through the gate and keeps the handle.
  template <class Call>
  int start(CarriedRequest& request, Call call);

  const MpiLibrary& library_;
  MPI_Comm comm_;
  const int size_;
};

class MpiLibrary final : public Library {
 public:
  std::string version() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "an MPI library";
    std::string line;
    for (const char letter : std::string_view(text, static_cast<std::size_t>(length))) {
      if (letter == ',' || letter == '\n') break;
      const bool blank = letter == ' ' || letter == '\t';
      if (!blank || (!line.empty() && line.back() != ' ')) line += blank ? ' ' : letter;
    }
    return line;
  }
  bool has_large_counts() const override { return counted::kLarge; }
  std::string error_text(int code) const override {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    const auto lock = gate_.pass();
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
      return "error " + std::to_string(code);
    return std::string(text, static_cast<std::size_t>(length));
  }
  /// An extension of Open MPI and MPICH, which no standard and not every build has.
  bool takes_device_memory() const override {
    static const bool takes = [] {
      const auto query =
          reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "MPIX_Query_cuda_support"));
      return query != nullptr && query() != 0;
    }();
    return takes;
  }

  int initialize(bool& ours, ThreadLevel& level) override {
    int initialized = 0, provided = MPI_THREAD_SINGLE;
    int code = MPI_Initialized(&initialized);
    if (code != MPI_SUCCESS) return code;
    ours = initialized == 0;
    code = ours ? MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided)
                : MPI_Query_thread(&provided);
    if (code != MPI_SUCCESS) return code;
    level = provided >= MPI_THREAD_MULTIPLE     ? ThreadLevel::multiple
            : provided >= MPI_THREAD_SERIALIZED ? ThreadLevel::serialized
            : provided >= MPI_THREAD_FUNNELED   ? ThreadLevel::funneled
                                                : ThreadLevel::single;
    if (level < ThreadLevel::multiple) gate_.close();
    // Creating communicators reports its errors there.
    if (ours) code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (code != MPI_SUCCESS || own_[0].handle != MPI_OP_NULL) return code;
    return make_operations();
  }
  bool is_finalized() const override {
    int finalized = 0;
    return MPI_Finalized(&finalized) == MPI_SUCCESS && finalized != 0;
  }
  int finalize() override {
    const auto lock = gate_.pass();
    return MPI_Finalize();
  }

  int world(int& rank, int& size, std::int64_t& last_tag) override {
    const auto lock = gate_.pass();
    int code = MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(MPI_COMM_WORLD, &size);
    int* limit = nullptr;
    int found = 0;
    if (code == MPI_SUCCESS) code = MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &found);
    last_tag = found != 0 ? *limit : kLeastTagLimit;
    return code;
  }

  int exchange_texts(const std::string& text, std::vector<std::string>& all) override {
    const auto lock = gate_.pass();
    int code = MPI_SUCCESS, size = 0;
    if (world_ == MPI_COMM_NULL) code = MPI_Comm_dup(MPI_COMM_WORLD, &world_);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(world_, &size);
    if (code != MPI_SUCCESS) return code;
    const int bytes = static_cast<int>(text.size());
    std::vector<int> counts(static_cast<std::size_t>(size)), places(counts.size());
    code = MPI_Allgather(&bytes, 1, MPI_INT, counts.data(), 1, MPI_INT, world_);
    if (code != MPI_SUCCESS) return code;
    int sum = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      places[i] = sum;
      sum += counts[i];
    }
    std::string texts(static_cast<std::size_t>(sum), '\0');
    code = MPI_Allgatherv(text.data(), bytes, MPI_BYTE, texts.data(), counts.data(), places.data(),
                          MPI_BYTE, world_);
    all.clear();
    for (std::size_t i = 0; code == MPI_SUCCESS && i < counts.size(); ++i)
      all.push_back(
          texts.substr(static_cast<std::size_t>(places[i]), static_cast<std::size_t>(counts[i])));
    return code;
  }

  int create(std::span<const int> world_ranks, int tag, Comm*& made) override {
    const auto lock = gate_.pass();
    MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    const int size = static_cast<int>(world_ranks.size());
    int code = MPI_Comm_group(MPI_COMM_WORLD, &world);
    if (code == MPI_SUCCESS) code = MPI_Group_incl(world, size, world_ranks.data(), &members);
    if (code == MPI_SUCCESS) code = MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &comm);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    if (members != MPI_GROUP_NULL) MPI_Group_free(&members);
    if (world != MPI_GROUP_NULL) MPI_Group_free(&world);
    if (code == MPI_SUCCESS) made = new MpiComm(*this, comm, size);
    return code;
  }

  int test(CarriedRequest& request, bool& done, CarriedArrival* arrival) override {
    done = !request.active;
    if (done) return MPI_SUCCESS;
    const auto lock = gate_.pass();
    MPI_Request handle = request_of(request);
    MPI_Status status;
    int flag = 0;
    const int code = MPI_Test(&handle, &flag, &status);
    request.handle = pack(handle);
    done = flag != 0 || code != MPI_SUCCESS;
    if (!done) return code;
    request.active = false;
    if (arrival != nullptr && code == MPI_SUCCESS) {
      int cancelled = 0, count = 0;
      MPI_Test_cancelled(&status, &cancelled);
      arrival->cancelled = cancelled != 0;
      if (cancelled == 0) arrival->bytes = counted::bytes_of(status, count);
      arrival->source = status.MPI_SOURCE;
    }
    return code;
  }
  int cancel(CarriedRequest& request) override {
    const auto lock = gate_.pass();
    MPI_Request handle = request_of(request);
    const int code = MPI_Cancel(&handle);
    request.handle = pack(handle);
    return code;
  }

  const PluginGate& gate() const { return gate_; }
  MPI_Op operation(CarriedReduction op, Element type) const {
    for (const OwnOperation& own : own_)
      if (own.op == op && own.type == type) return own.handle;
    switch (op) {
      case CarriedReduction::sum: return MPI_SUM;
      case CarriedReduction::product: return MPI_PROD;
      case CarriedReduction::min: return MPI_MIN;
      case CarriedReduction::max: return MPI_MAX;
      case CarriedReduction::band: return MPI_BAND;
      case CarriedReduction::bor: return MPI_BOR;
      case CarriedReduction::bxor: return MPI_BXOR;
    }
    return MPI_OP_NULL;
  }

 private:
  static constexpr std::int64_t kLeastTagLimit = 32767;  // limit: what MPI guarantees

  int make_operations() {
    for (OwnOperation& own : own_)
      if (const int code = MPI_Op_create(own.function, 1, &own.handle); code != MPI_SUCCESS)
        return code;
    return MPI_SUCCESS;
  }

  PluginGate gate_;
  MPI_Comm world_ = MPI_COMM_NULL;  // for exchange_texts
  OwnOperation own_[9] = {
      {CarriedReduction::min, Element::float32, &combine<Smaller, float>, MPI_OP_NULL},
      {CarriedReduction::min, Element::float64, &combine<Smaller, double>, MPI_OP_NULL},
      {CarriedReduction::max, Element::float32, &combine<Larger, float>, MPI_OP_NULL},
      {CarriedReduction::max, Element::float64, &combine<Larger, double>, MPI_OP_NULL},
      {CarriedReduction::min, Element::uint8, &combine<Smaller, std::uint8_t>, MPI_OP_NULL},
      {CarriedReduction::max, Element::uint8, &combine<Larger, std::uint8_t>, MPI_OP_NULL},
      {CarriedReduction::sum, Element::uint8, &combine<WrappingSum, std::uint8_t>, MPI_OP_NULL},
      {CarriedReduction::sum, Element::int8, &combine<WrappingSum, std::int8_t>, MPI_OP_NULL},
      {CarriedReduction::sum, Element::int16, &combine<WrappingSum, std::int16_t>, MPI_OP_NULL},
  };
};

template <class Call>
int MpiComm::start(CarriedRequest& request, Call call) {
  MPI_Request handle = MPI_REQUEST_NULL;
  const auto lock = library_.gate().pass();
  const int code = call(&handle);
  request.handle = pack(handle);
  request.active = code == MPI_SUCCESS;
  return code;
}

int MpiComm::free() {
  const auto lock = library_.gate().pass();
  return MPI_Comm_free(&comm_);
}

int MpiComm::barrier(CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) { return MPI_Ibarrier(comm_, handle); });
}

int MpiComm::broadcast(void* data, Count count, Element type, int root, CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::broadcast(data, count, type_of(type), root, comm_, handle);
  });
}

int MpiComm::all_reduce(const void* in, void* out, Count count, Element type, CarriedReduction op,
                        CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::all_reduce(in == out ? MPI_IN_PLACE : in, out, count, type_of(type),
                               library_.operation(op, type), comm_, handle);
  });
}

int MpiComm::reduce(const void* in, void* out, Count count, Element type, CarriedReduction op,
                    int root, CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::reduce(in == out && out != nullptr ? MPI_IN_PLACE : in, out, count,
                           type_of(type), library_.operation(op, type), root, comm_, handle);
  });
}

int MpiComm::all_gather(const void* in, void* out, Count each, Element type,
                        CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::all_gather(in == nullptr ? MPI_IN_PLACE : in, out, each, type_of(type), comm_,
                               handle);
  });
}

int MpiComm::gather(const void* in, void* out, Count each, Element type, int root,
                    CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::gather(in == nullptr ? MPI_IN_PLACE : in, out, each, type_of(type), root, comm_,
                           handle);
  });
}

int MpiComm::scatter(const void* in, void* out, Count each, Element type, int root,
                     CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::scatter(in, out == nullptr ? MPI_IN_PLACE : out, each, type_of(type), root,
                            comm_, handle);
  });
}

int MpiComm::reduce_scatter(const void* in, void* out, const Count* counts, Element type,
                            CarriedReduction op, CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    const bool even = std::all_of(counts, counts + size_, [&](Count n) { return n == counts[0]; });
    return even ? counted::reduce_scatter(in, out, counts[0], type_of(type),
                                          library_.operation(op, type), comm_, handle)
                : counted::reduce_scatter_uneven(in, out, {counts, nullptr, size_}, type_of(type),
                                                 library_.operation(op, type), comm_, request.ints,
                                                 handle);
  });
}

int MpiComm::all_to_all_uneven(const void* in, const Count* sent, const Count* sent_places,
                               void* out, const Count* received, const Count* received_places,
                               Element type, CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::all_to_all_uneven(in, {sent, sent_places, size_}, out,
                                      {received, received_places, size_}, type_of(type), comm_,
                                      request.ints, handle);
  });
}

int MpiComm::send(const void* data, Count bytes, int member, int tag, CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::send(data, bytes, member, tag, comm_, handle);
  });
}

int MpiComm::receive(void* data, Count bytes, int member, int tag, CarriedRequest& request) {
  return start(request, [&](MPI_Request* handle) {
    return counted::receive(data, bytes, member == kAnySource ? MPI_ANY_SOURCE : member, tag, comm_,
                            handle);
  });
}

}  // namespace
}  // namespace muster::mpi

extern "C" unsigned muster_mpi_plugin_abi() { return muster::mpi::kPluginAbi; }
extern "C" muster::mpi::Library* muster_mpi_library() {
  static auto* const library = new muster::mpi::MpiLibrary;
  return library;
}

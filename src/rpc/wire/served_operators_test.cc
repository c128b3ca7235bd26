// SPDX-License-Identifier: BSD-3-Clause
// Every operator that other workers may call by name, on arguments of all shapes that a message can
// describe: none may touch memory outside its arguments, nor return memory that it has not written.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <barrier>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "rpc/functions.h"
#include "rpc/testing/guarded_memory.h"
#include "testing/fuzz.h"

namespace muster::rpc {
namespace {

using muster::testing::Fuzz;
using testing::GuardedMemory;
using Arguments = std::vector<c10::IValue>;

/// Random arguments of the types that a message may hold. The same seed gives the same values.
class RandomArguments {
 public:
  explicit RandomArguments(std::uint64_t seed) : fuzz_(seed) {
    for (auto& size : sizes_)
      size = static_cast<std::int64_t>(fuzz_.below(fuzz_.one_in(6) ? 40 : 5));
    kind_ = kKinds[fuzz_.below(std::size(kKinds))];
  }

  Arguments of(const c10::FunctionSchema& schema) {
    Arguments given;
    for (const auto& argument : schema.arguments()) {
      if (argument.default_value() && fuzz_.one_in(3)) break;  // and those after it
      auto value = of(argument.type(), argument.default_value());
      if (!value) break;
      given.push_back(std::move(*value));
    }
    return given;
  }

 private:
  static constexpr at::ScalarType kKinds[] = {
      at::kFloat, at::kFloat, at::kDouble, at::kLong,     at::kLong,        at::kBool,
      at::kInt,   at::kByte,  at::kHalf,   at::kBFloat16, at::kComplexFloat};

  std::optional<c10::IValue> of(const c10::TypePtr& type, const std::optional<c10::IValue>& usual) {
    switch (type->kind()) {
      case c10::TypeKind::TensorType: return tensor();
      case c10::TypeKind::OptionalType:
        // No message has a None: the arguments after it keep their defaults.
        return of(type->castRaw<c10::OptionalType>()->getElementType(), usual);
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType: return number();
      case c10::TypeKind::FloatType: return real();
      case c10::TypeKind::BoolType: return fuzz_.one_in(2);
      case c10::TypeKind::NumberType:
        return fuzz_.one_in(2) ? c10::IValue(number()) : c10::IValue(real());
      case c10::TypeKind::StringType:
        if (usual && usual->isString() && fuzz_.one_in(2)) return *usual;
        return std::string(kTexts[fuzz_.below(std::size(kTexts))]);
      case c10::TypeKind::ListType: return list(*type->castRaw<c10::ListType>()->getElementType());
      default: return std::nullopt;
    }
  }

  std::optional<c10::IValue> list(const c10::Type& element) {
    const std::size_t count = fuzz_.below(4);
    if (element.kind() == c10::TypeKind::TensorType ||
        element.kind() == c10::TypeKind::OptionalType) {
      std::vector<at::Tensor> tensors;
      for (std::size_t i = 0; i < count; ++i) tensors.push_back(tensor());
      return tensors;
    }
    if (element.kind() == c10::TypeKind::FloatType) {
      std::vector<double> numbers;
      for (std::size_t i = 0; i < count; ++i) numbers.push_back(real());
      return numbers;
    }
    std::vector<std::int64_t> numbers;
    for (std::size_t i = 0; i < count; ++i) numbers.push_back(number());
    return numbers;
  }

  std::int64_t number() {
    constexpr std::int64_t kFar[] = {1000,
                                     -1000,
                                     std::int64_t{1} << 31,
                                     std::int64_t{1} << 62,
                                     -(std::int64_t{1} << 62),
                                     std::numeric_limits<std::int64_t>::min(),
                                     std::numeric_limits<std::int64_t>::max()};
    if (fuzz_.one_in(40)) return kFar[fuzz_.below(std::size(kFar))];
    return static_cast<std::int64_t>(fuzz_.below(7)) - 2;
  }

  double real() {
    constexpr double kReals[] = {0,    0.5,  1,     -1, 2,
                                 1e-5, 1e30, -0.25, 3,  std::numeric_limits<double>::infinity()};
    if (fuzz_.one_in(40)) return std::numeric_limits<double>::quiet_NaN();
    return kReals[fuzz_.below(std::size(kReals))];
  }

  at::Tensor tensor() {
    const auto kind = fuzz_.one_in(4) ? kKinds[fuzz_.below(std::size(kKinds))] : kind_;
    std::vector<std::int64_t> sizes, strides;
    const std::size_t dimensions = fuzz_.one_in(2) ? 2 : fuzz_.below(5);
    for (std::size_t d = 0; d < dimensions; ++d)
      sizes.push_back(fuzz_.one_in(12) ? 0 : sizes_[fuzz_.below(fuzz_.one_in(3) ? 4 : 2)]);
    // As they may come: in order, transposed, overlapping, with gaps, far apart where it is all the
    // same.
    std::int64_t step = 1, extent = 1;
    const auto way = fuzz_.below(4);
    for (std::size_t d = 0; d < dimensions; ++d) {
      const auto size = sizes[way == 0 ? dimensions - 1 - d : d];
      const bool odd = way >= 2 && fuzz_.one_in(2);
      auto stride = odd ? static_cast<std::int64_t>(fuzz_.below(4)) : step;
      if (size <= 1 && fuzz_.one_in(8)) stride = std::int64_t{1} << 40;
      strides.insert(way == 0 ? strides.begin() : strides.end(), stride);
      if (size > 1) extent += (size - 1) * stride;
      step *= std::max<std::int64_t>(size, 1);
    }
    if (std::ranges::find(sizes, 0) != sizes.end()) extent = 0;
    const auto memory = at::empty({extent}, kind);
    auto* const bytes = static_cast<unsigned char*>(memory.mutable_data_ptr());
    const bool small = at::isIntegralType(kind, true) || fuzz_.one_in(2);
    for (std::size_t i = 0; i < memory.nbytes(); ++i)
      bytes[i] = static_cast<unsigned char>(fuzz_.word());
    if (small && !fuzz_.one_in(10)) {
      for (std::int64_t i = 0; i < extent; ++i)
        memory[i] = static_cast<std::int64_t>(fuzz_.below(kind == at::kBool ? 2 : 6));
    } else if (kind == at::kBool) {
      memory.fill_(true);
    }
    return at::as_strided(memory, sizes, strides);
  }

  static constexpr std::string_view kTexts[] = {"mean",    "sum",  "none",     "linear", "reflect",
                                                "reduced", "fro",  "constant", "ij",     "floor",
                                                "amax",    "prod", "i,i->i",   "trunc",  "nearest"};
  Fuzz fuzz_;
  std::int64_t sizes_[4] = {};
  at::ScalarType kind_ = at::kFloat;
};

std::vector<c10::FunctionSchema> overloads_of(const std::string& name) {
  std::vector<c10::FunctionSchema> schemas;
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name != name) continue;
    if (const auto handle = c10::Dispatcher::singleton().findSchema(op))
      schemas.push_back(handle->schema());
  }
  return schemas;
}

std::string bytes_of(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.layout() != at::kStrided) return "";
    const auto flat = tensor.resolve_conj().resolve_neg().contiguous();
    return std::string(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  }
  if (value.isTensorList()) {
    std::string all;
    for (const at::Tensor& each : value.toTensorVector()) all += bytes_of(each);
    return all;
  }
  if (value.isInt() || value.isBool())
    return std::to_string(value.isInt() ? value.toInt() : value.toBool());
  if (value.isDouble()) return std::to_string(value.toDouble());
  return "";
}

std::string text_of(const c10::IValue& value) {
  std::ostringstream text;
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    text << tensor.scalar_type() << tensor.sizes() << " strides " << tensor.strides();
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) text << text_of(each) << "; ";
  } else {
    text << value;
  }
  return text.str();
}

/// The overload and the arguments of one call, for a failure.
std::string call_of(const std::string& name, std::uint64_t seed) {
  const auto schemas = overloads_of(name);
  const auto& schema = schemas[seed / 2 % schemas.size()];
  std::string text = name + '.' + schema.overload_name();
  for (const auto& each : RandomArguments(seed).of(schema)) text += "\n  " + text_of(each);
  return text;
}

/// The outcome of a call while fresh memory holds `pattern`: the bytes of its results, or its
/// error.
std::string outcome(GuardedMemory& memory, const std::string& name,
                    const c10::FunctionSchema& schema, std::uint64_t seed, unsigned char pattern) {
  memory.set(pattern, seed % 2 == 0);
  at::manual_seed(1);
  std::string result;
  try {
    auto given = RandomArguments(seed).of(schema);
    for (const auto& each : call_operator(name, std::move(given))) result += bytes_of(each) + '|';
  } catch (const c10::Error& error) {
    result = error.what_without_backtrace();
  } catch (const std::exception& error) {
    result = error.what();
  }
  return result;
}

/// A child's progress, in memory that it shares with its parent.
struct Progress {
  std::size_t position;  // in the list of operators
  std::uint64_t seed;
  bool unwritten;  // of the last call: its result has memory that nothing wrote to
};

/// In a child: calls every operator `rounds` times, from `shared.position` on. Ends at the first
/// fault.
[[noreturn]] void play(Progress& shared, const std::vector<std::string>& names, int rounds,
                       std::uint64_t first_seed) {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::set_warning_handler(&silent);
  GuardedMemory memory;
  for (; shared.position < names.size(); ++shared.position) {
    const auto& name = names[shared.position];
    const auto schemas = overloads_of(name);
    for (int round = 0; round < rounds && !schemas.empty(); ++round) {
      const auto seed = shared.seed =
          first_seed + shared.position * 1000003 + static_cast<std::uint64_t>(round);
      const auto& schema = schemas[seed / 2 % schemas.size()];
      ::alarm(60);
      const auto one = outcome(memory, name, schema, seed, 0x5a);
      if (one != outcome(memory, name, schema, seed, 0xa3)) {
        shared.unwritten = true;
        ::_exit(1);
      }
    }
  }
  ::_exit(0);
}

/// An operator of the list traps where it divides the smallest integer by -1; that harms nobody
/// else.
bool is_fault(int status) { return !(WIFSIGNALED(status) && WTERMSIG(status) == SIGFPE); }

// spec: N3 operators called by name read and return nothing but their arguments, whatever shapes
// and strides those have
TEST(RpcOperatorsFuzz, TouchNoMemoryButTheirArguments) {
  std::vector<std::string> names;
  for (const auto name : computing_operators())
    for (const char* const in_place : {"", "_"})
      if (const auto full = "aten::" + std::string(name) + in_place; is_operator(full))
        names.push_back(full);
  ASSERT_GT(names.size(), 500U);
  // An ordinary run has one seed: what a new one finds is a fault of torch's, and to be worked
  // round.
  const int rounds = muster::testing::long_tests() ? 200 : 4;
  const std::uint64_t seed = muster::testing::long_tests() ? muster::testing::test_seed() : 1;
  at::set_num_threads(1);
  auto* const shared = static_cast<Progress*>(
      ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(shared), MAP_FAILED);
  *shared = {};
  while (shared->position < names.size()) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) play(*shared, names, rounds, seed << 20);
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
    if (is_fault(status))
      ADD_FAILURE() << call_of(names[shared->position], shared->seed) << "\nseed " << shared->seed
                    << ": "
                    << (shared->unwritten ? "returned memory that nothing has written to"
                                          : "ended by signal " + std::to_string(WTERMSIG(status)));
    shared->unwritten = false;
    ++shared->position;
  }
  ::munmap(shared, sizeof(Progress));
}

// Several threads that look up an operator for the first time read one list of overloads.
TEST(RpcOperators, AreLookedUpByManyThreadsAtOnce) {
  constexpr int kThreads = 4;
  std::barrier together(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&together] {
      for (const std::string_view name : computing_operators()) {
        const std::string full = "aten::" + std::string(name);
        together.arrive_and_wait();
        if (!is_operator(full)) continue;
        try {
          call_operator(full, {});  // its error lists the overloads
        } catch (const std::exception&) {
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace muster::rpc

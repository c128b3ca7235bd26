// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/functions.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/group/errors.h"

namespace muster::rpc {
namespace detail {
namespace {

struct KnownTypes {
  std::mutex mutex;
  std::map<std::uint64_t, std::string> names;
};
KnownTypes& known_types() {
  static auto* types = new KnownTypes;
  return *types;
}

const char* name_of(Tag tag) {
  switch (tag) {
    case Tag::object: return "an object";
    case Tag::boolean: return "bool";
    case Tag::i8: return "int8_t";
    case Tag::u8: return "uint8_t";
    case Tag::i16: return "int16_t";
    case Tag::u16: return "uint16_t";
    case Tag::i32: return "int32_t";
    case Tag::u32: return "uint32_t";
    case Tag::i64: return "int64_t";
    case Tag::u64: return "uint64_t";
    case Tag::f32: return "float";
    case Tag::f64: return "double";
  }
  return "a number of an unknown kind";
}

}  // namespace

std::uint64_t hash_of_name(const char* name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (; *name != 0; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 0x100000001b3u;
  return hash;
}

std::string type_name(const std::type_info& type) {
  if (type == typeid(std::string)) return "std::string";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? readable.get() : type.name();
}

void know_type(std::uint64_t hash, const std::type_info& type) {
  auto& types = known_types();
  const std::lock_guard lock(types.mutex);
  types.names.emplace(hash, type_name(type));
}

std::string known_type(std::uint64_t hash) {
  if (hash == type_hash<std::string>()) return "std::string";
  if (hash == type_hash<at::Tensor>()) return "at::Tensor";
  auto& types = known_types();
  const std::lock_guard lock(types.mutex);
  const auto found = types.names.find(hash);
  return found == types.names.end() ? "an object of another type" : found->second;
}

void wrong_type(std::string_view what, const std::string& wanted, Tag came, std::uint64_t hash) {
  throw ValueError(std::string(what) + " is wanted as " + wanted + "; " +
                   (came == Tag::object ? known_type(hash) : name_of(came)) + " was given");
}
void wrong_number(std::string_view what, const std::string& wanted) {
  throw ValueError(std::string(what) + " is wanted as " + wanted +
                   ", which cannot hold the number that was given");
}
void wrong_count(std::string_view function, std::size_t wanted, std::size_t came) {
  throw ValueError("'" + std::string(function) + "' takes " + std::to_string(wanted) +
                   " arguments; " + std::to_string(came) + " were given");
}
void too_long(std::string_view function) {
  throw ValueError("the arguments of '" + std::string(function) + "' hold more than its types say");
}

}  // namespace detail

// ---- the registry

namespace {

struct Hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};

/// Functions are never removed, so pointers to them stay valid without the lock.
struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<const Function>, Hash, std::equal_to<>> functions;
  std::map<const void*, std::string> names;
};
Registry& registry() {
  static auto* all = new Registry;  // never destroyed: threads may use it until the process exits
  return *all;
}

[[noreturn]] void unknown(std::string_view name) {
  std::string known;
  {
    auto& all = registry();
    const std::shared_lock lock(all.mutex);
    std::vector<std::string> names;
    for (const auto& [each, function] : all.functions) names.push_back(each);
    std::sort(names.begin(), names.end());
    for (std::size_t i = 0; i < names.size() && i < 20; ++i)
      known += (i == 0 ? "'" : ", '") + names[i] + "'";
    if (names.size() > 20) known += ", ...";
  }
  group::invalid("there is no function '" + std::string(name) + "' there; " +
                 (known.empty() ? "none is registered" : "registered are " + known) +
                 " (register_function, on the worker that is to run it)");
}

/// True for numbers and a few small tensors, on which an operator takes microseconds.
bool is_small(const Request& request) {
  std::size_t bytes = request.message.value.bytes.size();
  for (const auto& tensor : request.message.value.tensors) {
    if (tensor.defined()) bytes += tensor.nbytes();
  }
  return bytes <= kHeadBytes;
}

}  // namespace

const Function* find_function(std::string_view name) {
  // Functions are never removed, so the most recently called one can be cached.
  thread_local const Function* last = nullptr;
  if (last != nullptr && last->name == name) return last;
  auto& all = registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.functions.find(name);
  if (found == all.functions.end()) return nullptr;
  return last = found->second.get();
}

std::string name_of_function(const void* address) {
  auto& all = registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.names.find(address);
  if (found == all.names.end())
    group::invalid(
        "this function was not registered; call register_function(name, function) first, on all "
        "workers");
  return found->second;
}

void add_function(Function function, const void* address) {
  if (function.name.empty()) group::invalid("register_function: a function needs a name");
  auto& all = registry();
  const std::unique_lock lock(all.mutex);
  const auto name = function.name;
  if (!all.functions.emplace(name, std::make_unique<const Function>(std::move(function))).second)
    group::invalid("register_function: there is a function '" + name + "' already");
  if (address != nullptr) all.names.emplace(address, name);
}

Handler function_handler() {
  Handler handler;
  handler.is_short = [](const Request& request) {
    if (const auto function = find_function(request.message.name))
      return function->runs == Runs::at_once;
    return is_operator(request.message.name) && is_small(request);
  };
  handler.run = [](Request request) {
    if (const auto function = find_function(request.message.name))
      return function->serve(request.message.value, *request.delivery, request.responder);
    if (is_operator(request.message.name)) return serve_operator(request);
    unknown(request.message.name);
  };
  return handler;
}

}  // namespace muster::rpc

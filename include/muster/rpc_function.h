// SPDX-License-Identifier: BSD-3-Clause
/// The registry of functions that other workers may call, by name.
///
/// Call `register_function("lookup", lookup)` on the worker that is to run it, usually on all.
/// Arguments and results may have any type `value.h` can serialise. A function that returns
/// `Future<T>` frees its thread and replies when the future completes (torch: async_execution).
/// Numbers are converted if the conversion is lossless, so `3` may be passed for a double; every
/// other argument must have the same type on both sides, or the call fails with an error naming the
/// argument. torch's operators that compute tensors ("aten::add") need no registration; others need
/// `allow_operator`. One registry per process; thread-safe.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "muster/rpc_future.h"
#include "muster/rpc_value.h"

namespace muster::rpc {

/// Replies to a request once, from any thread, now or later. Dropping it without a reply fails the
/// call.
class Responder {
 public:
  virtual ~Responder() = default;
  /// Packs and sends the result. `fill(value, delivery)` runs on this thread; if it throws, the
  /// exception is the reply.
  virtual void reply(const std::function<void(Value&, ValueDelivery&)>& fill) = 0;
  virtual void fail(std::exception_ptr error) = 0;
  /// True if the caller no longer waits for the reply.
  virtual bool cancelled() const = 0;
  /// True if the result is to stay on this worker unserialised; then call `keep` instead of
  /// `reply`.
  virtual bool keeps() const { return false; }
  virtual void keep(KeptValue) {}
};
using ResponderRef = std::shared_ptr<Responder>;

/// The thread a function runs on.
enum class Runs : std::uint8_t {
  pooled,  ///< on a worker thread; may block and make calls
  /// On the thread that received the call, possibly one waiting for another reply; avoids a thread
  /// switch. The function must take at most a few microseconds, must not block, and must not take a
  /// lock that is held during calls.
  at_once,
};

struct FunctionOptions {
  Runs runs = Runs::pooled;
};

namespace detail {

/// Precedes every argument and result on the wire: the kind of number, or a type hash.
enum class Tag : std::uint8_t {
  object = 0,
  boolean,
  i8,
  u8,
  i16,
  u16,
  i32,
  u32,
  i64,
  u64,
  f32,
  f64
};

template <class T>
constexpr Tag tag_of() {
  if constexpr (std::is_same_v<T, bool>)
    return Tag::boolean;
  else if constexpr (std::is_same_v<T, float>)
    return Tag::f32;
  else if constexpr (std::is_same_v<T, double>)
    return Tag::f64;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<Tag>(static_cast<int>(sizeof(T) == 1   ? Tag::i8
                                             : sizeof(T) == 2 ? Tag::i16
                                             : sizeof(T) == 4 ? Tag::i32
                                                              : Tag::i64) +
                            (std::is_unsigned_v<T> ? 1 : 0));
  else
    return Tag::object;
}

/// Equal for equal types within one build.
std::uint64_t hash_of_name(const char* name);
template <class T>
std::uint64_t type_hash() {
  static const std::uint64_t hash = hash_of_name(typeid(T).name());
  return hash;
}
/// A type's readable name.
std::string type_name(const std::type_info& type);
/// Records the type of a hash, for error messages.
void know_type(std::uint64_t hash, const std::type_info& type);
std::string known_type(std::uint64_t hash);
[[noreturn]] void wrong_type(std::string_view what, const std::string& wanted, Tag came,
                             std::uint64_t hash);
[[noreturn]] void wrong_number(std::string_view what, const std::string& wanted);

/// The type an argument is sent as: std::string for any string type, otherwise the decayed type.
template <class T>
using Carried = std::conditional_t<std::is_convertible_v<const std::decay_t<T>&, std::string_view>,
                                   std::string, std::decay_t<T>>;

template <class T>
void put_typed(ValueOutput& archive, const T& value) {
  constexpr Tag tag = tag_of<T>();
  archive.put(&tag, 1);
  if constexpr (tag == Tag::object) {
    const auto hash = type_hash<T>();
    archive.put(&hash, sizeof hash);
  }
  archive(value);
}

template <class N>
N get_number(ValueInput& archive) {
  N number{};
  archive.get(&number, sizeof number);
  return number;
}
template <class To, class From>
To convert_number(From from, std::string_view what) {
  bool fits = true;
  if constexpr (std::is_same_v<To, bool>) {
    fits = std::is_same_v<From, bool>;
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    fits = std::is_same_v<From, bool>
               ? true
               : std::in_range<To>(
                     static_cast<std::conditional_t<std::is_same_v<From, bool>, int, From>>(from));
  } else if constexpr (std::is_integral_v<To>) {
    fits = false;  // a fraction might be lost
  }
  if (!fits) wrong_number(what, type_name(typeid(To)));
  return static_cast<To>(from);
}

/// Reads a T written by put_typed. Throws ValueError naming `what` ("argument 2 of 'lookup'").
template <class T>
T get_typed(ValueInput& archive, std::string_view what) {
  Tag tag{};
  archive.get(&tag, 1);
  if constexpr (tag_of<T>() != Tag::object) {
    switch (tag) {
      case Tag::boolean: return convert_number<T>(get_number<std::uint8_t>(archive) != 0, what);
      case Tag::i8: return convert_number<T>(get_number<std::int8_t>(archive), what);
      case Tag::u8: return convert_number<T>(get_number<std::uint8_t>(archive), what);
      case Tag::i16: return convert_number<T>(get_number<std::int16_t>(archive), what);
      case Tag::u16: return convert_number<T>(get_number<std::uint16_t>(archive), what);
      case Tag::i32: return convert_number<T>(get_number<std::int32_t>(archive), what);
      case Tag::u32: return convert_number<T>(get_number<std::uint32_t>(archive), what);
      case Tag::i64: return convert_number<T>(get_number<std::int64_t>(archive), what);
      case Tag::u64: return convert_number<T>(get_number<std::uint64_t>(archive), what);
      case Tag::f32: return convert_number<T>(get_number<float>(archive), what);
      case Tag::f64: return convert_number<T>(get_number<double>(archive), what);
      default: break;
    }
    wrong_type(what, type_name(typeid(T)), tag,
               tag == Tag::object ? get_number<std::uint64_t>(archive) : 0);
  } else {
    const auto hash = tag == Tag::object ? get_number<std::uint64_t>(archive) : 0;
    if (hash != type_hash<T>()) {
      know_type(type_hash<T>(), typeid(T));
      wrong_type(what, type_name(typeid(T)), tag, hash);
    }
    T object{};
    archive(object);
    return object;
  }
}

/// Writes the number of arguments, then each.
template <class... A>
void put_arguments(Value& value, ValueDelivery& delivery, const A&... arguments) {
  if constexpr (sizeof...(A) == 0) {
    value.bytes.push_back('\0');
    return;
  }
  ValueOutput archive(value, delivery);
  const auto count = static_cast<std::uint8_t>(sizeof...(A));
  archive.put(&count, 1);
  (put_typed<Carried<A>>(archive, arguments), ...);
}
[[noreturn]] void wrong_count(std::string_view function, std::size_t wanted, std::size_t came);
[[noreturn]] void too_long(std::string_view function);
[[noreturn]] void cannot_travel(const std::type_info& type);

template <class Tuple, std::size_t... I>
Tuple get_arguments(std::string_view function, const Value& value, ValueDelivery& delivery,
                    std::index_sequence<I...>) {
  if constexpr (sizeof...(I) == 0) {
    if (value.bytes.size() == 1 && value.bytes.front() == '\0') return Tuple();
  }
  ValueInput archive(value, delivery);
  std::uint8_t count = 0;
  archive.get(&count, 1);
  if (count != sizeof...(I)) wrong_count(function, sizeof...(I), count);
  // A braced list is evaluated from left to right.
  Tuple arguments{get_typed<std::tuple_element_t<I, Tuple>>(
      archive, "argument " + std::to_string(I + 1) + " of '" + std::string(function) + "'")...};
  if (archive.left() > 0) too_long(function);
  return arguments;
}

template <class R>
void put_result(Value& value, ValueDelivery& delivery, const R& result) {
  ValueOutput archive(value, delivery);
  put_typed<R>(archive, result);
}
/// R = void accepts any result.
template <class R>
R get_result(std::string_view function, const Value& value, ValueDelivery& delivery) {
  if constexpr (!std::is_void_v<R>) {
    ValueInput archive(value, delivery);
    if (archive.left() == 0)
      throw ValueError("'" + std::string(function) + "' returns nothing, " + type_name(typeid(R)) +
                       " is wanted");
    return get_typed<R>(archive, "the result of '" + std::string(function) + "'");
  }
}

template <class T>
struct Signature : Signature<decltype(&T::operator())> {};
template <class R, class... A>
struct Signature<R (*)(A...)> {
  using Result = R;
  using Arguments = std::tuple<Carried<A>...>;
};
template <class R, class C, class... A>
struct Signature<R (C::*)(A...) const> : Signature<R (*)(A...)> {};
template <class R, class C, class... A>
struct Signature<R (C::*)(A...)> : Signature<R (*)(A...)> {};

template <class T>
struct IsFuture : std::false_type {};
template <class T>
struct IsFuture<Future<T>> : std::true_type {
  using Inner = T;
};

}  // namespace detail

/// Wraps `value` to be kept on this worker.
template <class T>
KeptValue kept_of(T value) {
  auto object = std::make_shared<T>(std::move(value));
  KeptValue kept;
  kept.type = &typeid(T);
  kept.object = object;
  if constexpr (kTravels<T>) {
    kept.pack = [object](Value& to, ValueDelivery& delivery) {
      detail::put_result<T>(to, delivery, *object);
    };
  }
  return kept;
}

/// A registered function with its types erased.
struct Function {
  std::string name;
  Runs runs = Runs::pooled;
  /// Unpacks the arguments, runs the function and replies. `responder` is null if no reply is
  /// expected. May clear `arguments`.
  std::function<void(Value& arguments, ValueDelivery& delivery, const ResponderRef& responder)>
      serve;
};

/// The name this plain function was registered under; throws DistError if it was not.
std::string name_of_function(const void* address);
void add_function(Function function, const void* address);

namespace detail {

template <class T>
void send_result(const ResponderRef& responder, const T& result) {
  if (!responder) return;
  if (responder->keeps()) return responder->keep(kept_of<T>(result));
  if constexpr (kTravels<T>) {
    responder->reply(
        [&](Value& value, ValueDelivery& delivery) { put_result<T>(value, delivery, result); });
  } else {
    cannot_travel(typeid(T));
  }
}
inline void send_nothing(const ResponderRef& responder) {
  if (responder) responder->reply([](Value&, ValueDelivery&) {});
}

}  // namespace detail

/// Replies to `responder` with the result of `compute()`: a value, nothing, or a future.
template <class R, class Compute>
void answer(const ResponderRef& responder, Compute compute) {
  if constexpr (detail::IsFuture<R>::value) {
    using T = typename detail::IsFuture<R>::Inner;
    R future = compute();
    if (!future.valid()) throw std::logic_error("it returned a future that belongs to no promise");
    future.state()->then([responder](const std::shared_ptr<FutureState<T>>& state) {
      if (auto error = state->error()) {
        if (responder) responder->fail(error);
        return;
      }
      try {
        if constexpr (std::is_void_v<T>) {
          detail::send_nothing(responder);
        } else {
          detail::send_result<T>(responder, state->value());
        }
      } catch (...) {
        if (responder) responder->fail(std::current_exception());
      }
    });
  } else if constexpr (std::is_void_v<R>) {
    compute();
    detail::send_nothing(responder);
  } else {
    const R result = compute();
    detail::send_result<R>(responder, result);
  }
}

/// Makes `function` callable under `name` for every agent of this process. Throws DistError if the
/// name is taken. `function` is a plain function or an object with one operator(); it is called
/// from many threads at once.
template <class F>
void register_function(std::string name, F function, FunctionOptions options = {}) {
  using Types = detail::Signature<F>;
  using R = typename Types::Result;
  using Arguments = typename Types::Arguments;
  const void* address = nullptr;
  if constexpr (std::is_pointer_v<F>) address = reinterpret_cast<const void*>(function);
  Function erased;
  erased.runs = options.runs;
  erased.serve = [name, function = std::move(function)](Value& given, ValueDelivery& delivery,
                                                        const ResponderRef& responder) mutable {
    auto arguments = detail::get_arguments<Arguments>(
        name, given, delivery, std::make_index_sequence<std::tuple_size_v<Arguments>>());
    given.tensors.clear();  // the arguments are the function's now
    answer<std::remove_cvref_t<R>>(
        responder, [&]() -> decltype(auto) { return std::apply(function, std::move(arguments)); });
  };
  erased.name = std::move(name);
  add_function(std::move(erased), address);
}

/// Lets other workers call an operator on this process by name although it is not a computing
/// operator: one of your own library ("mylib::scale"), or one of torch's with side effects. Lasts
/// until the process exits. Thread-safe. Throws DistError (Code::invalid_argument) if torch has no
/// such operator; load the library that defines it first.
void allow_operator(const std::string& name);

}  // namespace muster::rpc

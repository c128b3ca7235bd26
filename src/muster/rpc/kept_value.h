/// A value of any type kept on the worker that made it: the referent of an RRef on its owner.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "muster/rpc/value.h"

namespace muster::rpc {

/// Whether values of this type can be serialised. Other types (a module, an object with threads)
/// may still be referenced.
template <class T>
inline constexpr bool kTravels = cereal::traits::is_output_serializable<T, ValueOutput>::value&&
    cereal::traits::is_input_serializable<T, ValueInput>::value;

/// Shared and mutable by every holder; the type's own thread-safety rules apply.
struct KeptValue {
  const std::type_info* type = nullptr;
  std::shared_ptr<void> object;
  /// Packs a copy as a function's result; null if the type cannot be serialised.
  std::function<void(Value&, Passage&)> pack;
};

}  // namespace muster::rpc

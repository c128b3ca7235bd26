/// A value of any type that stays where it was made: what RRefs refer to on their owner.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "muster/rpc/value.h"

namespace muster::rpc {

/// Whether values of this type can travel. What cannot (a module, an object with threads) may still
/// be referred to.
template <class T>
inline constexpr bool kTravels = cereal::traits::is_output_serializable<T, ValueOutput>::value&&
    cereal::traits::is_input_serializable<T, ValueInput>::value;

/// Shared, and changed by whoever refers to it: its type's own rules on threads hold.
struct KeptValue {
  const std::type_info* type = nullptr;
  std::shared_ptr<void> object;
  /// Packs a copy as a function's result; null where it cannot travel.
  std::function<void(Value&, Passage&)> pack;
};

}  // namespace muster::rpc

// SPDX-License-Identifier: BSD-3-Clause
/// Serialised values: the bytes of any type cereal can serialise, with the tensors in it sent out
/// of band.
///
/// A type is serialised by a member `template <class Archive> void serialize(Archive& archive) {
/// archive(a, b); }` or by a free function of that name, as always with cereal. It may contain
/// at::Tensor anywhere. Shape, stride and dtype are preserved; the receiver owns the tensors it
/// receives. A type that depends on its destination, such as an RRef, overloads `save(ValueOutput&,
/// const T&)` and `load(ValueInput&, T&)` in its namespace and uses the archive's `delivery()`.
/// Every length is checked against the remaining bytes before anything is allocated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cereal/cereal.hpp>
#include <cereal/types/string.hpp>
#include <cereal/types/vector.hpp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace muster::rpc {

class Agent;

/// An object as bytes, and the tensors that they refer to by index.
struct Value {
  std::string bytes;
  std::vector<at::Tensor> tensors;
};

/// A value's way from one worker to another: which worker is at the other end, and what follows
/// from its arrival. For types that depend on it, such as RRef.
struct ValueDelivery {
  Agent* agent = nullptr;  ///< null if the value is only packed (tests)
  int peer = -1;           ///< the destination or source worker
  /// When saving: called once the message's outcome is known, with true if the value has certainly
  /// arrived: its reply came, or it was itself a reply and has been sent.
  std::vector<std::function<void(bool arrived)>> on_outcome;
  bool arrived = false;

  ValueDelivery() = default;
  ValueDelivery(Agent* agent, int peer) : agent(agent), peer(peer) {}
  ValueDelivery(const ValueDelivery&) = delete;
  ValueDelivery& operator=(const ValueDelivery&) = delete;
  /// Moves `on_outcome` into a new object, which the caller keeps until the message's outcome is
  /// known; null if it is empty.
  std::shared_ptr<ValueDelivery> take();
  ~ValueDelivery() {
    for (const auto& tell : on_outcome) tell(arrived);
  }
};

/// A value cannot be read as the expected type; what() gives the reason.
class ValueError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ValueOutput : public cereal::OutputArchive<ValueOutput, cereal::AllowEmptyClassElision> {
 public:
  ValueOutput(Value& value, ValueDelivery& delivery)
      : cereal::OutputArchive<ValueOutput, cereal::AllowEmptyClassElision>(this),
        value_(value),
        delivery_(delivery) {}

  void put(const void* data, std::size_t bytes) {
    value_.bytes.append(static_cast<const char*>(data), bytes);
  }
  void put_tensor(const at::Tensor& tensor);
  ValueDelivery& delivery() { return delivery_; }

 private:
  Value& value_;
  ValueDelivery& delivery_;
};

class ValueInput : public cereal::InputArchive<ValueInput, cereal::AllowEmptyClassElision> {
 public:
  ValueInput(const Value& value, ValueDelivery& delivery)
      : cereal::InputArchive<ValueInput, cereal::AllowEmptyClassElision>(this),
        value_(value),
        delivery_(delivery) {}

  void get(void* data, std::size_t bytes) {
    if (bytes > left()) throw ValueError("it ends too early");
    if (bytes > 0) std::memcpy(data, value_.bytes.data() + at_, bytes);
    at_ += bytes;
  }
  at::Tensor get_tensor();
  std::size_t left() const { return value_.bytes.size() - at_; }
  ValueDelivery& delivery() { return delivery_; }

 private:
  const Value& value_;
  ValueDelivery& delivery_;
  std::size_t at_ = 0;
};

// ---- cereal's side of the two archives

template <class T>
requires std::is_arithmetic_v<T>
void CEREAL_SAVE_FUNCTION_NAME(ValueOutput& archive, const T& value) {
  archive.put(&value, sizeof value);
}
template <class T>
requires std::is_arithmetic_v<T>
void CEREAL_LOAD_FUNCTION_NAME(ValueInput& archive, T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    std::uint8_t byte = 0;  // not every byte is a bool
    archive.get(&byte, sizeof byte);
    if (byte > 1) throw ValueError("a truth value is " + std::to_string(byte));
    value = byte == 1;
  } else {
    archive.get(&value, sizeof value);
  }
}

template <class T>
void CEREAL_SAVE_FUNCTION_NAME(ValueOutput& archive, const cereal::NameValuePair<T>& pair) {
  archive(pair.value);
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(ValueInput& archive, cereal::NameValuePair<T>& pair) {
  archive(pair.value);
}

template <class T>
void CEREAL_SAVE_FUNCTION_NAME(ValueOutput& archive, const cereal::SizeTag<T>& tag) {
  const auto size = static_cast<std::uint64_t>(tag.size);
  archive.put(&size, sizeof size);
}
/// Rejects a count above the remaining bytes: every element takes at least one.
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(ValueInput& archive, cereal::SizeTag<T>& tag) {
  std::uint64_t size = 0;
  archive.get(&size, sizeof size);
  if (size > archive.left())
    throw ValueError("it counts " + std::to_string(size) + " entries in " +
                     std::to_string(archive.left()) + " bytes");
  tag.size = static_cast<std::remove_reference_t<T>>(size);
}

template <class T>
void CEREAL_SAVE_FUNCTION_NAME(ValueOutput& archive, const cereal::BinaryData<T>& data) {
  archive.put(data.data, static_cast<std::size_t>(data.size));
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(ValueInput& archive, cereal::BinaryData<T>& data) {
  archive.get(data.data, static_cast<std::size_t>(data.size));
}

inline void CEREAL_SAVE_FUNCTION_NAME(ValueOutput& archive, const at::Tensor& tensor) {
  archive.put_tensor(tensor);
}
inline void CEREAL_LOAD_FUNCTION_NAME(ValueInput& archive, at::Tensor& tensor) {
  tensor = archive.get_tensor();
}

/// Appends `object` to `value`.
template <class T>
void pack(Value& value, ValueDelivery& delivery, const T& object) {
  ValueOutput archive(value, delivery);
  archive(object);
}
/// Reads all of `value` as a T; throws ValueError.
template <class T>
T unpack(const Value& value, ValueDelivery& delivery) {
  ValueInput archive(value, delivery);
  T object{};
  archive(object);
  if (archive.left() > 0) throw ValueError("it is longer than what is wanted");
  return object;
}

/// Whether values of this type can be serialised. Other types (a module, an object with threads)
/// may still be referenced.
template <class T>
inline constexpr bool kTravels = cereal::traits::is_output_serializable<T, ValueOutput>::value&&
    cereal::traits::is_input_serializable<T, ValueInput>::value;

/// A value that stays on its worker. Its holders share it and may change it; the type's own
/// thread-safety rules apply.
struct KeptValue {
  const std::type_info* type = nullptr;
  std::shared_ptr<void> object;
  /// Packs a copy as a function's result; null if the type cannot be serialised.
  std::function<void(Value&, ValueDelivery&)> pack;
};

}  // namespace muster::rpc

CEREAL_REGISTER_ARCHIVE(muster::rpc::ValueOutput)
CEREAL_REGISTER_ARCHIVE(muster::rpc::ValueInput)
CEREAL_SETUP_ARCHIVE_TRAITS(muster::rpc::ValueInput, muster::rpc::ValueOutput)

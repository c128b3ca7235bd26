/// What travels: the bytes of any type that cereal can serialise, and beside them the tensors that
/// it holds, out of band.
///
/// A type is serialised by a member `template <class Archive> void serialize(Archive& archive) {
/// archive(a, b); }` or a free function of that name, as everywhere with cereal; at::Tensor may
/// stand anywhere inside. Shape, stride and dtype are kept; a tensor that came is the receiver's
/// own. Types that must know where they go (references to remote values) overload
/// `save(ValueOutput&, const T&)` and `load(ValueInput&, T&)` in their namespace and ask the
/// archive for its `passage()`. Every length is checked against what is left before anything is
/// allocated.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

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
#include <utility>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/status.h"
#include "muster/rpc/message.h"

namespace muster::rpc {

class Agent;

/// Bytes, and the tensors that they name by position.
struct Value {
  std::string bytes;
  std::vector<at::Tensor> tensors;
};

/// A value on its way, with what goes along.
struct Parcel {
  std::string name;  ///< of the function
  std::string note;  ///< the observer's (autograd)
  Value value;
};

/// Where a value goes or comes from, for types that must know.
struct Passage {
  Agent* agent = nullptr;  ///< null where a value is only packed (tests)
  int peer = -1;           ///< the worker that it goes to, or comes from
  /// Saving: what is kept until the message's fate is known: its answer has come or its call has
  /// failed; until it was sent, where none is wanted.
  std::vector<std::shared_ptr<void>> kept;
  /// Loading, on the callee: asked before the answer leaves, which waits until all of them say
  /// true. They must not block; whoever makes one true calls Agent::wake.
  std::vector<std::function<bool()>> before_answer;
  /// Saving: told at the end whether the value has certainly come: its answer is there, or it is an
  /// answer itself and has been sent.
  std::vector<std::function<void(bool arrived)>> fates;
  bool arrived = false;

  Passage() = default;
  Passage(Agent* agent, int peer) : agent(agent), peer(peer) {}
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;
  /// What was saved along with the value, for as long as it must be kept; null where that is
  /// nothing. Leaves this one empty.
  std::shared_ptr<Passage> take();
  ~Passage() {
    for (const auto& fate : fates) fate(arrived);
  }
};

/// A value that cannot be read as what is wanted; what() says why.
class ValueError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ValueOutput : public cereal::OutputArchive<ValueOutput, cereal::AllowEmptyClassElision> {
 public:
  ValueOutput(Value& value, Passage& passage)
      : cereal::OutputArchive<ValueOutput, cereal::AllowEmptyClassElision>(this),
        value_(value),
        passage_(passage) {}

  void put(const void* data, std::size_t bytes) {
    value_.bytes.append(static_cast<const char*>(data), bytes);
  }
  void put_tensor(const at::Tensor& tensor);
  Passage& passage() { return passage_; }

 private:
  Value& value_;
  Passage& passage_;
};

class ValueInput : public cereal::InputArchive<ValueInput, cereal::AllowEmptyClassElision> {
 public:
  ValueInput(const Value& value, Passage& passage)
      : cereal::InputArchive<ValueInput, cereal::AllowEmptyClassElision>(this),
        value_(value),
        passage_(passage) {}

  void get(void* data, std::size_t bytes) {
    if (bytes > left()) throw ValueError("it ends too early");
    if (bytes > 0) std::memcpy(data, value_.bytes.data() + at_, bytes);
    at_ += bytes;
  }
  at::Tensor get_tensor();
  std::size_t left() const { return value_.bytes.size() - at_; }
  Passage& passage() { return passage_; }

 private:
  const Value& value_;
  Passage& passage_;
  std::size_t at_ = 0;
};

// ---- cereal's side of the two archives
// -------------------------------------------------------------------------------

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
/// Whatever is counted takes at least a byte each.
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
void pack(Value& value, Passage& passage, const T& object) {
  ValueOutput archive(value, passage);
  archive(object);
}
/// The whole of `value` as a T; throws ValueError.
template <class T>
T unpack(const Value& value, Passage& passage) {
  ValueInput archive(value, passage);
  T object{};
  archive(object);
  if (archive.left() > 0) throw ValueError("it is longer than what is wanted");
  return object;
}

// ---- tensors on the wire
// ---------------------------------------------------------------------------------------------

/// How a tensor travels. `data` lies in `source`, which must be kept until it was sent.
struct TensorOut {
  TensorHead head;
  at::Tensor source;
  ConstBytes data;
  bool ours = false;  ///< `source` is a copy that nobody else has
};
/// Which device of the receiver a tensor of this device becomes there; throws where there is none
/// (device maps).
using DeviceMapping = std::function<at::Device(at::Device)>;
/// Dense memory is sent as it lies; what has holes is packed first. Throws for layouts that cannot
/// travel.
TensorOut describe_tensor(const at::Tensor& tensor, const DeviceMapping& device);
/// From here on changes of the tensor that was described do not show.
void make_ours(TensorOut& tensor);

/// Memory for the bytes of a tensor that is to come. Code::internal where sizes, type and bytes do
/// not fit, Code::exhausted without memory.
struct TensorIn {
  c10::Storage memory;
  MutableBytes data;
};
Result<TensorIn> allocate_tensor(const TensorHead& head);
/// The tensor that the bytes in `memory` are.
at::Tensor assemble_tensor(const TensorHead& head, TensorIn memory);

}  // namespace muster::rpc

CEREAL_REGISTER_ARCHIVE(muster::rpc::ValueOutput)
CEREAL_REGISTER_ARCHIVE(muster::rpc::ValueInput)
CEREAL_SETUP_ARCHIVE_TRAITS(muster::rpc::ValueInput, muster::rpc::ValueOutput)

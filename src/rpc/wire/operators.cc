/// torch's operators by name.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <sstream>

#include "core/group/errors.h"
#include "muster/rpc_function.h"
#include "rpc/functions.h"

namespace muster::rpc {
namespace {

using detail::Tag;
using Overloads = std::vector<c10::OperatorHandle>;

/// Whether it computes tensors. The others are TorchScript's: numbers, texts and lists.
bool has_tensors(const c10::FunctionSchema& schema) {
  const auto is_tensor = [](const c10::Argument& each) {
    return each.type()->str().find("Tensor") != std::string::npos;
  };
  return std::ranges::any_of(schema.arguments(), is_tensor) ||
         std::ranges::any_of(schema.returns(), is_tensor);
}

/// All overloads of an operator, asked of torch once; of those that compute tensors, no others.
class Operators {
 public:
  const Overloads* find(std::string_view name) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto known = known_.find(name); known != known_.end())
        return known->second.empty() ? nullptr : &known->second;
    }
    const std::unique_lock lock(mutex_);
    if (names_.empty()) {
      for (auto& op : c10::Dispatcher::singleton().getAllOpNames()) names_[op.name].push_back(op);
    }
    Overloads overloads;
    if (const auto found = names_.find(name); found != names_.end()) {
      // The overload without a name is the default one and is tried first.
      for (const bool plain : {true, false}) {
        for (const auto& op : found->second) {
          if (op.overload_name.empty() != plain) continue;
          auto handle = c10::Dispatcher::singleton().findSchema(op);
          if (handle && (!is_computing_operator(name) || has_tensors(handle->schema())))
            overloads.push_back(*handle);
        }
      }
    } else {
      return nullptr;  // not cached: peers may send any text
    }
    auto& kept = known_[std::string(name)];
    kept = std::move(overloads);
    return kept.empty() ? nullptr : &kept;
  }
  void forget_names() {
    const std::unique_lock lock(mutex_);
    names_.clear();
  }
  void allow(const std::string& name) {
    const std::unique_lock lock(mutex_);
    allowed_.insert(name);
  }
  bool allows(std::string_view name) {
    if (is_computing_operator(name)) return true;
    const std::shared_lock lock(mutex_);
    return allowed_.contains(name);
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::string, std::vector<c10::OperatorName>, std::less<>> names_;
  std::map<std::string, Overloads, std::less<>> known_;  // never shrinks: references stay good
  std::set<std::string, std::less<>> allowed_;           // besides those that compute
};
Operators& operators() {
  static auto* all = new Operators;
  return *all;
}

template <class T>
bool read_as(std::uint64_t hash, ValueInput& archive, c10::IValue& value) {
  if (hash != detail::type_hash<T>()) return false;
  T object{};
  archive(object);
  value = c10::IValue(std::move(object));
  return true;
}

c10::IValue read_value(ValueInput& archive, std::string_view name) {
  Tag tag{};
  archive.get(&tag, 1);
  switch (tag) {
    case Tag::boolean: return detail::get_number<std::uint8_t>(archive) != 0;
    case Tag::i8: return static_cast<std::int64_t>(detail::get_number<std::int8_t>(archive));
    case Tag::u8: return static_cast<std::int64_t>(detail::get_number<std::uint8_t>(archive));
    case Tag::i16: return static_cast<std::int64_t>(detail::get_number<std::int16_t>(archive));
    case Tag::u16: return static_cast<std::int64_t>(detail::get_number<std::uint16_t>(archive));
    case Tag::i32: return static_cast<std::int64_t>(detail::get_number<std::int32_t>(archive));
    case Tag::u32: return static_cast<std::int64_t>(detail::get_number<std::uint32_t>(archive));
    case Tag::i64: return detail::get_number<std::int64_t>(archive);
    case Tag::u64: return static_cast<std::int64_t>(detail::get_number<std::uint64_t>(archive));
    case Tag::f32: return static_cast<double>(detail::get_number<float>(archive));
    case Tag::f64: return detail::get_number<double>(archive);
    case Tag::object: break;
  }
  const auto hash = detail::get_number<std::uint64_t>(archive);
  c10::IValue value;
  if (read_as<at::Tensor>(hash, archive, value) || read_as<std::string>(hash, archive, value) ||
      read_as<std::vector<std::int64_t>>(hash, archive, value) ||
      read_as<std::vector<double>>(hash, archive, value) ||
      read_as<std::vector<at::Tensor>>(hash, archive, value))
    return value;
  throw ValueError("'" + std::string(name) +
                   "' is one of torch's operators: its arguments are tensors, numbers, text and "
                   "vectors of int64_t, double or " +
                   "at::Tensor; " + detail::known_type(hash) + " was given");
}

/// The tensor itself where its elements lie side by side, each in a place of its own; else a copy
/// that is so, through which gradients pass.
at::Tensor dense(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_non_overlapping_and_dense())
    return tensor;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

c10::IValue dense(c10::IValue value) {
  if (value.isTensor()) return dense(value.toTensor());
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> tensors = value.toTensorVector();
  for (at::Tensor& tensor : tensors) tensor = dense(tensor);
  return tensors;
}

bool fits(const c10::IValue& value, const c10::Argument& argument) {
  const auto& type = argument.type();
  if (value.isTensor())
    return type->kind() == c10::TypeKind::TensorType || type->kind() == c10::TypeKind::OptionalType
               ? value.type()->isSubtypeOf(*type)
               : false;
  return value.type()->isSubtypeOf(*type);
}

/// Arguments whose numbers must be below a bound, by their name: some overloads have plain numbers
/// for a dtype, a layout or a memory format, which torch looks up without checking. Of layouts only
/// strided ones travel, and kernels of others fail on memory that they do not have. Kernels take
/// any number for a reduction (none, mean, sum) and then store nothing, and make any number of
/// sections.
constexpr std::pair<std::string_view, std::int64_t> kBounds[] = {
    {"dtype", static_cast<std::int64_t>(c10::ScalarType::NumOptions)},
    {"layout", static_cast<std::int64_t>(c10::Layout::Strided) + 1},
    {"memory_format", static_cast<std::int64_t>(c10::MemoryFormat::NumOptions)},
    {"reduction", 3},
    {"sections", 1 << 16}};

std::string_view kind_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: return "dtype";
    case c10::TypeKind::LayoutType: return "layout";
    case c10::TypeKind::MemoryFormatType: return "memory_format";
    default: return argument.name();
  }
}

/// Whether a number is within its argument's bound.
bool is_in_bounds(const c10::IValue& value, const c10::Argument& argument) {
  if (!value.isInt()) return true;
  const std::string_view kind = kind_of(argument);
  const auto* const row =
      std::ranges::find(kBounds, kind, [](const auto& each) { return each.first; });
  if (row == std::end(kBounds)) return true;
  if (kind == "dtype" && value.toInt() == static_cast<std::int64_t>(c10::ScalarType::Undefined))
    return false;
  return value.toInt() >= 0 && value.toInt() < row->second;
}

/// Fills the stack for this overload: the given arguments, then defaults. False if they do not
/// match.
bool complete(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given,
              torch::jit::Stack& stack) {
  const auto& arguments = schema.arguments();
  if (given.size() > arguments.size()) return false;
  for (std::size_t i = 0; i < given.size(); ++i) {
    auto value = given[i];
    // As elsewhere in torch, an integer is accepted for a float.
    if (value.isInt() && arguments[i].type()->kind() == c10::TypeKind::FloatType)
      value = static_cast<double>(value.toInt());
    if (!fits(value, arguments[i]) || !is_in_bounds(value, arguments[i])) return false;
    stack.push_back(std::move(value));
  }
  for (std::size_t i = given.size(); i < arguments.size(); ++i) {
    if (!arguments[i].default_value()) return false;
    stack.push_back(*arguments[i].default_value());
  }
  return true;
}

void put_values(Value& value, Passage& passage, const torch::jit::Stack& results,
                std::string_view name) {
  if (results.empty()) return;
  if (results.size() > 1) {
    std::vector<at::Tensor> tensors;
    for (const auto& result : results) {
      if (!result.isTensor())
        throw DistError("'" + std::string(name) +
                            "' returns several values that are not all tensors: they do not travel",
                        Code::unsupported);
      tensors.push_back(result.toTensor());
    }
    return detail::put_result(value, passage, tensors);
  }
  const auto& result = results.front();
  if (result.isTensor()) return detail::put_result(value, passage, result.toTensor());
  if (result.isBool()) return detail::put_result(value, passage, result.toBool());
  if (result.isInt()) return detail::put_result(value, passage, result.toInt());
  if (result.isDouble()) return detail::put_result(value, passage, result.toDouble());
  if (result.isString())
    return detail::put_result(value, passage, std::string(result.toStringRef()));
  if (result.isTensorList()) return detail::put_result(value, passage, result.toTensorVector());
  if (result.isNone()) return;
  throw DistError(
      "'" + std::string(name) + "' returns " + result.tagKind() + ", which does not travel",
      Code::unsupported);
}

}  // namespace

bool is_operator(std::string_view name) {
  return name.find("::") != std::string_view::npos && operators().find(name) != nullptr;
}

bool is_allowed_operator(std::string_view name) { return operators().allows(name); }

void allow_operator(const std::string& name) {
  operators().forget_names();  // libraries loaded since may have added some
  if (!is_operator(name)) {
    group::invalid("allow_operator: torch has no operator '" + name +
                   "'; give its namespace and name without an overload (\"aten::add\"), and load "
                   "the library that defines it first");
  }
  operators().allow(name);
}

torch::jit::Stack call_operator(std::string_view name, std::vector<c10::IValue> given) {
  for (auto& value : given) value = dense(std::move(value));
  const Overloads& overloads = *operators().find(name);
  for (const auto& overload : overloads) {
    torch::jit::Stack stack;
    if (!complete(overload.schema(), given, stack)) continue;
    overload.callBoxed(stack);
    return stack;
  }
  std::string wanted;
  for (const auto& overload : overloads) {
    std::ostringstream text;
    text << overload.schema();
    wanted += "\n  " + text.str();
  }
  group::invalid("no overload of '" + std::string(name) + "' takes the " +
                 std::to_string(given.size()) + " arguments that were given; there are" + wanted);
}

void serve_operator(Request& request) {
  const auto& name = request.parcel.name;
  if (!is_allowed_operator(name)) {
    throw DistError("'" + name +
                        "' is not among the operators that other workers may call by name: those "
                        "compute tensors and touch nothing else. Call allow_operator(\"" +
                        name + "\") on this worker, or register a function that calls it",
                    Code::refused);
  }
  ValueInput archive(request.parcel.value, *request.passage);
  std::uint8_t count = 0;
  archive.get(&count, 1);
  std::vector<c10::IValue> given;
  for (int i = 0; i < count; ++i) given.push_back(read_value(archive, name));
  if (archive.left() > 0) detail::too_long(name);
  request.parcel.value.tensors.clear();
  const torch::jit::Stack results = call_operator(name, std::move(given));
  if (request.responder)
    request.responder->reply(
        [&](Value& value, Passage& passage) { put_values(value, passage, results, name); });
}

}  // namespace muster::rpc

// SPDX-License-Identifier: BSD-3-Clause
#include "rpc_values.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cereal/types/vector.hpp>
#include <optional>
#include <utility>
#include <variant>

#include "bindings.h"
#include "core/group/errors.h"
#include "muster/rpc_future.h"
#include "no_gil.h"
#include "rpc/wire/remote_exception.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using rpc::Value;
using rpc::ValueDelivery;
using rpc::detail::Tag;

constexpr const char* kOurs = "muster::DistError";

/// Any object but a tensor, as it is kept.
struct Kept {
  std::shared_ptr<py::object> object;
};

const Inside* functions = nullptr;  // never released: threads may use it until the process exits

py::list list_of(std::vector<rpc::RRef<Anything>> references) {
  py::list all;
  for (auto& each : references) all.append(std::make_shared<Reference>(Reference{std::move(each)}));
  return all;
}

template <class T>
bool unpack_as(std::uint64_t hash, rpc::ValueInput& archive, py::object& value) {
  if (hash != rpc::detail::type_hash<T>()) return false;
  T object{};
  archive(object);
  value = py::cast(std::move(object));
  return true;
}

/// Reads a result that rpc::detail::put_result wrote.
py::object read(const std::string& function, const Value& from, ValueDelivery& delivery) {
  rpc::ValueInput archive(from, delivery);
  if (archive.left() == 0) return py::none();
  Tag tag{};
  archive.get(&tag, 1);
  switch (tag) {
    case Tag::boolean: return py::bool_(rpc::detail::get_number<std::uint8_t>(archive) != 0);
    case Tag::i8: return py::int_(rpc::detail::get_number<std::int8_t>(archive));
    case Tag::u8: return py::int_(rpc::detail::get_number<std::uint8_t>(archive));
    case Tag::i16: return py::int_(rpc::detail::get_number<std::int16_t>(archive));
    case Tag::u16: return py::int_(rpc::detail::get_number<std::uint16_t>(archive));
    case Tag::i32: return py::int_(rpc::detail::get_number<std::int32_t>(archive));
    case Tag::u32: return py::int_(rpc::detail::get_number<std::uint32_t>(archive));
    case Tag::i64: return py::int_(rpc::detail::get_number<std::int64_t>(archive));
    case Tag::u64: return py::int_(rpc::detail::get_number<std::uint64_t>(archive));
    case Tag::f32: return py::float_(rpc::detail::get_number<float>(archive));
    case Tag::f64: return py::float_(rpc::detail::get_number<double>(archive));
    case Tag::object: break;
  }
  const auto hash = rpc::detail::get_number<std::uint64_t>(archive);
  if (hash == rpc::detail::type_hash<Pickled>()) {
    Pickled pickle;
    archive(pickle);
    return unpickled(std::move(pickle));
  }
  py::object value;
  if (unpack_as<at::Tensor>(hash, archive, value) || unpack_as<std::string>(hash, archive, value) ||
      unpack_as<std::vector<std::int64_t>>(hash, archive, value) ||
      unpack_as<std::vector<double>>(hash, archive, value) ||
      unpack_as<std::vector<at::Tensor>>(hash, archive, value))
    return value;
  throw DistError("the result of '" + function + "' is " + rpc::detail::known_type(hash) +
                  ", which Python has not: numbers, text, tensors and lists of them travel between "
                  "the two languages");
}

/// An exception as `describe` of inside.py tells of it.
rpc::ErrorText text_of(const py::handle& exception) {
  rpc::ErrorText text;
  try {
    const auto told = inside().describe(exception).cast<py::tuple>();
    text.type = told[0].cast<std::string>();
    text.text = told[1].cast<std::string>();
    text.trace = told[2].cast<std::string>();
    if (!told[3].is_none()) {
      text.type = kOurs;
      for (const int rank : told[3].cast<std::vector<int>>()) text.ranks.push_back(rank);
      text.code = static_cast<std::uint8_t>(code_of(told[4].cast<std::string>()));
    }
  } catch (const std::exception& trouble) {
    text.type = "builtins.RuntimeError";
    text.text = std::string("an exception that cannot be described: ") + trouble.what();
  }
  return text;
}

[[noreturn]] void raise_object(const py::object& error) {
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

}  // namespace

void set_inside(Inside given) { functions = new Inside(std::move(given)); }

const Inside& inside() {
  if (functions == nullptr)
    throw DistError(
        "a call of a Python function has come, and this worker has not imported muster.rpc");
  return *functions;
}

// ---- objects

Pickled pickled(py::handle object) {
  const auto parts = inside().dumps(object).cast<py::tuple>();
  Pickled pickle;
  pickle.bytes = parts[0].cast<std::string>();
  for (const auto& tensor : parts[1].cast<py::list>())
    pickle.tensors.push_back(tensor.cast<at::Tensor>());
  for (const auto& reference : parts[2].cast<py::list>())
    pickle.references.push_back(reference.cast<ReferenceRef>()->rref);
  return pickle;
}

py::object unpickled(Pickled pickle) {
  return inside().loads(py::bytes(pickle.bytes), py::cast(std::move(pickle.tensors)),
                        list_of(std::move(pickle.references)));
}

rpc::KeptValue keep(const py::object& object) {
  // torch returns the same Python object for the same tensor, so the caller gets its own object
  // back.
  if (THPVariable_Check(object.ptr()))
    return rpc::kept_of<at::Tensor>(THPVariable_Unpack(object.ptr()));
  rpc::KeptValue value;
  value.type = &typeid(Kept);
  auto held = kept(object);
  value.object = std::make_shared<Kept>(Kept{held});
  value.pack = [held](Value& to, ValueDelivery& delivery) {
    Pickled pickle;
    std::exception_ptr error;
    {
      const py::gil_scoped_acquire acquired;
      try {
        pickle = pickled(*held);
      } catch (const py::error_already_set& thrown) {
        error = described(thrown);
      }
    }
    if (error) std::rethrow_exception(error);
    rpc::detail::put_result(to, delivery, pickle);
  };
  return value;
}

py::object object_of(const rpc::KeptValue& value) {
  if (*value.type == typeid(Kept)) return *std::static_pointer_cast<Kept>(value.object)->object;
  if (*value.type == typeid(at::Tensor))
    return py::cast(*std::static_pointer_cast<at::Tensor>(value.object));
  if (!value.pack) rpc::detail::cannot_travel(*value.type);
  // The value of a C++ function: packed and read as if it had travelled.
  Value packed;
  ValueDelivery delivery;
  value.pack(packed, delivery);
  return read("remote", packed, delivery);
}

py::object result_of(const std::string& function, const rpc::detail::Answer& answer) {
  return read(function, answer.value, *answer.delivery);
}

std::function<void(Value&, ValueDelivery&)> plain_arguments(const std::string& function,
                                                            const py::sequence& arguments) {
  using Plain =
      std::variant<bool, std::int64_t, double, std::string, at::Tensor, std::vector<std::int64_t>,
                   std::vector<double>, std::vector<at::Tensor>>;
  std::vector<Plain> all;
  for (const auto& given : arguments) {
    const bool listed = py::isinstance<py::list>(given) || py::isinstance<py::tuple>(given);
    const py::object first =
        listed && py::len(given) > 0
            ? py::object(py::sequence(py::reinterpret_borrow<py::object>(given))[0])
            : py::reinterpret_borrow<py::object>(given);
    if (py::isinstance<py::bool_>(given)) {
      all.emplace_back(given.cast<bool>());
    } else if (py::isinstance<py::int_>(given)) {
      all.emplace_back(given.cast<std::int64_t>());
    } else if (py::isinstance<py::float_>(given)) {
      all.emplace_back(given.cast<double>());
    } else if (py::isinstance<py::str>(given)) {
      all.emplace_back(given.cast<std::string>());
    } else if (THPVariable_Check(given.ptr())) {
      all.emplace_back(given.cast<at::Tensor>());
    } else if (listed && THPVariable_Check(first.ptr())) {
      all.emplace_back(given.cast<std::vector<at::Tensor>>());
    } else if (listed && py::isinstance<py::float_>(first)) {
      all.emplace_back(given.cast<std::vector<double>>());
    } else if (listed && (py::len(given) == 0 || py::isinstance<py::int_>(first))) {
      all.emplace_back(given.cast<std::vector<std::int64_t>>());
    } else {
      throw DistError(
          "'" + function +
          "' is called by its name: it takes numbers, text, tensors and lists of int, float or "
          "Tensor, not " +
          py::repr(py::type::of(py::reinterpret_borrow<py::object>(given))).cast<std::string>());
    }
  }
  return [all = std::move(all)](Value& value, ValueDelivery& delivery) {
    rpc::ValueOutput archive(value, delivery);
    const auto count = static_cast<std::uint8_t>(all.size());
    archive.put(&count, 1);
    for (const Plain& each : all)
      std::visit([&archive](const auto& plain) { rpc::detail::put_typed(archive, plain); }, each);
  };
}

// ---- exceptions

std::exception_ptr described(const py::object& error) {
  return std::make_exception_ptr(rpc::DescribedError(text_of(error)));
}
std::exception_ptr described(const py::error_already_set& error) {
  const py::object value = error.value();
  if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
  return described(value);
}

void raise_in_python(const std::exception_ptr& thrown) {
  const auto with = [&](const std::string& worker, int id, const rpc::ErrorText& text) {
    const auto fallback = error_object(thrown);
    return inside()
        .error(fallback, worker, id, text.type, text.text, text.trace)
        .cast<py::object>();
  };
  std::optional<py::object> error;
  try {
    std::rethrow_exception(thrown);
  } catch (const rpc::RemoteError& remote) {
    rpc::ErrorText text;
    text.type = remote.type();
    text.text = remote.text();
    text.trace = remote.trace();
    error = with(remote.worker(), remote.worker_id(), text);
  } catch (const rpc::DescribedError& here) {
    const auto self = rpc::get_worker_info();
    error = with(self.name(), self.id(), here.described());
  } catch (...) {
    error = error_object(thrown);
  }
  raise_object(*error);
}

// ---- results

Outcome outcome(const rpc::ResponderRef& responder, py::object result) {
  Outcome made;
  try {
    if (responder->keeps()) {
      made.kept = keep(result);
    } else {
      made.pickle = pickled(result);
    }
  } catch (const py::error_already_set& thrown) {
    made.error = described(thrown);
  } catch (const std::exception&) {
    made.error = std::current_exception();
  }
  return made;
}

void answer(const rpc::ResponderRef& responder, const Outcome& outcome) {
  if (outcome.error) return responder->fail(outcome.error);
  if (outcome.kept.type != nullptr) return responder->keep(outcome.kept);
  responder->reply([&](Value& value, ValueDelivery& delivery) {
    rpc::detail::put_result(value, delivery, outcome.pickle);
  });
}

}  // namespace muster::python

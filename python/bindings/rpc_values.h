// SPDX-License-Identifier: BSD-3-Clause
/// Python's objects in calls to other workers: pickled, with their tensors and references beside
/// the pickle, or kept where they were made. How Python describes and makes exceptions, pickles and
/// serves stands in muster/rpc/inside.py, which gives its functions to this module when it is
/// imported.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/rref.h"

namespace muster::python {

void bind_rpc(pybind11::module_& module);
void bind_rpc_autograd(pybind11::module_& module);

/// Converts it to a Python exception (errors.cc). Requires the GIL.
pybind11::object error_object(const std::exception_ptr& thrown);

/// The value type of Python's references: any object.
struct Anything {};

/// Python's RRef.
struct Reference {
  rpc::RRef<Anything> rref;
};
using ReferenceRef = std::shared_ptr<Reference>;

/// A pickle and what it names by position.
struct Pickled {
  std::string bytes;
  std::vector<at::Tensor> tensors;
  std::vector<rpc::RRef<Anything>> references;

  template <class Archive>
  void serialize(Archive& archive) {
    archive(bytes, tensors, references);
  }
};

/// The functions of muster/rpc/inside.py.
struct Inside {
  pybind11::object dumps;     ///< (object) -> (bytes, tensors, references)
  pybind11::object loads;     ///< (bytes, tensors, references) -> object
  pybind11::object serve;     ///< (bytes, tensors, references, answer) -> the result, or `later`
  pybind11::object later;     ///< the result comes by `answer`
  pybind11::object describe;  ///< (exception) -> (type, text, traceback, ranks, code)
  pybind11::object error;  ///< (what to raise where its type is not known here, worker, id, type,
                           ///< text, traceback) -> exception
  pybind11::object complete;  ///< (future, call): gives the future what the call has come to
};
void set_inside(Inside functions);
/// Throws DistError before muster.rpc was imported.
const Inside& inside();

// ---- all of these with the GIL held

Pickled pickled(pybind11::handle object);
pybind11::object unpickled(Pickled pickle);

/// The object as a kept value of this worker: a tensor as C++ keeps it, anything else unchanged.
rpc::KeptValue keep(const pybind11::object& object);
/// A kept value as a Python object.
pybind11::object object_of(const rpc::KeptValue& value);

/// A reply as a Python object: of a Python function, a C++ function, or one of torch's operators.
pybind11::object result_of(const std::string& function, const rpc::detail::Answer& answer);

/// Packs arguments for a function that is named by text: numbers, text, tensors, and lists of int,
/// float or Tensor.
std::function<void(rpc::Value&, rpc::ValueDelivery&)> plain_arguments(
    const std::string& function, const pybind11::sequence& arguments);

/// A Python exception as it goes to other workers.
std::exception_ptr described(const pybind11::error_already_set& error);
std::exception_ptr described(const pybind11::object& error);
/// Raises a remote (or local) exception in Python, with its own type if that is known here, and
/// with `worker`, `remote_type`, `remote_text` and `remote_traceback`.
[[noreturn]] void raise_in_python(const std::exception_ptr& error);

/// A result to be sent or kept; created with the GIL, used without it.
struct Outcome {
  Pickled pickle;
  rpc::KeptValue kept;
  std::exception_ptr error;
};
Outcome outcome(const rpc::ResponderRef& responder, pybind11::object result);
void answer(const rpc::ResponderRef& responder, const Outcome& outcome);

}  // namespace muster::python

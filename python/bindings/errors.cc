// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/errors.h"

#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "muster/spawn.h"
#include "muster/store.h"
#include "rpc_values.h"

namespace muster::python {
namespace {

namespace py = pybind11;

/// The exception classes; held for ever.
struct Classes {
  PyObject *error, *argument, *backend, *network, *store, *queue_empty, *spawn;
};
Classes classes{};

PyObject* make(py::module_& module, const char* name, PyObject* base, const char* doc) {
  PyObject* made =
      PyErr_NewExceptionWithDoc((std::string("muster.") + name).c_str(), doc, base, nullptr);
  if (made == nullptr) throw py::error_already_set();
  module.add_object(name, py::reinterpret_borrow<py::object>(made));
  return made;
}

void raise(PyObject* type, const DistError& error) {
  py::object made = py::reinterpret_borrow<py::object>(type)(error.what());
  made.attr("ranks") = error.ranks();
  made.attr("code") = code_name(error.code());
  PyErr_SetObject(type, made.ptr());
}

/// Sets the Python error for an exception of muster; rethrows any other.
void raise_or_rethrow(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const SpawnError& error) {
    raise(classes.spawn, error);
  } catch (const DistBackendError& error) {
    raise(classes.backend, error);
  } catch (const DistNetworkError& error) {
    raise(classes.network, error);
  } catch (const QueueEmptyError& error) {
    raise(classes.queue_empty, error);
  } catch (const DistStoreError& error) {
    raise(classes.store, error);
  } catch (const DistError& error) {
    raise(error.code() == Code::invalid_argument ? classes.argument : classes.error, error);
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  classes.error =
      make(module, "DistError", PyExc_RuntimeError,
           "The base of all. `ranks`: those at fault; `code`: what kind of failure, as a word.");
  py::object base = py::reinterpret_borrow<py::object>(classes.error);
  base.attr("ranks") = py::tuple();  // for errors that a program constructs itself
  base.attr("code") = "";
  const auto both = py::make_tuple(py::handle(classes.error), py::handle(PyExc_ValueError));
  classes.argument = make(module, "DistArgumentError", both.ptr(),
                          "A wrong argument, or a call out of its turn: a ValueError too.");
  classes.backend = make(module, "DistBackendError", classes.error,
                         "An operation failed, or the backend does not have it.");
  classes.network = make(module, "DistNetworkError", classes.error,
                         "A socket, an address or a handshake failed.");
  classes.store = make(module, "DistStoreError", classes.error,
                       "A store, or the initialisation that goes through it, failed.");
  classes.queue_empty = make(module, "QueueEmptyError", classes.store,
                             "`queue_pop` was not to wait, and the queue was empty.");
  classes.spawn = make(module, "SpawnError", classes.error, "A rank of a spawn failed.");
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    if (thrown) raise_or_rethrow(thrown);
  });
}

py::object error_object(const std::exception_ptr& thrown) {
  const auto plain = [](PyObject* type, const char* text) { PyErr_SetString(type, text); };
  try {
    raise_or_rethrow(thrown);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const c10::Error& error) {
    plain(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    plain(PyExc_MemoryError, error.what());
  } catch (const std::out_of_range& error) {
    plain(PyExc_IndexError, error.what());
  } catch (const std::overflow_error& error) {
    plain(PyExc_OverflowError, error.what());
  } catch (const std::invalid_argument& error) {
    plain(PyExc_ValueError, error.what());
  } catch (const std::domain_error& error) {
    plain(PyExc_ValueError, error.what());
  } catch (const std::length_error& error) {
    plain(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    plain(PyExc_RuntimeError, error.what());
  } catch (...) {
    plain(PyExc_RuntimeError, "something that is no std::exception was thrown");
  }
  const py::error_already_set made;
  return made.value();
}

Code code_of(const std::string& word) {
  for (int i = 0; i <= static_cast<int>(Code::internal); ++i) {
    if (word == code_name(static_cast<Code>(i))) return static_cast<Code>(i);
  }
  return Code::internal;
}

void throw_in_python() {
  const py::gil_scoped_acquire held;
  raise_or_rethrow(std::current_exception());
  throw py::error_already_set();
}

}  // namespace muster::python

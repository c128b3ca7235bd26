// SPDX-License-Identifier: BSD-3-Clause
/// Ownership rules that involve the GIL: C++ objects whose destructors join threads (the last owner
/// of a group closes its job's connections), and Python objects owned by C++.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace muster::python {

/// For a class_<T, std::shared_ptr<T>>: if Python frees the last owner of a T, the T is destroyed
/// without the GIL. Its destructor sends close frames to peers and joins threads, which takes up to
/// a second. Those threads, and Python's other threads, may need the GIL.
template <class T>
pybind11::custom_type_setup let_go_without_gil() {
  return pybind11::custom_type_setup([](PyHeapTypeObject* type) {
    static destructor free_object = nullptr;
    free_object =
        type->ht_type.tp_base->tp_dealloc;  // all of pybind11's types have the one of their base
    type->ht_type.tp_dealloc = [](PyObject* self) {
      std::shared_ptr<T> kept;
      const auto value =
          reinterpret_cast<pybind11::detail::instance*>(self)->get_value_and_holder();
      if (value.holder_constructed()) kept = value.template holder<std::shared_ptr<T>>();
      free_object(self);
      if (kept.use_count() != 1)
        return;  // Python's owner was not the last, as is always the case for `group.WORLD`
      const pybind11::gil_scoped_release released;
      kept.reset();
    };
  });
}

inline bool is_python_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

/// A Python object owned by C++, which may be released on any thread.
inline std::shared_ptr<pybind11::object> kept(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* each) {
            if (is_python_ending()) return;  // it takes everything along
            const pybind11::gil_scoped_acquire held;
            delete each;
          }};
}

}  // namespace muster::python

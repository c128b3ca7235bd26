// SPDX-License-Identifier: BSD-3-Clause
#include "python_store.h"

#include <pybind11/chrono.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "faces/compat/torch_store.h"
#include "no_gil.h"

namespace muster::python {
namespace {

namespace py = pybind11;

using Bytes = std::vector<std::uint8_t>;
using Keys = std::vector<std::string>;
using Values = std::vector<Bytes>;

py::bytes bytes_of(const Bytes& value) {
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}
/// Takes str and bytes.
Bytes value_of(const py::handle& object) {
  const auto text = object.cast<std::string>();
  return {text.begin(), text.end()};
}

/// Presents a Python object's methods as one of torch's stores. `adapt_store` builds barriers and
/// gathers on top of them.
class PythonStore final : public c10d::Store {
 public:
  /// `object` keeps the Python object of `self` alive. Null if that object owns this store.
  PythonStore(const muster::Store* self, std::shared_ptr<py::object> object)
      : self_(self), object_(std::move(object)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<PythonStore>(self_, object_);
  }
  void set(const std::string& key, const Bytes& value) override { call<void>("set", key, value); }
  Bytes get(const std::string& key) override { return call<Bytes>("get", key); }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return call<std::int64_t>("add", key, amount);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return call<Bytes>("compare_set", key, expected, desired);
  }
  bool deleteKey(const std::string& key) override { return call<bool>("delete_key", key); }
  std::int64_t getNumKeys() override { return call<std::int64_t>("num_keys"); }
  bool check(const Keys& keys) override { return call<bool>("check", keys); }
  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    if (has("wait")) return call<void>("wait", keys, timeout);
    for (const auto& key : keys) get(key);
  }
  void append(const std::string& key, const Bytes& value) override {
    call<void>("append", key, value);
  }
  // A class without these has its `get` and `set` called for each key.
  Values multiGet(const Keys& keys) override {
    return has("multi_get") ? call<Values>("multi_get", keys) : Store::multiGet(keys);
  }
  void multiSet(const Keys& keys, const Values& values) override {
    if (has("multi_set")) return call<void>("multi_set", keys, values);
    Store::multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return true; }

 private:
  py::function method(const char* name) const { return py::get_override(self_, name); }
  bool has(const char* name) const {
    const py::gil_scoped_acquire held;
    return static_cast<bool>(method(name));
  }

  template <class T>
  static const T& argument(const T& value) {
    return value;
  }
  static py::bytes argument(const Bytes& value) { return bytes_of(value); }
  static std::vector<py::bytes> argument(const Values& values) {
    std::vector<py::bytes> all;
    for (const auto& value : values) all.push_back(bytes_of(value));
    return all;
  }

  template <class Result, class... Arguments>
  Result call(const char* name, const Arguments&... arguments) const {
    const py::gil_scoped_acquire held;
    const py::function found = method(name);
    if (!found) {
      const auto object = py::cast(self_, py::return_value_policy::reference);
      throw std::runtime_error(std::string(py::str(py::type::of(object).attr("__name__"))) +
                               ", a class derived from Store, has no method " + name);
    }
    const py::object result = found(argument(arguments)...);
    if constexpr (std::is_same_v<Result, Bytes>) {
      return value_of(result);
    } else if constexpr (std::is_same_v<Result, Values>) {
      Values all;
      for (const auto& each : result) all.push_back(value_of(each));
      return all;
    } else if constexpr (!std::is_void_v<Result>) {
      return result.cast<Result>();
    }
  }

  const muster::Store* const self_;
  const std::shared_ptr<py::object> object_;
};

std::shared_ptr<store::Store> engine_of(const Store* self, std::shared_ptr<py::object> object) {
  return compat::adapt_store(c10::make_intrusive<PythonStore>(self, std::move(object)));
}

}  // namespace

DerivedStore::DerivedStore() : Store(engine_of(this, nullptr)) {}

std::shared_ptr<Store> kept_store(const std::shared_ptr<Store>& store) {
  if (dynamic_cast<const DerivedStore*>(store.get()) == nullptr) return store;
  return std::make_shared<Store>(engine_of(store.get(), kept(py::cast(store))));
}

}  // namespace muster::python

#include <pybind11/chrono.h>

#include "bindings.h"
#include "blocking.h"
#include "muster/group/store.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Limit = std::optional<Duration>;

std::vector<py::bytes> as_bytes(const std::vector<std::string>& values) { return {values.begin(), values.end()}; }

}  // namespace

void bind_stores(py::module_& module) {
  py::class_<Store, std::shared_ptr<Store>>(module, "Store",
                                            "Keys and values that all ranks see. Values are text or bytes, and come back as bytes.")
      .def(
          "set", [](Store& self, std::string_view key, std::string_view value) { blocking_on_store([&] { self.set(key, value); }); },
          py::arg("key"), py::arg("value"))
      .def(
          "get", [](Store& self, std::string_view key) { return py::bytes(blocking_on_store([&] { return self.get(key); })); },
          py::arg("key"))
      .def(
          "add",
          [](Store& self, std::string_view key, std::int64_t amount) { return blocking_on_store([&] { return self.add(key, amount); }); },
          py::arg("key"), py::arg("amount"))
      .def(
          "compare_set",
          [](Store& self, std::string_view key, std::string_view expected, std::string_view desired) {
            return py::bytes(blocking_on_store([&] { return self.compare_set(key, expected, desired); }));
          },
          py::arg("key"), py::arg("expected_value"), py::arg("desired_value"))
      .def(
          "wait", [](Store& self, const Store::Keys& keys, Limit timeout) { blocking_on_store([&] { self.wait(keys, timeout); }); },
          py::arg("keys"), py::arg("timeout") = py::none())
      .def("num_keys", [](Store& self) { return blocking_on_store([&] { return self.num_keys(); }); })
      .def(
          "delete_key", [](Store& self, std::string_view key) { return blocking_on_store([&] { return self.delete_key(key); }); },
          py::arg("key"))
      .def("set_timeout", &Store::set_timeout, py::arg("timeout"))
      .def_property_readonly("timeout", &Store::timeout)
      .def(
          "check", [](Store& self, const Store::Keys& keys) { return blocking_on_store([&] { return self.check(keys); }); },
          py::arg("keys"))
      .def(
          "append", [](Store& self, std::string_view key, std::string_view value) { blocking_on_store([&] { self.append(key, value); }); },
          py::arg("key"), py::arg("value"))
      .def(
          "multi_get",
          [](Store& self, const Store::Keys& keys) { return as_bytes(blocking_on_store([&] { return self.multi_get(keys); })); },
          py::arg("keys"))
      .def(
          "multi_set",
          [](Store& self, const Store::Keys& keys, const std::vector<std::string>& values) {
            blocking_on_store([&] { self.multi_set(keys, values); });
          },
          py::arg("keys"), py::arg("values"))
      .def(
          "queue_push",
          [](Store& self, std::string_view key, std::string_view value) { blocking_on_store([&] { self.queue_push(key, value); }); },
          py::arg("key"), py::arg("value"))
      .def(
          "queue_pop",
          [](Store& self, std::string_view key, bool block) {
            return py::bytes(blocking_on_store([&] { return self.queue_pop(key, block); }));
          },
          py::arg("key"), py::arg("block") = true)
      .def(
          "queue_len", [](Store& self, std::string_view key) { return blocking_on_store([&] { return self.queue_len(key); }); },
          py::arg("key"))
      .def("list_keys", [](Store& self) { return blocking_on_store([&] { return self.list_keys(); }); })
      .def("clone", [](Store& self) { return blocking_on_store([&] { return self.clone(); }); })
      .def(
          "barrier",
          [](Store& self, std::string_view key, int members, Limit timeout) {
            blocking_on_store([&] { self.barrier(key, members, timeout); });
          },
          py::arg("key"), py::arg("world_size"), py::arg("timeout") = py::none())
      .def(
          "all_gather",
          [](Store& self, std::string_view key, int index, int members, std::string_view value, Limit timeout) {
            return as_bytes(blocking_on_store([&] { return self.all_gather(key, index, members, value, timeout); }));
          },
          py::arg("key"), py::arg("index"), py::arg("members"), py::arg("value"), py::arg("timeout") = py::none());

  py::class_<TCPStore, Store, std::shared_ptr<TCPStore>>(module, "TCPStore")
      .def(py::init([](std::string host_name, std::uint16_t port, std::optional<int> world_size, bool is_master, Duration timeout,
                       bool wait_for_workers, bool multi_tenant, std::optional<int> master_listen_fd) {
             const TCPStoreOptions options{world_size, is_master, timeout, wait_for_workers, multi_tenant, master_listen_fd};
             return blocking_on_store([&] { return std::make_shared<TCPStore>(std::move(host_name), port, options); });
           }),
           py::arg("host_name"), py::arg("port"), py::arg("world_size") = py::none(), py::arg("is_master") = false,
           py::arg("timeout") = store::kDefaultTimeout, py::arg("wait_for_workers") = true, py::arg("multi_tenant") = false,
           py::arg("master_listen_fd") = py::none())
      .def_property_readonly("host", &TCPStore::host)
      .def_property_readonly("port", &TCPStore::port);
  py::class_<FileStore, Store, std::shared_ptr<FileStore>>(module, "FileStore")
      .def(py::init<std::string, int>(), py::arg("file_name"), py::arg("world_size") = -1)
      .def_property_readonly("path", &FileStore::path);
  py::class_<HashStore, Store, std::shared_ptr<HashStore>>(module, "HashStore").def(py::init<>());
  py::class_<PrefixStore, Store, std::shared_ptr<PrefixStore>>(module, "PrefixStore")
      .def(py::init<std::string, std::shared_ptr<Store>>(), py::arg("prefix"), py::arg("store"))
      .def_property_readonly("underlying_store", &PrefixStore::underlying_store);
}

}  // namespace muster::python

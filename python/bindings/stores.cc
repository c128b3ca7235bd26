// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/chrono.h>

#include "bindings.h"
#include "blocking.h"
#include "muster/store.h"
#include "python_store.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Limit = std::optional<Duration>;

std::vector<py::bytes> as_bytes(const std::vector<std::string>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

void bind_stores(py::module_& module) {
  py::class_<Store, DerivedStore, std::shared_ptr<Store>>(
      module, "Store",
      "Keys and values that all ranks see. Values are text or bytes, and come back as bytes. A "
      "subclass implements `set(key, value)`, `get(key)`, which blocks until the key exists, and "
      "`add(key, amount)`; if they are used, also `compare_set(key, expected, desired)`, "
      "`check(keys)`, `wait(keys, timeout)`, `delete_key(key)`, `num_keys()` and `append(key, "
      "value)`. Its `multi_get(keys)` and `multi_set(keys, values)` are called where it has them, "
      "else `get` and `set` for each key. Values are passed to it as bytes. It is called on any "
      "thread, with the GIL.")
      .def(py::init_alias<>())
      .def(
          "set",
          [](Store& self, std::string_view key, std::string_view value) {
            blocking_on_store([&] { self.set(key, value); });
          },
          py::arg("key"), py::arg("value"),
          "Overwrites. key: text; value: text or bytes, up to 1 GiB.")
      .def(
          "get",
          [](Store& self, std::string_view key) {
            return py::bytes(blocking_on_store([&] { return self.get(key); }));
          },
          py::arg("key"),
          "The value as bytes. Blocks until the key is there; raises DistStoreError at the "
          "timeout, naming it.")
      .def(
          "add",
          [](Store& self, std::string_view key, std::int64_t amount) {
            return blocking_on_store([&] { return self.add(key, amount); });
          },
          py::arg("key"), py::arg("amount"),
          "Adds to a decimal number (missing: 0), returns the sum. Raises DistStoreError where the "
          "value is no number.")
      .def(
          "compare_set",
          [](Store& self, std::string_view key, std::string_view expected,
             std::string_view desired) {
            return py::bytes(
                blocking_on_store([&] { return self.compare_set(key, expected, desired); }));
          },
          py::arg("key"), py::arg("expected_value"), py::arg("desired_value"),
          "Writes where the value is expected_value, or the key is missing and that is empty; "
          "returns the value now "
          "stored, as bytes.")
      .def(
          "wait",
          [](Store& self, const Store::Keys& keys, Limit timeout) {
            blocking_on_store([&] { self.wait(keys, timeout); });
          },
          py::arg("keys"), py::arg("timeout") = py::none(),
          "Blocks until all keys are there, up to `timeout` (datetime.timedelta; None: the "
          "store's); raises "
          "DistStoreError naming those that are missing.")
      .def(
          "num_keys",
          [](Store& self) { return blocking_on_store([&] { return self.num_keys(); }); },
          "How many keys there are; TCPStore counts the one that coordinates its workers too.")
      .def(
          "delete_key",
          [](Store& self, std::string_view key) {
            return blocking_on_store([&] { return self.delete_key(key); });
          },
          py::arg("key"), "Whether there was such a key. FileStore raises DistStoreError.")
      .def("set_timeout", &Store::set_timeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>(),
           "Sets the timeout of this object's later calls: datetime.timedelta.")
      .def_property_readonly("timeout", &Store::timeout)
      .def(
          "check",
          [](Store& self, const Store::Keys& keys) {
            return blocking_on_store([&] { return self.check(keys); });
          },
          py::arg("keys"), "Whether all keys are there. Never blocks for them.")
      .def(
          "append",
          [](Store& self, std::string_view key, std::string_view value) {
            blocking_on_store([&] { self.append(key, value); });
          },
          py::arg("key"), py::arg("value"), "Puts the value behind the one that is there.")
      .def(
          "multi_get",
          [](Store& self, const Store::Keys& keys) {
            return as_bytes(blocking_on_store([&] { return self.multi_get(keys); }));
          },
          py::arg("keys"), "The values of several keys, as bytes; blocks until all are there.")
      .def(
          "multi_set",
          [](Store& self, const Store::Keys& keys, const std::vector<std::string>& values) {
            blocking_on_store([&] { self.multi_set(keys, values); });
          },
          py::arg("keys"), py::arg("values"), "As many values as keys, all at once.")
      .def(
          "queue_push",
          [](Store& self, std::string_view key, std::string_view value) {
            blocking_on_store([&] { self.queue_push(key, value); });
          },
          py::arg("key"), py::arg("value"), "Queues are apart from the keys.")
      .def(
          "queue_pop",
          [](Store& self, std::string_view key, bool block) {
            return py::bytes(blocking_on_store([&] { return self.queue_pop(key, block); }));
          },
          py::arg("key"), py::arg("block") = true,
          "First in, first out among all users, as bytes; with `block` waits for one, else raises "
          "QueueEmptyError where "
          "the queue is empty.")
      .def(
          "queue_len",
          [](Store& self, std::string_view key) {
            return blocking_on_store([&] { return self.queue_len(key); });
          },
          py::arg("key"), "How many values the queue has.")
      .def(
          "list_keys",
          [](Store& self) { return blocking_on_store([&] { return self.list_keys(); }); },
          "All keys.")
      .def(
          "has_extended_api", [](const Store&) { return true; },
          "True: every store has append, multi_get and multi_set.")
      .def(
          "clone", [](Store& self) { return blocking_on_store([&] { return self.clone(); }); },
          "Another user of the same data, with a connection of its own where there are "
          "connections.")
      .def(
          "barrier",
          [](Store& self, std::string_view key, int members, Limit timeout) {
            blocking_on_store([&] { self.barrier(key, members, timeout); });
          },
          py::arg("key"), py::arg("world_size"), py::arg("timeout") = py::none(),
          "Returns when `world_size` users have come under this key; datetime.timedelta, None: the "
          "store's timeout.")
      .def(
          "all_gather",
          [](Store& self, std::string_view key, int index, int members, std::string_view value,
             Limit timeout) {
            return as_bytes(blocking_on_store(
                [&] { return self.all_gather(key, index, members, value, timeout); }));
          },
          py::arg("key"), py::arg("index"), py::arg("members"), py::arg("value"),
          py::arg("timeout") = py::none(),
          "The values of `members` users, by index, as bytes: one request and one reply for each.");

  py::class_<TCPStore, Store, std::shared_ptr<TCPStore>>(
      module, "TCPStore",
      "A store that one process serves over TCP. host_name, port: of the server; port 0 picks a "
      "free one. world_size: how many users there "
      "will be; None or -1: any number. is_master: this process serves. timeout: "
      "datetime.timedelta. wait_for_workers: with a world_size "
      "the "
      "constructor waits for all of them. multi_tenant: instances of one process with the same "
      "address share a server. master_listen_fd: a "
      "socket that is bound already. use_libuv is taken for torch's sake; wait_for_worker is "
      "torch's old name of wait_for_workers. Raises DistStoreError "
      "where the server does not answer in time, DistNetworkError where the port cannot be served "
      "at or the server does not accept this "
      "process's "
      "secret.")
      .def(py::init([](std::string host_name, std::uint16_t port, std::optional<int> world_size,
                       bool is_master, Duration timeout, bool wait_for_workers, bool multi_tenant,
                       std::optional<int> master_listen_fd, bool,
                       std::optional<bool> wait_for_worker) {
             wait_for_workers = wait_for_worker.value_or(wait_for_workers);
             const TCPStoreOptions options{world_size,       is_master,    timeout,
                                           wait_for_workers, multi_tenant, master_listen_fd};
             return blocking_on_store(
                 [&] { return std::make_shared<TCPStore>(std::move(host_name), port, options); });
           }),
           py::arg("host_name"), py::arg("port"), py::arg("world_size") = py::none(),
           py::arg("is_master") = false, py::arg("timeout") = store::kDefaultTimeout,
           py::arg("wait_for_workers") = true, py::arg("multi_tenant") = false,
           py::arg("master_listen_fd") = py::none(), py::arg("use_libuv") = true,
           py::arg("wait_for_worker") = py::none())
      .def_property_readonly(
          "libuvBackend", [](const TCPStore&) { return false; },
          "False: muster's server does not use libuv.")
      .def_property_readonly("host", &TCPStore::host)
      .def_property_readonly("port", &TCPStore::port);
  py::class_<FileStore, Store, std::shared_ptr<FileStore>>(
      module, "FileStore",
      "A store in a file of a file system that all users see. Keys survive opening the file again. "
      "world_size: the last of so many users "
      "removes the file; -1: nobody does.")
      .def(py::init<std::string, int>(), py::arg("file_name"), py::arg("world_size") = -1,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("path", &FileStore::path);
  py::class_<EtcdStore, Store, std::shared_ptr<EtcdStore>>(
      module, "EtcdStore",
      "A store in an etcd cluster (server 3.4 or later, API v3). endpoints: \"host:2379\" or "
      "\"https://host:2379\", several members of one cluster with commas between them. prefix: "
      "what all keys begin with; they outlive the job, so give each run another one. timeout: "
      "datetime.timedelta. user, password, and the paths of PEM files cacert, cert and key: empty "
      "means MUSTER_ETCD_USER, MUSTER_ETCD_PASSWORD, MUSTER_ETCD_CACERT, MUSTER_ETCD_CERT and "
      "MUSTER_ETCD_KEY. Raises DistStoreError where the cluster does not answer in time, "
      "DistNetworkError where it does not accept user, password or certificate.")
      .def(py::init([](const std::string& endpoints, std::string prefix, Duration timeout,
                       std::string user, std::string password, std::string cacert, std::string cert,
                       std::string key) {
             const EtcdStoreOptions options{std::move(prefix),   timeout,           std::move(user),
                                            std::move(password), std::move(cacert), std::move(cert),
                                            std::move(key)};
             return blocking_on_store(
                 [&] { return std::make_shared<EtcdStore>(endpoints, options); });
           }),
           py::arg("endpoints"), py::arg("prefix") = "muster",
           py::arg("timeout") = store::kDefaultTimeout, py::arg("user") = "",
           py::arg("password") = "", py::arg("cacert") = "", py::arg("cert") = "",
           py::arg("key") = "");
  py::class_<HashStore, Store, std::shared_ptr<HashStore>>(
      module, "HashStore", "A store for the threads of one process.")
      .def(py::init<>());
  py::class_<PrefixStore, Store, std::shared_ptr<PrefixStore>>(
      module, "PrefixStore", "Another store, with `prefix` before all keys; prefixes nest.")
      .def(py::init([](std::string prefix, const std::shared_ptr<Store>& store) {
             return std::make_shared<PrefixStore>(std::move(prefix), kept_store(store));
           }),
           py::arg("prefix"), py::arg("store"))
      .def_property_readonly("underlying_store", &PrefixStore::underlying_store)
      .def_property_readonly(
          "_underlying_non_prefix_store",
          [](const PrefixStore& self) {
            auto store = self.underlying_store();
            while (const auto* prefix = dynamic_cast<const PrefixStore*>(store.get()))
              store = prefix->underlying_store();
            return store;
          },
          "The store below all prefixes.");
}

}  // namespace muster::python

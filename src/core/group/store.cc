// SPDX-License-Identifier: BSD-3-Clause
#include "muster/store.h"

#include <utility>

#include "core/group/errors.h"
#include "core/store/factory.h"

namespace muster {
namespace {

void throw_if_failed(const Status& status) {
  if (!status.ok()) group::raise_from_store(status);
}

template <class T>
T unwrap(Result<T> result) {
  if (!result.ok()) group::raise_from_store(result.status());
  return std::move(result).value();
}

std::shared_ptr<store::Store> open_tcp(std::string host, std::uint16_t port,
                                       const TCPStoreOptions& options) {
  store::TcpStoreOptions engine;
  engine.host = std::move(host);
  engine.port = port;
  engine.world_size = options.world_size;
  engine.is_server = options.is_master;
  engine.timeout = options.timeout;
  engine.wait_for_workers = options.wait_for_workers;
  engine.multi_tenant = options.multi_tenant;
  if (options.master_listen_fd && *options.master_listen_fd < 0)
    group::invalid("TCPStore: master_listen_fd " + std::to_string(*options.master_listen_fd) +
                   " is no descriptor; leave it out for none");
  engine.listen_descriptor = options.master_listen_fd.value_or(-1);
  if (options.world_size == 0)
    group::invalid("TCPStore: world_size is 0; leave it out if the number of users is not fixed");
  if (!options.is_master && port == 0)
    group::invalid("TCPStore: a client needs the port at which the master serves, and got 0");
  return unwrap(store::make_tcp_store(std::move(engine)));
}

const store::TcpStore& tcp(const Store& store) {
  return static_cast<const store::TcpStore&>(*store.engine());
}

std::shared_ptr<store::Store> engine_of(const std::shared_ptr<Store>& store) {
  if (store == nullptr) group::invalid("PrefixStore needs a store to stand on, and got none");
  return store->engine();
}

}  // namespace

Store::Store(std::shared_ptr<store::Store> engine) : engine_(std::move(engine)) {}

void Store::set(std::string_view key, std::string_view value) {
  throw_if_failed(engine_->set(key, value));
}
std::string Store::get(std::string_view key) { return unwrap(engine_->get(key)); }
std::int64_t Store::add(std::string_view key, std::int64_t amount) {
  return unwrap(engine_->add(key, amount));
}
std::string Store::compare_set(std::string_view key, std::string_view expected_value,
                               std::string_view desired_value) {
  return unwrap(engine_->compare_set(key, expected_value, desired_value));
}
void Store::wait(const Keys& keys, std::optional<Duration> timeout) {
  throw_if_failed(engine_->wait(keys, timeout));
}
std::int64_t Store::num_keys() { return unwrap(engine_->num_keys()); }
bool Store::delete_key(std::string_view key) { return unwrap(engine_->delete_key(key)); }
void Store::set_timeout(Duration timeout) { engine_->set_timeout(timeout); }
Duration Store::timeout() const { return engine_->timeout(); }

bool Store::check(const Keys& keys) { return unwrap(engine_->check(keys)); }
void Store::append(std::string_view key, std::string_view value) {
  throw_if_failed(engine_->append(key, value));
}
std::vector<std::string> Store::multi_get(const Keys& keys) {
  return unwrap(engine_->multi_get(keys));
}
void Store::multi_set(const Keys& keys, const std::vector<std::string>& values) {
  throw_if_failed(engine_->multi_set(keys, values));
}
void Store::queue_push(std::string_view key, std::string_view value) {
  throw_if_failed(engine_->queue_push(key, value));
}
std::string Store::queue_pop(std::string_view key, bool block) {
  auto popped = engine_->queue_pop(key, block);
  // Every engine uses this wording; the server's text arrives unchanged.
  if (!popped.ok() && popped.status().code() == Code::store &&
      popped.status().message().ends_with("the queue is empty"))
    throw QueueEmptyError(popped.status());
  return unwrap(std::move(popped));
}
std::int64_t Store::queue_len(std::string_view key) { return unwrap(engine_->queue_len(key)); }
std::vector<std::string> Store::list_keys() { return unwrap(engine_->list_keys()); }
std::shared_ptr<Store> Store::clone() { return std::make_shared<Store>(unwrap(engine_->clone())); }
void Store::barrier(std::string_view key, int members, std::optional<Duration> timeout) {
  throw_if_failed(engine_->barrier(key, members, timeout));
}
std::vector<std::string> Store::all_gather(std::string_view key, int index, int members,
                                           std::string_view value,
                                           std::optional<Duration> timeout) {
  return unwrap(engine_->all_gather(key, index, members, value, timeout));
}

TCPStore::TCPStore(std::string host_name, std::uint16_t port, const TCPStoreOptions& options)
    : Store(open_tcp(std::move(host_name), port, options)) {}
const std::string& TCPStore::host() const { return tcp(*this).host(); }
std::uint16_t TCPStore::port() const { return tcp(*this).port(); }

FileStore::FileStore(std::string file_name, int world_size)
    : Store(unwrap(store::make_file_store(file_name, world_size))), path_(std::move(file_name)) {}

namespace {

std::shared_ptr<store::Store> open_etcd(const std::string& endpoints,
                                        const EtcdStoreOptions& options) {
  store::EtcdOptions engine = store::etcd_options_from_environment(endpoints);
  engine.prefix = options.prefix;
  engine.timeout = options.timeout;
  const auto settle = [](std::string& value, const std::string& given) {
    if (!given.empty()) value = given;
  };
  settle(engine.user, options.user);
  settle(engine.password, options.password);
  settle(engine.authority_file, options.authority_file);
  settle(engine.certificate_file, options.certificate_file);
  settle(engine.key_file, options.key_file);
  return unwrap(store::make_etcd_store(std::move(engine)));
}

}  // namespace

EtcdStore::EtcdStore(const std::string& endpoints, const EtcdStoreOptions& options)
    : Store(open_etcd(endpoints, options)) {}

HashStore::HashStore() : Store(store::make_hash_store()) {}

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : Store(store::make_prefix_store(std::move(prefix), engine_of(store))),
      store_(std::move(store)) {}

}  // namespace muster

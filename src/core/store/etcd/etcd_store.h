/// The store kind on a client that is there already.
#pragma once

#include <memory>
#include <string>

#include "core/store/etcd/client.h"
#include "muster/key_value_store.h"

namespace muster::store {

/// As make_etcd_store, without asking whether the cluster answers.
std::shared_ptr<Store> make_etcd_store_over(std::shared_ptr<etcd::EtcdClient> client,
                                            std::string prefix, Duration timeout);

}  // namespace muster::store

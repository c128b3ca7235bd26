// SPDX-License-Identifier: BSD-3-Clause
#include "backends/mpi/rendezvous.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "backends/carried/call.h"
#include "backends/mpi/loader.h"
#include "core/base/process/process_start.h"
#include "core/net/socket_address.h"
#include "core/net/this_host.h"
#include "core/security/secret.h"
#include "core/store/factory.h"

namespace muster::mpi {
namespace {

constexpr const char* kNoSecret = "-";

/// Processes with equal texts reach each other over loopback.
std::string host_text() {
  std::error_code error;
  return boot_id() + " " + std::filesystem::read_symlink("/proc/self/ns/net", error).string();
}

/// Rank 0's message to the others, "HOST PORT SECRET" or "! WHY", and the store that it serves.
struct StoreAddress {
  std::string text;
  std::shared_ptr<store::TcpStore> store;
};

StoreAddress serve(bool one_host, int world_size, Duration timeout) {
  const auto fail = [](const Status& why) { return StoreAddress{"! " + why.message(), nullptr}; };
  std::string host = "127.0.0.1", secret = kNoSecret;
  const auto own = Secret::from_environment();
  if (!own) return fail(own.status());
  if (!one_host) {
    const auto route = address_of_default_route();
    if (!route)
      return fail(Status(Code::network, "rank 0 found no address that other hosts can reach"));
    host = route->host();
    if (own->kind() == Secret::Kind::host) {
      secret = Secret::random_text();
      ::setenv("MUSTER_SECRET", secret.c_str(), 1);
    }
  }
  store::TcpStoreOptions options;
  options.host = host;
  options.port = 0;
  options.world_size = world_size;
  options.is_server = true;
  options.wait_for_workers = false;
  options.timeout = timeout;
  options.host_rank = 0;
  auto store = store::make_tcp_store(options);
  if (!store) return fail(store.status());
  return {host + " " + std::to_string((*store)->port()) + " " + secret, std::move(*store)};
}

Result<std::shared_ptr<store::TcpStore>> follow(const std::string& address, int world_size,
                                                Duration timeout) {
  if (address.starts_with("! "))
    return Status(Code::peer_failed, "rank 0 could not serve the job's store: " + address.substr(2),
                  {0});
  std::istringstream words(address);
  std::string secret;
  store::TcpStoreOptions options;
  words >> options.host >> options.port >> secret;
  if (secret != kNoSecret) ::setenv("MUSTER_SECRET", secret.c_str(), 1);
  options.world_size = world_size;
  options.timeout = timeout;
  options.host_rank = 0;
  return store::make_tcp_store(options);
}

}  // namespace

Result<store::Rendezvous> rendezvous_of_world(store::RendezvousOptions options) {
  auto world = start();
  if (!world) return world.status();
  std::vector<std::string> hosts;
  if (const int code = world->library->exchange_texts(host_text(), hosts); code != 0)
    return carried::failed(*world->library, "MPI_Allgather", code);
  const bool one_host =
      std::ranges::all_of(hosts, [&](const std::string& host) { return host == hosts.front(); });
  StoreAddress address;
  if (world->rank == 0) address = serve(one_host, world->size, options.timeout);
  std::vector<std::string> texts;
  if (const int code = world->library->exchange_texts(address.text, texts); code != 0)
    return carried::failed(*world->library, "MPI_Allgather", code);
  auto store = address.store;
  if (store == nullptr) {
    auto found = follow(texts.front(), world->size, options.timeout);
    if (!found) return found.status();
    store = std::move(*found);
  }
  options.rank = world->rank;
  options.world_size = world->size;
  auto joined = store::rendezvous_over(std::move(store), options);
  if (joined) joined->store->set_timeout(options.timeout);
  return joined;
}

}  // namespace muster::mpi

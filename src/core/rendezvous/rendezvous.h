// SPDX-License-Identifier: BSD-3-Clause
/// Turns an init method (env://, tcp://, file://) into a store, a rank and a world size.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "muster/key_value_store.h"
#include "muster/status.h"

namespace muster::store {

struct RendezvousOptions {
  std::string init_method = "env://";
  /// -1: taken from the URL's query or the environment, or assigned in order of arrival (tcp://,
  /// file://).
  int rank = -1;
  int world_size = -1;          ///< -1: taken from the URL's query or the environment
  std::string group_name = {};  ///< separates jobs that share one address or file
  Duration timeout = std::chrono::minutes(30);
  /// env:// in a job whose workers stay: the epoch, and HOST:PORT of the launcher's store that
  /// serves it. 0 and empty: MUSTER_EPOCH's and MUSTER_AGENT_STORE's.
  std::int64_t epoch = 0;
  std::string agent_store = {};
};

struct Rendezvous {
  std::shared_ptr<Store> store;  ///< already prefixed for this job
  int rank = 0;
  int world_size = 1;
  std::string host;  ///< address of the store, used to choose an interface; empty for file://
  /// Other hosts may join although there is no address: file://, a store in etcd.
  bool any_host = false;
  std::string job;  ///< unique to this job, equal on all ranks
};

/// Prefix of the launcher's own keys in the store that it serves.
std::string launcher_prefix(const std::string& run_id);
/// The record to which a job's epochs are committed there (`lease_table.h`).
std::string epoch_record(const std::string& run_id);

/// Blocks until every rank has joined. Errors name what is missing or malformed (a variable, a part
/// of the URL); a timeout error names the ranks that did not join. With a multicast address
/// (`tcp://[ff15::1]:29500`, `tcp://239.1.1.1:29500`), peers find each other by multicast and ranks
/// are assigned.
Result<Rendezvous> rendezvous(const RendezvousOptions& options);

/// Rendezvous over an existing store. `rank` and `world_size` are required; `init_method` is
/// ignored. The n-th call on a store makes its n-th job. The store's timeout is not changed.
Result<Rendezvous> rendezvous_over(std::shared_ptr<Store> store, const RendezvousOptions& options);

/// This process gives up the job that it has joined through `store`. The others learn why, where
/// the store is a TCP store.
void abandon(std::shared_ptr<Store> store, const Status& why);

/// Parses init methods: `tcp://host:port?rank=0&world_size=4`, `file:///path`, `env://`.
struct InitUrl {
  enum class Scheme { env, tcp, file };
  Scheme scheme = Scheme::env;
  std::string host;  ///< tcp: without brackets
  std::uint16_t port = 0;
  std::string path;  ///< file
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Errors name the invalid part and show the whole text.
Result<InitUrl> parse_init_url(const std::string& text);
/// Parses a decimal integer in [low, high]; otherwise empty.
std::optional<std::int64_t> whole_number(const std::string& text, std::int64_t low,
                                         std::int64_t high);

}  // namespace muster::store

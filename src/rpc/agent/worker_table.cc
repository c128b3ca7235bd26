// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/worker_table.h"

#include <algorithm>
#include <cctype>

#include "core/base/bytes.h"
#include "core/group/errors.h"
#include "muster/rpc_future.h"

namespace muster::rpc {
std::string introduce(const std::string& name, const RpcBackendOptions& options) {
  ByteWriter out;
  out.put_text(name).put(static_cast<std::uint32_t>(options.device_maps.size()));
  for (const auto& [to, map] : options.device_maps) {
    out.put_text(to).put(static_cast<std::uint32_t>(map.size()));
    for (const auto& [from, into] : map)
      out.put_text(from.device().str()).put_text(into.device().str());
  }
  return out.take();
}

Introduction read_introduction(const std::string& text, int rank) {
  ByteReader in(text);
  Introduction worker;
  worker.name = in.get_text();
  const auto maps = in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < maps && in.ok(); ++i) {
    auto& map = worker.device_maps[std::string(in.get_text())];
    const auto entries = in.get<std::uint32_t>();
    for (std::uint32_t j = 0; j < entries && in.ok(); ++j) {
      const std::string from(in.get_text());
      const std::string into(in.get_text());
      if (in.ok()) map.emplace(DeviceName(from), DeviceName(into));
    }
  }
  if (!in.at_end())
    throw DistError(
        "init_rpc: what rank " + std::to_string(rank) + " says of itself cannot be read",
        Code::mismatch, {rank});
  return worker;
}

namespace {

void check_names(const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto& name = names[i];
    const bool proper = !name.empty() && name.size() <= 128 &&
                        std::all_of(name.begin(), name.end(), [](unsigned char c) {
                          return std::isalnum(c) != 0 || c == '_' || c == '-' || c == ':';
                        });
    if (!proper)
      group::invalid(
          "init_rpc: '" + name + "' (rank " + std::to_string(i) +
          ") is no name of a worker: letters, digits, '_', '-' and ':', 1 to 128 of them");
    for (std::size_t j = 0; j < i; ++j) {
      if (names[j] == name)
        group::invalid("init_rpc: ranks " + std::to_string(j) + " and " + std::to_string(i) +
                       " both call themselves '" + name +
                       "'; every worker needs a name of its own");
    }
  }
}

}  // namespace

WorkerTable::WorkerTable(const std::vector<std::string>& names, int self) : self_(self) {
  check_names(names);
  for (std::size_t i = 0; i < names.size(); ++i) {
    workers_.push_back(WorkerInfo(names[i], static_cast<int>(i)));
    by_name_[names[i]] = static_cast<int>(i);
  }
}

const WorkerInfo& WorkerTable::find(const To& to) const {
  if (to.name().empty()) {
    if (contains(to.id())) return at(to.id());
    group::invalid("there is no worker of rank " + std::to_string(to.id()) + "; there are " +
                   std::to_string(workers_.size()) + ", from 0 on");
  }
  if (const auto found = by_name_.find(to.name()); found != by_name_.end())
    return at(found->second);
  std::string known;
  for (const auto& worker : workers_) known += (known.empty() ? "'" : ", '") + worker.name() + "'";
  group::invalid("there is no worker '" + to.name() + "'; there are " + known);
}

std::string WorkerTable::describe(int id) const {
  return "worker '" + at(id).name() + "' (rank " + std::to_string(id) + ")";
}

std::exception_ptr WorkerTable::loss_error(int peer, const std::string& call,
                                           const Status& why) const {
  auto ranks = why.ranks();
  if (ranks.empty()) ranks.push_back(peer);
  const Status failure(
      why.code(),
      "the call of '" + call + "' on " + describe(peer) + " has failed: " + why.message(),
      std::move(ranks));
  try {
    group::raise(failure);
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr WorkerTable::timeout_error(int peer, const std::string& call,
                                              Duration timeout) const {
  return std::make_exception_ptr(DistBackendError(
      "the call of '" + call + "' on " + describe(peer) + " had no answer within its timeout of " +
          muster::describe(timeout) + "; give it a longer one, or look at what that worker does",
      Code::timed_out, {peer}));
}

}  // namespace muster::rpc

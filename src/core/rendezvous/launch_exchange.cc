// SPDX-License-Identifier: BSD-3-Clause
#include "core/rendezvous/launch_exchange.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "core/base/environment.h"
#include "core/base/process/fork_guard.h"

namespace muster::store {

std::string exchange_detail::next_key() {
  static int count = 0;
  return "muster-" + std::to_string(count++);
}

Result<std::string> share_from_rank_zero(SchedulerRanks::AddressExchange kind, int rank,
                                         std::string_view text, TimePoint deadline) {
  switch (kind) {
    case SchedulerRanks::AddressExchange::pmi:
      return exchange_detail::share_by_pmi(rank, text, deadline);
    case SchedulerRanks::AddressExchange::pmix:
      return exchange_detail::share_by_pmix(rank, text, deadline);
    case SchedulerRanks::AddressExchange::none: break;
  }
  return Status(Code::unsupported, "this launcher lets ranks share nothing");
}

// PMI-1's wire protocol, as MPICH's Hydra speaks it over the descriptor PMI_FD: one line a message.

namespace {

constexpr std::size_t kLongestLine = 4096;   // limit: protocol
constexpr int kHighestDescriptor = 1 << 20;  // limit: a number that is a mistake

std::optional<std::string> text_of(const std::string& digits) {
  if (digits.size() % 2 != 0) return std::nullopt;
  std::string out;
  for (std::size_t at = 0; at < digits.size(); at += 2) {
    int byte = 0;
    for (const char digit : digits.substr(at, 2)) {
      const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                        : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                                                       : -1;
      if (value < 0) return std::nullopt;
      byte = byte * 16 + value;
    }
    out += static_cast<char>(byte);
  }
  return out;
}

/// This process's conversation with its launcher. The launcher wants to hear its end, unless MPI
/// has told it.
class Pmi {
 public:
  static Result<Pmi*> of_process(TimePoint deadline) {
    static Pmi pmi;
    if (pmi.mark_.forked())
      return Status(Code::unsupported, "a forked child has no connection to its launcher");
    if (pmi.descriptor_ < 0) {
      const auto number = env_integer("PMI_FD", 0, kHighestDescriptor);
      if (!number) return number.status();
      if (!*number) return Status(Code::unsupported, "PMI_FD is not set");
      pmi.descriptor_ = static_cast<int>(**number);
      const auto begun =
          pmi.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", deadline);
      if (!begun) return begun.status();
      std::atexit([] { pmi.end(); });
      const auto name = pmi.ask("cmd=get_my_kvsname", "my_kvsname", deadline);
      if (!name) return name.status();
      pmi.space_ = name->at("kvsname");
    }
    return &pmi;
  }

  Result<std::map<std::string, std::string>> ask(const std::string& line, const std::string& answer,
                                                 TimePoint deadline) {
    if (Status sent = send(line + "\n"); !sent) return sent;
    while (true) {
      const std::size_t end = held_.find('\n');
      if (end == std::string::npos) {
        if (Status received = receive(deadline); !received) return received;
        continue;
      }
      const std::string got = held_.substr(0, end);
      held_.erase(0, end + 1);
      auto words = parse_pmi_line(got);
      if (!words || (*words)["cmd"] != answer || ((*words)["rc"] != "" && (*words)["rc"] != "0"))
        return Status(Code::network, "the launcher answered \"" + line + "\" by PMI with \"" + got +
                                         "\"; expected cmd=" + answer);
      return *words;
    }
  }
  const std::string& space() const { return space_; }

 private:
  Status send(std::string_view bytes) const {
    while (!bytes.empty()) {
      ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == ENOTSOCK) sent = ::write(descriptor_, bytes.data(), bytes.size());
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return Status(Code::network, "the launcher's PMI connection is closed");
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return {};
  }
  Status receive(TimePoint deadline) {
    pollfd wanted{descriptor_, POLLIN, 0};
    const int ready = ::poll(&wanted, 1, poll_milliseconds(steady_clock().now(), deadline));
    if (ready == 0)
      return Status(Code::timed_out,
                    "not all ranks that the launcher has started came to the exchange of addresses "
                    "by PMI in time");
    char bytes[512];
    const ssize_t got = ready < 0 ? -1 : ::read(descriptor_, bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) return {};
    if (got <= 0 || held_.size() > kLongestLine)
      return Status(Code::network, "the launcher's PMI connection is closed");
    held_.append(bytes, static_cast<std::size_t>(got));
    return {};
  }
  /// The launcher takes an end without waiting for its answer for a failure.
  void end() {
    constexpr Duration kLimit = std::chrono::seconds(2);  // limit: patience at the end
    if (mark_.forked()) return;
    static_cast<void>(
        ask("cmd=finalize", "finalize_ack", deadline_after(steady_clock(), kLimit)).ok());
  }

  int descriptor_ = -1;
  std::string space_;
  std::string held_;
  ProcessMark mark_;
};

}  // namespace

std::optional<std::map<std::string, std::string>> parse_pmi_line(std::string_view line) {
  std::map<std::string, std::string> words;
  while (!line.empty()) {
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string_view word = line.substr(0, space);
    line.remove_prefix(std::min(space + 1, line.size()));
    if (word.empty()) continue;
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos || equals == 0) return std::nullopt;
    words[std::string(word.substr(0, equals))] = word.substr(equals + 1);
  }
  if (!words.contains("cmd")) return std::nullopt;
  return words;
}

Result<std::string> exchange_detail::share_by_pmi(int rank, std::string_view text,
                                                  TimePoint deadline) {
  auto pmi = Pmi::of_process(deadline);
  if (!pmi) return pmi.status();
  const std::string key = next_key(), where = " kvsname=" + (*pmi)->space() + " key=" + key;
  if (rank == 0) {
    const auto put = (*pmi)->ask("cmd=put" + where + " value=" + hexadecimal(as_bytes(text)),
                                 "put_result", deadline);
    if (!put) return put.status();
  }
  if (const auto all = (*pmi)->ask("cmd=barrier_in", "barrier_out", deadline); !all)
    return all.status();
  const auto got = (*pmi)->ask("cmd=get" + where, "get_result", deadline);
  if (!got) return got.status();
  const auto value = got->find("value");
  auto shared = value == got->end() ? std::nullopt : text_of(value->second);
  if (!shared) return Status(Code::network, "rank 0 shared no address by PMI");
  return std::move(*shared);
}

}  // namespace muster::store

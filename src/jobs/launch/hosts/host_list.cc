// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/hosts/host_list.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include "core/base/descriptor.h"
#include "jobs/launch/options.h"

namespace muster::launch {
namespace {

constexpr int kMostWorkers = 1 << 16;                       // limit: a number that is a mistake
constexpr std::size_t kMostHosts = std::size_t{1} << 14;    // limit: a list that is a mistake
constexpr std::size_t kLongestFile = std::size_t{1} << 22;  // limit: a file that is no list

Status bad_host(const std::string& message) { return Status(Code::invalid_argument, message); }

/// ssh takes a word that begins with a dash for an option, and some shells that it starts would
/// read the others.
bool may_be_destination(const std::string& text) {
  const auto odd = [](unsigned char c) {
    return c <= ' ' || c == 0x7f || std::strchr("'\"`$;&|<>(){}*?!\\,", c) != nullptr;
  };
  const std::string name = text.substr(text.find('@') + 1);
  return !text.empty() && !text.starts_with("-") && !text.starts_with("@") && !name.empty() &&
         !name.starts_with("-") && std::none_of(text.begin(), text.end(), odd);
}

Result<int> parse_slots(const std::string& what, const std::string& text) {
  const auto number = parse_whole(what, text, 1, kMostWorkers);
  if (!number) return number.status();
  return static_cast<int>(*number);
}

/// One machine: "name", "name:4", "user@[address]:4". An address with colons and without brackets
/// has no number behind it.
Result<JobHost> parse_host(const std::string& what, const std::string& text) {
  const std::size_t at = text.find('@');
  const std::size_t from = at == std::string::npos ? 0 : at + 1;
  const std::string user = text.substr(0, from), rest = text.substr(from);
  std::string name = rest, workers;
  bool numbered = false;
  const std::size_t colon = rest.rfind(':');
  if (rest.starts_with('[')) {
    const std::size_t close = rest.find(']');
    numbered = close != std::string::npos && close + 1 < rest.size() && rest[close + 1] == ':';
    if (close == std::string::npos || (close + 1 < rest.size() && !numbered))
      return bad_host(what + ": \"" + text + "\" is not [ADDRESS]:WORKERS");
    name = rest.substr(1, close - 1);
    if (numbered) workers = rest.substr(close + 2);
  } else if (colon != std::string::npos && rest.find(':') == colon) {
    name = rest.substr(0, colon);
    workers = rest.substr(colon + 1);
    numbered = true;
  }
  JobHost host{user + name, {}};
  if (name.find_first_of("[]") != std::string::npos || !may_be_destination(host.destination))
    return bad_host(what + ": \"" + text +
                    "\" names no machine; write NAME, NAME:WORKERS, USER@NAME or "
                    "[ADDRESS]:WORKERS");
  if (!numbered) return host;
  const auto slots = parse_slots(what + ", workers of " + name, workers);
  if (!slots) return slots.status();
  host.workers = *slots;
  return host;
}

/// Collects machines; the names without a number are counted.
class HostCounter {
 public:
  Status add(const std::string& what, JobHost host) {
    const auto known = std::find_if(all_.begin(), all_.end(), [&](const auto& each) {
      return each.host.destination == host.destination;
    });
    if (known == all_.end()) {
      if (all_.size() >= kMostHosts)
        return bad_host(what + ": more than " + std::to_string(kMostHosts) + " machines");
      all_.push_back({std::move(host), 1});
      return {};
    }
    if (known->host.workers || host.workers)
      return bad_host(what + ": " + host.destination +
                      " is there twice; give all of its workers in one place, " + host.name() +
                      ":N");
    if (++known->times > kMostWorkers)
      return bad_host(what + ": " + host.destination + " is there too often");
    return {};
  }

  Result<std::vector<JobHost>> take(const std::string& what) {
    if (all_.empty()) return bad_host(what + " names no machine");
    std::vector<JobHost> hosts;
    for (auto& each : all_) {
      if (each.times > 1) each.host.workers = each.times;
      hosts.push_back(std::move(each.host));
    }
    return hosts;
  }

 private:
  struct CountedHost {
    JobHost host;
    int times = 1;
  };
  std::vector<CountedHost> all_;
};

/// "slots=4" and "max_slots=8" behind a name.
Status take_words(const std::string& what, std::istringstream& words, JobHost& host) {
  int most = kMostWorkers;
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    std::string key = word.substr(0, equals);
    std::replace(key.begin(), key.end(), '-', '_');
    if (equals == std::string::npos || (key != "slots" && key != "max_slots"))
      return bad_host(what + ": \"" + word + "\" is not understood; a line is NAME slots=N, or " +
                      "NAME:N");
    const auto number = parse_slots(what + ", " + key, word.substr(equals + 1));
    if (!number) return number.status();
    if (key == "max_slots") {
      most = *number;
    } else if (host.workers) {
      return bad_host(what + ": the number of workers is there twice");
    } else {
      host.workers = *number;
    }
  }
  if (most == kMostWorkers || (host.workers && *host.workers <= most)) return {};
  return bad_host(what + ": max_slots is below the number of workers; give that by slots=N");
}

}  // namespace

Result<std::vector<JobHost>> parse_hosts(const std::string& text) {
  const std::string what = "--hosts";
  HostCounter hosts;
  std::size_t from = 0;
  do {
    const std::size_t comma = std::min(text.find(',', from), text.size());
    auto host = parse_host(what, text.substr(from, comma - from));
    if (!host) return host.status();
    if (Status added = hosts.add(what, std::move(*host)); !added) return added;
    from = comma + 1;
  } while (from <= text.size());
  return hosts.take(what);
}

Result<std::vector<JobHost>> parse_host_lines(const std::string& text, const std::string& file) {
  HostCounter hosts;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string what = "--hostfile " + file + ", line " + std::to_string(++number);
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name;
    if (!(words >> name)) continue;
    auto host = parse_host(what, name);
    if (!host) return host.status();
    if (Status taken = take_words(what, words, *host); !taken) return taken;
    if (Status added = hosts.add(what, std::move(*host)); !added) return added;
  }
  return hosts.take("--hostfile " + file);
}

Result<std::vector<JobHost>> read_host_file(const std::string& file) {
  std::ifstream stream(file);
  std::string text;
  // One byte more than is allowed tells a file that is too long.
  text.resize(kLongestFile + 1);
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(stream.gcount(), 0)));
  if (!stream.is_open() || stream.bad() || (text.empty() && !stream.eof()))
    return bad_host("--hostfile " + file + " cannot be read: " + errno_text(errno));
  if (text.size() > kLongestFile)
    return bad_host("--hostfile " + file + " is longer than 4 MiB: that is no list of machines");
  return parse_host_lines(text, file);
}

}  // namespace muster::launch

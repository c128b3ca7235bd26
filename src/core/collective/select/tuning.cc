// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/select/tuning.h"

#include <algorithm>
#include <optional>

#include "core/base/environment.h"
#include "core/tunables/tunables.h"
#include "core/tunables/tuning_file.h"

namespace muster::collective {
namespace {

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }

std::string names_of(std::span<const Algorithm> row) {
  std::string text;
  for (const Algorithm algorithm : row)
    text += (text.empty() ? "" : ", ") + std::string(name_of(algorithm));
  return text;
}

std::string ops_known() {
  std::string text;
  for (int op = 0; op < kCollectives; ++op)
    text += (text.empty() ? "" : ", ") + std::string(info(static_cast<Op>(op)).name);
  return text;
}

/// One line of the file. Its errors do not contain the line number.
class RuleLine {
 public:
  RuleLine(std::string_view key, std::string_view value) : key_(key), value_(value) {}

  Result<std::pair<Tuning::TuningKey, std::vector<Tuning::SizeLimit>>> read() const {
    auto place = this->place();
    if (!place) return place.status();
    std::vector<Tuning::SizeLimit> rule;
    const auto row = algorithms_of(place->medium, place->op);
    auto next = row.begin();
    const auto parts = parts_of(value_, ',');
    for (std::size_t i = 0; i < parts.size(); ++i) {
      auto step = this->step(parts[i], i + 1 == parts.size());
      if (!step) return step.status();
      const auto found = std::find(next, row.end(), step->algorithm);
      if (found == row.end()) {
        return wrong(quoted(name_of(step->algorithm)) + " is not allowed here; " +
                     std::string(info(place->op).name) + " over " +
                     std::string(name_of(place->medium)) + " has, in this order, " + names_of(row));
      }
      if (!rule.empty() && rule.back().up_to >= step->up_to)
        return wrong("sizes must grow from left to right in " + quoted(value_));
      next = found + 1;
      rule.push_back(*step);
    }
    return std::pair(*place, std::move(rule));
  }

 private:
  static Status wrong(const std::string& what) { return Status(Code::invalid_argument, what); }

  Result<Tuning::TuningKey> place() const {
    const auto parts = parts_of(key_, '.');
    if (parts.size() != 3)
      return wrong(quoted(key_) +
                   " should be MEDIUM.OPERATION.RANKS, as in network.all_reduce.4, or a "
                   "name that muster tunables lists");
    if (parts[0] != "network" && parts[0] != "shared_memory")
      return wrong(quoted(parts[0]) + " should be network or shared_memory");
    const auto op = op_named(parts[1]);
    if (!op) return wrong(quoted(parts[1]) + " is not a collective; there are " + ops_known());
    const auto ranks = number_of_text(parts[2]);
    if (!ranks || *ranks < 1 || *ranks > 10'000'000)
      return wrong(quoted(parts[2]) + " should be a number of ranks");
    return Tuning::TuningKey{parts[0] == "network" ? Medium::network : Medium::shared_memory, *op,
                             static_cast<int>(*ranks)};
  }

  static Result<Tuning::SizeLimit> step(std::string_view text, bool last) {
    const std::size_t sign = text.find("<=");
    const auto name = trimmed(text.substr(0, sign));
    const auto algorithm = algorithm_named(name);
    if (!algorithm) return wrong(quoted(name) + " is not an algorithm");
    if (last) {
      if (sign != std::string_view::npos)
        return wrong("the last algorithm has no limit, but " + quoted(text) + " gives one");
      return Tuning::SizeLimit{*algorithm};
    }
    if (sign == std::string_view::npos)
      return wrong(quoted(text) + " needs a limit, as in \"" + std::string(name) + " <= 64 KiB\"");
    const auto up_to = size_of_text(trimmed(text.substr(sign + 2)));
    if (!up_to)
      return wrong(quoted(trimmed(text.substr(sign + 2))) +
                   " is not a size; write bytes, as in 65536 or 64 KiB");
    return Tuning::SizeLimit{*algorithm, *up_to};
  }

  std::string_view key_, value_;
};

/// Whether the last of its algorithms is for groups on several hosts.
bool has_multi_host_algorithm(Op op) {
  const Algorithm last = algorithms_of(Medium::network, op).back();
  return last == Algorithm::hosts || last == Algorithm::ring;
}

/// A measurement on one host says nothing about several hosts. An algorithm that is unlimited in
/// the file ends where the defaults end it.
bool default_bound_applies(Op op, int ranks, const GroupPlacement& placement) {
  if (placement.shares_hosts(ranks)) return has_multi_host_algorithm(op);
  // The network link of the root replaces the memory of one host.
  return (op == Op::reduce || op == Op::broadcast) && placement.hosts(ranks) > 1;
}

/// The bound of an algorithm in the defaults, for ranks with this placement.
std::uint64_t default_bound(Op op, Algorithm algorithm, int ranks,
                            const GroupPlacement& placement) {
  const auto row = algorithms_of(Medium::network, op);
  const auto place = std::find(row.begin(), row.end(), algorithm) - row.begin();
  const Selection defaults(Medium::network, ranks, placement);
  const auto& bounds = defaults.bounds()[static_cast<std::size_t>(op)];
  return algorithm == row.back() ? Selection::kAlways : bounds[static_cast<std::size_t>(place)];
}

}  // namespace

Result<Tuning> parse_tuning(std::string_view text, const std::string& name) {
  Tuning tuning;
  const auto lines = tuning_lines(text, name);
  if (!lines) return lines.status();
  Tunables checked = default_tunables();
  for (const TuningLine& line : *lines) {
    const auto fail = [&](const std::string& what) {
      return wrong_tuning_line(name, line.number, what);
    };
    bool added = false;
    if (find_tunable(line.key.substr(0, line.key.find('.'))) != nullptr) {
      if (Status set = override_tunable(checked, line.key, line.value); !set)
        return fail(set.message());
      added = tuning.numbers.emplace(line.key, line.value).second;
    } else {
      auto read = RuleLine(line.key, line.value).read();
      if (!read) return fail(read.status().message());
      added = tuning.rules.insert(std::move(*read)).second;
    }
    if (!added) return fail(quoted(line.key) + " appears twice");
  }
  return tuning;
}

std::string print_tuning(const Tuning& tuning) {
  std::string text =
      "# Which algorithm runs, by size: MEDIUM.OPERATION.RANKS = ALGORITHM <= BYTES, ..., "
      "ALGORITHM\n"
      "# Written by muster bench --tune; docs/user/performance.md tells more.\n"
      "version = " +
      std::to_string(kTuningVersion) + "\n";
  for (const auto& [number, value] : tuning.numbers) text += number + " = " + value + "\n";
  for (const auto& [place, rule] : tuning.rules) {
    text += std::string(name_of(place.medium)) + "." + std::string(info(place.op).name) + "." +
            std::to_string(place.ranks) + " =";
    for (std::size_t i = 0; i < rule.size(); ++i) {
      text += (i > 0 ? ", " : " ") + std::string(name_of(rule[i].algorithm));
      if (i + 1 < rule.size()) text += " <= " + text_of_size(rule[i].up_to);
    }
    text += "\n";
  }
  return text;
}

Result<std::vector<std::pair<Op, Algorithm>>> parse_forced(const std::string& text) {
  const auto wrong = [&](const std::string& what) {
    return Status(Code::invalid_argument,
                  "MUSTER_ALGORITHM holds " + quoted(text) + ": " + what +
                      "; write OPERATION:ALGORITHM, as in all_reduce:bruck");
  };
  std::vector<std::pair<Op, Algorithm>> forced;
  for (const auto part : parts_of(text, ',')) {
    const auto words = parts_of(part, ':');
    const auto op = op_named(words[0]);
    if (!op) return wrong(quoted(words[0]) + " is not a collective; there are " + ops_known());
    Algorithm algorithm{};
    bool known = false;
    if (const auto named = algorithm_named(words.back()); named.has_value() && words.size() == 2) {
      algorithm = *named;
      for (const Medium medium : {Medium::network, Medium::shared_memory}) {
        const auto row = algorithms_of(medium, *op);
        known = known || std::find(row.begin(), row.end(), algorithm) != row.end();
      }
    }
    if (!known) {
      return wrong(std::string(info(*op).name) + " has " +
                   names_of(algorithms_of(Medium::network, *op)) + " over the network and " +
                   names_of(algorithms_of(Medium::shared_memory, *op)) + " in shared memory");
    }
    forced.emplace_back(*op, algorithm);
  }
  return forced;
}

Result<Tuning> tuning_of_environment() {
  if (!tunables_failure()) return tunables_failure();
  Tuning tuning;
  const auto file = read_tuning_file();
  if (!file) return file.status();
  if (*file) {
    auto read = parse_tuning(**file, "tuning file " + tuning_path());
    if (!read) return read.status();
    tuning = std::move(*read);
  }
  if (const auto text = env_text("MUSTER_ALGORITHM")) {
    auto forced = parse_forced(*text);
    if (!forced) return forced.status();
    tuning.forced = std::move(*forced);
  }
  return tuning;
}

Selection select(const Tuning& tuning, Medium medium, int ranks, const GroupPlacement& placement) {
  Selection selection(medium, ranks, placement);
  for (const auto& [place, rule] : tuning.rules) {  // in order of ranks: the last that fits applies
    if (place.medium != medium || place.ranks > ranks ||
        2 * static_cast<std::int64_t>(place.ranks) <= ranks)
      continue;
    bool use_defaults = false;
    for (const Algorithm each : algorithms_of(medium, place.op)) {
      const auto step = std::find_if(rule.begin(), rule.end(), [each](const Tuning::SizeLimit& s) {
        return s.algorithm == each;
      });
      const std::uint64_t up_to = step == rule.end() ? 0 : step->up_to;
      std::uint64_t bound = step == rule.end()            ? 0
                            : up_to == Selection::kAlways ? up_to
                                                          : up_to + 1;
      use_defaults = use_defaults || (medium == Medium::network && up_to == Selection::kAlways &&
                                      default_bound_applies(place.op, ranks, placement));
      if (use_defaults) bound = default_bound(place.op, each, ranks, placement);
      selection.set_bound(place.op, each, bound);
    }
  }
  for (const auto& [op, algorithm] : tuning.forced) selection.force(op, algorithm);
  return selection;
}

}  // namespace muster::collective

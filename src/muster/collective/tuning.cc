#include "muster/collective/tuning.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>

#include "muster/base/env.h"

namespace muster::collective {
namespace {

constexpr int kVersion = 1;

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::vector<std::string_view> parts_of(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(trimmed(text.substr(begin, end == std::string_view::npos ? end : end - begin)));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::optional<std::uint64_t> number_of(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

/// "65536", "64 KiB", "1MiB".
std::optional<std::uint64_t> size_of_text(std::string_view text) {
  for (const auto& [unit, shift] : {std::pair<std::string_view, int>{"KiB", 10}, {"MiB", 20}}) {
    if (!text.ends_with(unit)) continue;
    const auto value = number_of(trimmed(text.substr(0, text.size() - unit.size())));
    if (!value || *value > Selection::kAlways >> (shift + 1)) return std::nullopt;
    return *value << shift;
  }
  return number_of(text);
}

std::string size_text(std::uint64_t bytes) {
  if (bytes != 0 && bytes % (1u << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  if (bytes != 0 && bytes % 1024 == 0) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes);
}

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

/// One line of the file, its errors without the line's number.
class Line {
 public:
  Line(std::string_view key, std::string_view value) : key_(key), value_(value) {}

  Result<std::pair<Tuning::Place, std::vector<Tuning::Step>>> read() const {
    auto place = this->place();
    if (!place) return place.status();
    std::vector<Tuning::Step> rule;
    const auto row = algorithms_of(place->ground, place->op);
    auto next = row.begin();
    const auto parts = parts_of(value_, ',');
    for (std::size_t i = 0; i < parts.size(); ++i) {
      auto step = this->step(parts[i], i + 1 == parts.size());
      if (!step) return step.status();
      const auto found = std::find(next, row.end(), step->algorithm);
      if (found == row.end()) {
        return wrong(quoted(name_of(step->algorithm)) + " cannot stand there; " +
                     std::string(info(place->op).name) + " over " +
                     std::string(name_of(place->ground)) + " has, in this order, " + names_of(row));
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

  Result<Tuning::Place> place() const {
    const auto parts = parts_of(key_, '.');
    if (parts.size() != 3)
      return wrong(quoted(key_) + " should be GROUND.OPERATION.RANKS, as in links.all_reduce.4");
    if (parts[0] != "links" && parts[0] != "region")
      return wrong(quoted(parts[0]) + " should be links or region");
    const auto op = op_named(parts[1]);
    if (!op) return wrong(quoted(parts[1]) + " is no collective; there are " + ops_known());
    const auto ranks = number_of(parts[2]);
    if (!ranks || *ranks < 1 || *ranks > 10'000'000)
      return wrong(quoted(parts[2]) + " should be a number of ranks");
    return Tuning::Place{parts[0] == "links" ? Ground::links : Ground::region, *op,
                         static_cast<int>(*ranks)};
  }

  static Result<Tuning::Step> step(std::string_view text, bool last) {
    const std::size_t sign = text.find("<=");
    const auto name = trimmed(text.substr(0, sign));
    const auto algorithm = algorithm_named(name);
    if (!algorithm) return wrong(quoted(name) + " is no algorithm");
    if (last) {
      if (sign != std::string_view::npos)
        return wrong("the last algorithm has no limit, but " + quoted(text) + " gives one");
      return Tuning::Step{*algorithm};
    }
    if (sign == std::string_view::npos)
      return wrong(quoted(text) + " needs a limit, as in \"" + std::string(name) + " <= 64 KiB\"");
    const auto up_to = size_of_text(trimmed(text.substr(sign + 2)));
    if (!up_to)
      return wrong(quoted(trimmed(text.substr(sign + 2))) +
                   " is no size; write bytes, as in 65536 or 64 KiB");
    return Tuning::Step{*algorithm, *up_to};
  }

  std::string_view key_, value_;
};

/// Whether the last of its algorithms is for groups over several hosts.
bool goes_by_hosts(Op op) {
  const Algorithm last = algorithms_of(Ground::links, op).back();
  return last == Algorithm::hosts || last == Algorithm::ring;
}

/// One host, where it was measured, does not tell of several: what goes on without a limit there
/// gives way where it would without a file.
bool gives_way(Op op, int ranks, Standing standing) {
  if (standing.several_on_each_host(ranks)) return goes_by_hosts(op);
  return op == Op::reduce &&
         standing.per_host < ranks;  // the wire to the root has to take what on one host memory did
}

/// Where an algorithm ends without a file, on ranks that stand so.
std::uint64_t bound_over_hosts(Op op, Algorithm algorithm, int ranks, Standing standing) {
  const auto row = algorithms_of(Ground::links, op);
  const auto place = std::find(row.begin(), row.end(), algorithm) - row.begin();
  const Selection defaults(Ground::links, ranks, standing);
  const auto& bounds = defaults.bounds()[static_cast<std::size_t>(op)];
  return static_cast<std::size_t>(place) < bounds.size() ? bounds[static_cast<std::size_t>(place)]
                                                         : Selection::kAlways;
}

}  // namespace

Result<Tuning> parse_tuning(std::string_view text, const std::string& name) {
  Tuning tuning;
  int number = 0;
  bool versioned = false;
  const auto at_line = [&](const std::string& what) {
    return Status(
        Code::invalid_argument,
        name + ", line " + std::to_string(number) + ": " + what +
            "; mend the line, or remove the file and let muster bench --tune write it anew");
  };
  for (const std::string_view whole : parts_of(text, '\n')) {
    ++number;
    const auto line = trimmed(whole.substr(0, whole.find('#')));
    if (line.empty()) continue;
    const std::size_t sign = line.find('=');
    const auto key = trimmed(line.substr(0, sign));
    const auto value =
        sign == std::string_view::npos ? std::string_view() : trimmed(line.substr(sign + 1));
    if (key.empty() || value.empty() || key.ends_with('<'))
      return at_line(quoted(line) + " is not KEY = VALUE");
    if (key == "version") {
      if (value != std::to_string(kVersion)) {
        return at_line("version " + std::string(value) +
                       " of the file is not known; this muster reads version " +
                       std::to_string(kVersion));
      }
      versioned = true;
      continue;
    }
    if (!versioned)
      return at_line("the first line that is no comment should be \"version = " +
                     std::to_string(kVersion) + "\"");
    auto read = Line(key, value).read();
    if (!read) return at_line(read.status().message());
    if (!tuning.rules.insert(std::move(*read)).second)
      return at_line(quoted(key) + " stands there twice");
  }
  return tuning;
}

std::string print_tuning(const Tuning& tuning) {
  std::string text =
      "# Which algorithm runs, by size: GROUND.OPERATION.RANKS = ALGORITHM <= BYTES, ..., "
      "ALGORITHM\n"
      "# Written by muster bench --tune; docs/performance.md tells more.\n"
      "version = " +
      std::to_string(kVersion) + "\n";
  for (const auto& [place, rule] : tuning.rules) {
    text += std::string(name_of(place.ground)) + "." + std::string(info(place.op).name) + "." +
            std::to_string(place.ranks) + " =";
    for (std::size_t i = 0; i < rule.size(); ++i) {
      text += (i > 0 ? ", " : " ") + std::string(name_of(rule[i].algorithm));
      if (i + 1 < rule.size()) text += " <= " + size_text(rule[i].up_to);
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
    if (!op) return wrong(quoted(words[0]) + " is no collective; there are " + ops_known());
    Algorithm algorithm{};
    bool known = false;
    if (const auto named = algorithm_named(words.back()); named.has_value() && words.size() == 2) {
      algorithm = *named;
      for (const Ground ground : {Ground::links, Ground::region}) {
        const auto row = algorithms_of(ground, *op);
        known = known || std::find(row.begin(), row.end(), algorithm) != row.end();
      }
    }
    if (!known) {
      return wrong(std::string(info(*op).name) + " has " +
                   names_of(algorithms_of(Ground::links, *op)) + " over links and " +
                   names_of(algorithms_of(Ground::region, *op)) + " over a host's region");
    }
    forced.emplace_back(*op, algorithm);
  }
  return forced;
}

std::string tuning_path() {
  if (const auto given = env_text("MUSTER_TUNING")) return *given == "off" ? "" : *given;
  if (const auto settings = env_text("XDG_CONFIG_HOME")) return *settings + "/muster/tuning";
  if (const auto home = env_text("HOME")) return *home + "/.config/muster/tuning";
  return "";
}

Result<Tuning> tuning_of_environment() {
  Tuning tuning;
  if (const std::string path = tuning_path(); !path.empty()) {
    std::ifstream file(path);
    if (file) {
      std::ostringstream text;
      text << file.rdbuf();
      auto read = parse_tuning(text.str(), "tuning file " + path);
      if (!read) return read.status();
      tuning = std::move(*read);
    } else if (env_text("MUSTER_TUNING")) {
      return Status(Code::invalid_argument,
                    "MUSTER_TUNING names " + path +
                        ", which cannot be read; write it with muster bench --tune, or unset "
                        "the variable");
    }
  }
  if (const auto text = env_text("MUSTER_ALGORITHM")) {
    auto forced = parse_forced(*text);
    if (!forced) return forced.status();
    tuning.forced = std::move(*forced);
  }
  return tuning;
}

Selection select(const Tuning& tuning, Ground ground, int ranks, Standing standing) {
  Selection selection(ground, ranks, standing);
  for (const auto& [place, rule] :
       tuning.rules) {  // by growing numbers of ranks: the last that fits counts
    if (place.ground != ground || place.ranks > ranks ||
        2 * static_cast<std::int64_t>(place.ranks) <= ranks)
      continue;
    bool as_without = false;  // from here on
    for (const Algorithm each : algorithms_of(ground, place.op)) {
      const auto step = std::find_if(rule.begin(), rule.end(),
                                     [each](const Tuning::Step& s) { return s.algorithm == each; });
      const std::uint64_t up_to = step == rule.end() ? 0 : step->up_to;
      std::uint64_t bound = step == rule.end()            ? 0
                            : up_to == Selection::kAlways ? up_to
                                                          : up_to + 1;
      as_without = as_without || (ground == Ground::links && up_to == Selection::kAlways &&
                                  gives_way(place.op, ranks, standing));
      if (as_without) bound = bound_over_hosts(place.op, each, ranks, standing);
      selection.set_bound(place.op, each, bound);
    }
  }
  for (const auto& [op, algorithm] : tuning.forced) selection.force(op, algorithm);
  return selection;
}

}  // namespace muster::collective

#include "core/rendezvous/slurm_lists.h"

#include <charconv>
#include <cstdint>

namespace muster {
namespace {

constexpr std::size_t kMost = 1'000'000;  // limit: a list that is a mistake

std::optional<std::uint64_t> whole(std::string_view digits) {
  std::uint64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (digits.empty() || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

/// The numbers of "1-3,07", as they are written.
bool expand_numbers(std::string_view text, std::vector<std::string>& out) {
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    const std::size_t dash = item.find('-');
    const std::string_view low = item.substr(0, dash);
    const auto first = whole(low);
    const auto last = dash == std::string_view::npos ? first : whole(item.substr(dash + 1));
    if (!first || !last || *last < *first || *last - *first >= kMost - out.size()) return false;
    for (std::uint64_t number = *first; number <= *last; ++number) {
      std::string digits = std::to_string(number);
      if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
      out.push_back(std::move(digits));
    }
    if (comma == std::string_view::npos) return true;
    text.remove_prefix(comma + 1);
  }
}

/// One name with any number of brackets.
bool expand_name(std::string_view text, std::vector<std::string>& out) {
  std::vector<std::string> names{""};
  while (!text.empty()) {
    const std::size_t open = text.find('[');
    for (std::string& name : names) name += text.substr(0, open);
    if (open == std::string_view::npos) break;
    const std::size_t close = text.find(']', open);
    std::vector<std::string> numbers;
    if (close == std::string_view::npos ||
        !expand_numbers(text.substr(open + 1, close - open - 1), numbers) ||
        numbers.size() * names.size() > kMost)
      return false;
    std::vector<std::string> longer;
    for (const std::string& name : names)
      for (const std::string& number : numbers) longer.push_back(name + number);
    names = std::move(longer);
    text.remove_prefix(close + 1);
  }
  for (std::string& name : names) {
    if (name.empty() || name.find(']') != std::string::npos) return false;
    out.push_back(std::move(name));
  }
  return out.size() <= kMost;
}

}  // namespace

std::optional<std::vector<std::string>> expand_node_list(std::string_view text) {
  std::vector<std::string> names;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t at = 0; at <= text.size(); ++at) {
    if (at < text.size() && text[at] == '[') ++depth;
    if (at < text.size() && text[at] == ']') --depth;
    if (depth < 0 || depth > 1) return std::nullopt;
    if (at < text.size() && (text[at] != ',' || depth > 0)) continue;
    if (!expand_name(text.substr(begin, at - begin), names)) return std::nullopt;
    begin = at + 1;
  }
  if (names.empty() || depth != 0) return std::nullopt;
  return names;
}

std::optional<std::vector<int>> expand_tasks_per_node(std::string_view text) {
  std::vector<int> tasks;
  while (true) {
    const std::size_t comma = text.find(',');
    std::string_view item = text.substr(0, comma);
    std::uint64_t times = 1;
    if (const std::size_t open = item.find("(x"); open != std::string_view::npos) {
      const auto repeated =
          item.ends_with(')') ? whole(item.substr(open + 2, item.size() - open - 3)) : std::nullopt;
      if (!repeated) return std::nullopt;
      times = *repeated;
      item = item.substr(0, open);
    }
    const auto count = whole(item);
    if (!count || *count > kMost || times > kMost - tasks.size()) return std::nullopt;
    tasks.insert(tasks.end(), times, static_cast<int>(*count));
    if (comma == std::string_view::npos) return tasks;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace muster

// SPDX-License-Identifier: BSD-3-Clause
#include "lab/bench/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <sstream>
#include <utility>

namespace muster::lab {
namespace {

using cli::bench::Row;

constexpr int kWidth = 300, kHeight = 220, kLeft = 52, kBottom = 34, kTop = 26, kRight = 12,
              kColumns = 3;
constexpr int kLegendLine = 14;
/// Average width of a letter in pixels: text is laid out without knowing the font.
constexpr double kLetter = 5.3;
constexpr const char* kNote =
    "time of one call (below 64 KiB back to back, from there on alone), by bytes; lower is better";

struct AxisRange {
  double low = 0, high = 1;  // logarithms
  double place(double value) const {
    return (std::log10(std::max(value, 1e-3)) - low) / (high - low);
  }
};

std::string number(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

std::string colour(const std::string& library) {
  static const std::map<std::string, std::string> colours = {{"muster", "#0b6e4f"},
                                                             {"gloo", "#c44536"},
                                                             {"openmpi", "#3b6fb6"},
                                                             {"mpich", "#9a7b1c"},
                                                             {"impi", "#7b4fa3"}};
  const auto found = colours.find(library);
  return found == colours.end() ? "#555555" : found->second;
}

std::string label(double x, double y, const std::string& text, const char* anchor,
                  const char* more = "") {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor + "\"" +
         more + ">" + text + "</text>\n";
}

AxisRange range_of(const std::vector<const Row*>& rows, double (*value)(const Row&)) {
  double low = 1e300, high = 0;
  for (const Row* row : rows) {
    low = std::min(low, std::max(value(*row), 1e-3));
    high = std::max(high, value(*row));
  }
  const AxisRange range{std::floor(std::log10(low)),
                        std::ceil(std::log10(std::max(high, low)) + 1e-9)};
  return range.high > range.low ? range : AxisRange{range.low, range.low + 1};
}

std::string line_name(const Row& row) {
  return row.library + (row.cell.memory == "private" ? "" : ", " + row.cell.memory);
}

double bytes_of(const Row& row) { return std::max(1.0, static_cast<double>(row.cell.bytes)); }

std::string time_label(double exponent) {
  const double us = std::pow(10, exponent);
  if (us >= 1e6) return number(us / 1e6) + " s";
  if (us >= 1e3) return std::to_string(static_cast<long>(us / 1e3)) + " ms";
  return (us < 1 ? number(us) : std::to_string(static_cast<long>(us))) + " us";
}

/// A library's memories by the line's kind, since its colour is the library's.
std::string dashes(const Row& row) {
  if (row.cell.memory == "private") return "";
  return row.cell.memory == "arena" ? " stroke-dasharray=\"6 3\"" : " stroke-dasharray=\"2 3\"";
}

/// One operation on one number of ranks.
std::string panel(const std::string& title, const std::vector<const Row*>& rows, double left,
                  double top) {
  const AxisRange x = range_of(rows, bytes_of), y = range_of(rows, cli::bench::compared);
  const double width = kWidth - kLeft - kRight, height = kHeight - kTop - kBottom;
  const bool one_size = std::all_of(rows.begin(), rows.end(), [&](const Row* row) {
    return bytes_of(*row) == bytes_of(*rows.front());
  });
  const auto at_x = [&](double bytes) {
    return left + kLeft + width * (one_size ? 0.5 : x.place(bytes));
  };
  const auto at_y = [&](double us) { return top + kTop + height * (1 - y.place(us)); };
  std::string svg = label(left + kLeft, top + 16, title, "start", " font-weight=\"bold\"");
  for (double exponent = y.low; exponent <= y.high + 0.5; ++exponent) {
    const double line = at_y(std::pow(10, exponent));
    svg += "<line x1=\"" + number(left + kLeft) + "\" x2=\"" + number(left + kLeft + width) +
           "\" y1=\"" + number(line) + "\" y2=\"" + number(line) + "\" stroke=\"#dddddd\"/>\n" +
           label(left + kLeft - 5, line + 4, time_label(exponent), "end");
  }
  std::map<std::string, std::vector<const Row*>> lines;
  std::map<std::uint64_t, bool> sizes;
  for (const Row* row : rows) {
    lines[line_name(*row)].push_back(row);
    sizes[row->cell.bytes] = true;
  }
  for (const auto& [bytes, unused] : sizes) {
    svg += label(at_x(std::max<double>(1, static_cast<double>(bytes))),
                 top + kHeight - kBottom + 15, cli::bench::size_text(bytes), "middle");
  }
  for (auto& [name, points] : lines) {
    const std::string& library = points.front()->library;
    std::sort(points.begin(), points.end(),
              [](const Row* a, const Row* b) { return a->cell.bytes < b->cell.bytes; });
    std::string path;
    for (const Row* row : points) {
      const std::string px = number(at_x(bytes_of(*row))), py = number(at_y(compared(*row)));
      path += (path.empty() ? "" : " ") + px + "," + py;
      svg += "<circle cx=\"" + px + "\" cy=\"" + py + "\" r=\"" +
             (library == "muster" ? "3.5" : "2.5") + "\" fill=\"" + colour(library) + "\"/>\n";
    }
    svg += "<polyline points=\"" + path + "\" fill=\"none\" stroke=\"" + colour(library) +
           "\" stroke-width=\"" + (library == "muster" ? "2.5" : "1.3") + "\"" +
           dashes(*points.front()) + "/>\n";
  }
  return svg;
}

/// Names and note above the panels, in as many lines as `width` asks for.
class Legend {
 public:
  explicit Legend(double width) : width_(width) {}

  void add_line(const Row& row) {
    const std::string name = line_name(row);
    make_room(24 + kLetter * static_cast<double>(name.size()));
    svg_ += "<line x1=\"" + number(at_) + "\" x2=\"" + number(at_ + 20) + "\" y1=\"" +
            number(line_) + "\" y2=\"" + number(line_) + "\" stroke-width=\"2.5\" stroke=\"" +
            colour(row.library) + "\"" + dashes(row) + "/>\n" +
            label(at_ + 24, line_ + 4, name, "start");
    at_ += 40 + 6.0 * static_cast<double>(name.size());
  }
  void add_note(const std::string& note) {
    const double letters = (width_ - kLeft - kRight) / kLetter;
    if (static_cast<double>(note.size()) <= letters) {
      make_room(10 + kLetter * static_cast<double>(note.size()));
      svg_ += label(at_ > kLeft ? at_ + 10 : at_, line_ + 4, note, "start");
      return;
    }
    if (at_ > kLeft) next_line();
    std::string part;
    std::istringstream words(note);
    for (std::string word; words >> word;) {
      if (static_cast<double>(part.size() + word.size() + 1) > letters) {
        svg_ += label(at_, line_ + 4, std::exchange(part, ""), "start");
        next_line();
      }
      part += (part.empty() ? "" : " ") + word;
    }
    svg_ += label(at_, line_ + 4, part, "start");
  }
  const std::string& svg() const { return svg_; }
  int height() const { return static_cast<int>(line_) + 17; }

 private:
  void make_room(double wanted) {
    if (at_ > kLeft && at_ + wanted > width_ - kRight) next_line();
  }
  void next_line() {
    at_ = kLeft;
    line_ += kLegendLine;
  }

  const double width_;
  double at_ = kLeft, line_ = 13;
  std::string svg_;
};

}  // namespace

std::string plot(const std::vector<Row>& rows) {
  std::vector<std::pair<std::string, std::vector<const Row*>>> panels;
  std::vector<std::pair<std::string, const Row*>> names;
  for (const Row& row : rows) {
    if (row.figures.iterations == 0) continue;
    const bool known = std::any_of(names.begin(), names.end(),
                                   [&](const auto& name) { return name.first == line_name(row); });
    if (!known) names.emplace_back(line_name(row), &row);
    const std::string title = row.cell.op + ", " + std::to_string(row.ranks) + " ranks";
    auto found = std::find_if(panels.begin(), panels.end(),
                              [&](const auto& panel) { return panel.first == title; });
    if (found == panels.end()) found = panels.insert(panels.end(), {title, {}});
    found->second.push_back(&row);
  }
  const int columns = std::min<int>(kColumns, std::max<int>(1, static_cast<int>(panels.size())));
  const int lines = (static_cast<int>(panels.size()) + columns - 1) / columns;
  Legend legend(columns * kWidth);
  for (const auto& [name, row] : names) legend.add_line(*row);
  legend.add_note(kNote);
  const std::string width = std::to_string(columns * kWidth),
                    height = std::to_string(lines * kHeight + legend.height());
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + width + "\" height=\"" +
                    height + "\" viewBox=\"0 0 " + width + " " + height +
                    "\" font-family=\"sans-serif\" font-size=\"10\">\n<rect width=\"100%\" "
                    "height=\"100%\" fill=\"#ffffff\"/>\n" +
                    legend.svg();
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const int column = static_cast<int>(i) % columns, line = static_cast<int>(i) / columns;
    svg +=
        panel(panels[i].first, panels[i].second, column * kWidth, legend.height() + line * kHeight);
  }
  return svg + "</svg>\n";
}

}  // namespace muster::lab

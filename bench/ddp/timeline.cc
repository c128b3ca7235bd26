// SPDX-License-Identifier: BSD-3-Clause
#include "timeline.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "core/group/group_core.h"
#include "core/trace/reader.h"
#include "core/trace/recorder.h"
#include "muster/init.h"

namespace bench_ddp {
namespace {

constexpr double kWidth = 900, kLeft = 130, kRight = 20, kLane = 22, kGap = 14, kTop = 40;

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

const char* colour(const std::string& name) {
  if (name == "forward") return "#9dc3e6";
  if (name == "backward") return "#3b6fb6";
  if (name == "optimizer") return "#a8a8a8";
  return "#0b6e4f";
}

std::string text_at(double x, double y, const std::string& text, const char* anchor) {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor + "\">" +
         text + "</text>\n";
}

std::string bar(const Span& span, double x, double width, double y) {
  return "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" +
         number(std::max(width, 0.5)) + "\" height=\"" + number(kLane) + "\" fill=\"" +
         colour(span.name) + "\" stroke=\"#ffffff\" stroke-width=\"0.5\"><title>" + span.name +
         ", " + number(static_cast<double>(span.end_ns - span.start_ns) / 1e3) + " us" +
         (span.bytes > 0 ? ", " + std::to_string(span.bytes) + " bytes" : "") + "</title></rect>\n";
}

}  // namespace

void add_calls(RankTimeline& timeline) {
  const auto& recorder = muster::core_of(muster::default_group()).parts().recorder;
  if (!recorder || timeline.phases.empty()) return;
  const auto trace = muster::trace::read_trace(recorder->path());
  if (!trace) return;
  for (const auto& record : trace->records) {
    if (record.under_way() || record.start_ns < timeline.phases.front().start_ns ||
        record.end_ns > timeline.phases.back().end_ns)
      continue;
    timeline.calls.push_back({record.name, record.start_ns, record.end_ns, record.bytes});
  }
}

void write(const RankTimeline& timeline, const std::string& path) {
  std::ofstream file(path);
  for (const auto* spans : {&timeline.phases, &timeline.calls})
    for (const Span& span : *spans)
      file << (spans == &timeline.phases ? "phase " : "call ") << span.name << ' ' << span.start_ns
           << ' ' << span.end_ns << ' ' << span.bytes << '\n';
}

RankTimeline read(const std::string& path) {
  RankTimeline timeline;
  std::ifstream file(path);
  std::string kind;
  for (Span span; file >> kind >> span.name >> span.start_ns >> span.end_ns >> span.bytes;)
    (kind == "phase" ? timeline.phases : timeline.calls).push_back(span);
  return timeline;
}

std::string draw(const std::vector<RankTimeline>& ranks, const std::string& title) {
  std::int64_t first = INT64_MAX, last = 0;
  for (const auto& rank : ranks) {
    for (const Span& span : rank.phases) {
      first = std::min(first, span.start_ns);
      last = std::max(last, span.end_ns);
    }
  }
  if (first >= last) return {};
  const double scale = (kWidth - kLeft - kRight) / static_cast<double>(last - first);
  const double height = kTop + static_cast<double>(ranks.size()) * (2 * kLane + kGap) + 30;
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + number(kWidth) +
                    "\" height=\"" + number(height) +
                    "\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" "
                    "height=\"100%\" fill=\"#ffffff\"/>\n" +
                    text_at(kLeft, 22, title, "start");
  double at = kWidth - kRight;
  for (const char* name : {"call", "optimizer", "backward", "forward"}) {
    svg += text_at(at, 22, name, "end");
    at -= 8 * static_cast<double>(std::string(name).size()) + 14;
    svg += "<rect x=\"" + number(at) + "\" y=\"12.0\" width=\"10\" height=\"10\" fill=\"" +
           colour(name) + "\"/>\n";
    at -= 14;
  }
  double y = kTop;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    svg += text_at(kLeft - 8, y + 15, "rank " + std::to_string(rank) + " computes", "end") +
           text_at(kLeft - 8, y + kLane + 15, "calls under way", "end");
    const auto lane = [&](const std::vector<Span>& spans, double top) {
      for (const Span& span : spans)
        svg += bar(span, kLeft + static_cast<double>(span.start_ns - first) * scale,
                   static_cast<double>(span.end_ns - span.start_ns) * scale, top);
    };
    lane(ranks[rank].phases, y);
    lane(ranks[rank].calls, y + kLane);
    y += 2 * kLane + kGap;
  }
  const double whole_ms = static_cast<double>(last - first) / 1e6;
  for (int tick = 0; tick <= 4; ++tick)  // the last one ends where the bars do
    svg += text_at(kLeft + (kWidth - kLeft - kRight) * tick / 4, y + 12,
                   number(whole_ms * tick / 4) + " ms", tick < 4 ? "middle" : "end");
  return svg + "</svg>\n";
}

}  // namespace bench_ddp

// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/bench/results.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace muster::cli::bench {
namespace {

template <class... Arguments>
std::string print(const char* format, Arguments... arguments) {
  std::array<char, 512> text;
  const int length = std::snprintf(text.data(), text.size(), format, arguments...);
  return {text.data(), std::min(static_cast<std::size_t>(std::max(length, 0)), text.size() - 1)};
}

/// Three digits that count.
std::string time_text(double us) {
  if (us < 10) return print("%.2f", us);
  return us < 100 ? print("%.1f", us) : print("%.0f", us);
}

}  // namespace

double compared(const Row& row) {
  return row.cell.bytes >= 65536 ? row.figures.p50_us : row.figures.loop_us;
}

std::string size_text(std::uint64_t bytes) {
  if (bytes >= (1u << 20) && bytes % (1u << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  if (bytes >= 1024 && bytes % 1024 == 0) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

Row summarize(std::string library, const Cell& cell, int ranks, std::string transport,
              const std::vector<Figures>& rounds) {
  Row row;
  row.library = std::move(library);
  row.transport = std::move(transport);
  row.ranks = ranks;
  row.cell = cell;
  std::vector<double> loops, halves, ends, counted;
  for (const Figures& round : rounds) {
    loops.push_back(round.loop_us);
    halves.push_back(round.p50_us);
    ends.push_back(round.p99_us);
    row.figures.min_us =
        row.figures.iterations == 0 ? round.min_us : std::min(row.figures.min_us, round.min_us);
    row.figures.iterations += round.iterations;
  }
  row.figures.loop_us = median(loops);
  row.figures.p50_us = median(halves);
  row.figures.p99_us = median(ends);
  const std::vector<double>& values = cell.bytes >= 65536 ? halves : loops;
  if (!values.empty() && compared(row) > 0) {
    row.spread = (*std::max_element(values.begin(), values.end()) -
                  *std::min_element(values.begin(), values.end())) /
                 compared(row);
  }
  return row;
}

void compare(std::vector<Row>& rows) {
  for (Row& row : rows) {
    double best = 0;
    for (const Row& other : rows) {
      if (other.library == row.library || other.figures.iterations == 0) continue;
      if (best == 0 || compared(other) < best) best = compared(other);
    }
    row.ratio = best > 0 ? compared(row) / best : 0;
  }
}

std::string table_head(const std::vector<std::string>& libraries) {
  std::string head = print("%-15s %5s %8s %9s", "us", "ranks", "bytes", "memory");
  for (const std::string& library : libraries)
    head += print(" | %9s loop %8s p50", library.c_str(), "");
  if (libraries.size() > 1) head += " | times the best rival (spread)";
  return head + "\n";
}

std::string table_lines(const std::vector<Row>& rows) {
  std::string lines;
  for (const Row& first : rows) {
    if (first.library != rows.front().library) continue;
    lines += print("%-15s %5d %8s %9s", first.cell.op.c_str(), first.ranks,
                   size_text(first.cell.bytes).c_str(), first.cell.memory.c_str());
    for (const Row& row : rows) {
      if (&row != &first && row.library == first.library) continue;
      if (row.figures.iterations == 0) {
        lines += print(" | %14s %12s", "-", "-");
      } else {
        lines += print(" | %14s %12s", time_text(row.figures.loop_us).c_str(),
                       time_text(row.figures.p50_us).c_str());
      }
    }
    if (first.ratio > 0) lines += print(" | %.2f (%.0f %%)", first.ratio, first.spread * 100);
    lines += "\n";
  }
  return lines;
}

std::string json(const Row& row) {
  std::string text =
      print("{\"library\":\"%s\",\"op\":\"%s\",\"ranks\":%d,\"bytes\":%llu,", row.library.c_str(),
            row.cell.op.c_str(), row.ranks, static_cast<unsigned long long>(row.cell.bytes));
  text += print("\"dtype\":\"%s\",\"memory\":\"%s\",\"transport\":\"%s\",", row.cell.dtype.c_str(),
                row.cell.memory.c_str(), row.transport.c_str());
  text += print(
      "\"loop_us\":%.4f,\"p50_us\":%.4f,\"min_us\":%.4f,\"p99_us\":%.4f,\"iterations\":%llu,"
      "\"spread\":%.4f,",
      row.figures.loop_us, row.figures.p50_us, row.figures.min_us, row.figures.p99_us,
      static_cast<unsigned long long>(row.figures.iterations), row.spread);
  if (row.engine) text += "\"engine\":true,";
  if (row.threads) text += "\"threads\":true,";
  return text +
         (row.ratio > 0 ? print("\"ratio_to_best\":%.4f}", row.ratio) : "\"ratio_to_best\":null}");
}

}  // namespace muster::cli::bench

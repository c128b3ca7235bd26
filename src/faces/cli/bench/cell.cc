#include "faces/cli/bench/cell.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string_view>

#include "core/wait/topology.h"

namespace muster::cli::bench {
namespace {

constexpr std::string_view kFroms[] = {"last", "first", "own"};  // by CountFrom

}  // namespace

double settling_of(int ranks) { return ranks > usable_cores() ? 0.2 : 0; }

std::string encode(const Cell& cell) {
  std::ostringstream line;
  line << "cell " << cell.op << ' ' << cell.bytes << ' ' << cell.dtype << ' ' << cell.memory << ' '
       << cell.seconds << ' ' << cell.settling << ' ' << kFroms[static_cast<std::size_t>(cell.from)]
       << '\n';
  return line.str();
}

Result<std::optional<Cell>> decode_order(const std::string& line) {
  std::istringstream words(line);
  std::string kind, from;
  words >> kind;
  if (kind.empty() || kind == "quit") return std::optional<Cell>();
  Cell cell;
  if (kind == "cell" && words >> cell.op >> cell.bytes >> cell.dtype >> cell.memory >>
                            cell.seconds >> cell.settling >> from) {
    const auto* const found = std::find(std::begin(kFroms), std::end(kFroms), from);
    if (found != std::end(kFroms)) {
      cell.from = static_cast<CountFrom>(found - std::begin(kFroms));
      return std::optional(cell);
    }
  }
  return Status(Code::internal, "an order that this worker does not know: " + line);
}

std::string encode(const Figures& figures) {
  std::ostringstream line;
  line.precision(9);
  line << "row " << figures.loop_us << ' ' << figures.p50_us << ' ' << figures.min_us << ' '
       << figures.p99_us << ' ' << figures.iterations << '\n';
  return line.str();
}

CellResult decode_answer(const std::string& line) {
  std::istringstream words(line);
  std::string kind;
  words >> kind;
  Figures figures;
  if (kind == "row" && words >> figures.loop_us >> figures.p50_us >> figures.min_us >>
                           figures.p99_us >> figures.iterations) {
    return {figures, "", false};
  }
  const std::string rest = line.size() > kind.size() + 1 ? line.substr(kind.size() + 1) : "";
  if (kind == "skip") return {{}, rest, true};
  return {{}, kind == "error" ? rest : "it answered \"" + line + "\"", false};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace muster::cli::bench

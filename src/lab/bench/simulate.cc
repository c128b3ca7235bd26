// SPDX-License-Identifier: BSD-3-Clause
#include "lab/bench/simulate.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>

#include "core/base/process/limits.h"
#include "core/collective/select/tuning.h"
#include "faces/cli/bench/results.h"
#include "lab/model/play.h"
#include "lab/model/schedule.h"

namespace muster::lab {
namespace {

using cli::bench::size_text;
using collective::Algorithm;
using collective::Medium;
using collective::Op;
namespace plan = collective::plan;

constexpr int kMostPlayed = 4096;  // limit: time, of millions of messages

std::string seconds_text(double seconds) {
  char text[32];
  const double us = seconds * 1e6;
  if (us < 1e4) {
    std::snprintf(text, sizeof text, us < 100 ? "%.1f us" : "%.0f us", us);
  } else if (us < 1e7) {
    std::snprintf(text, sizeof text, us < 1e6 ? "%.1f ms" : "%.0f ms", us / 1000);
  } else {
    std::snprintf(text, sizeof text, "%.0f s", seconds);
  }
  return text;
}

struct Prediction {
  Algorithm algorithm;
  plan::OperationCost work;
  bool ours;
  double seconds = 0;
  double played = -1;  // -1: it is not
};

/// Those of muster first.
std::vector<Prediction> algorithms_for(Op op, plan::Crew crew) {
  std::vector<Prediction> all;
  const auto row = algorithms_of(Medium::network, op);
  for (const Algorithm algorithm : row)
    all.push_back({algorithm, plan::work_of(op, algorithm, crew), true});
  for (int other = 0; other < collective::kAlgorithms; ++other) {
    const auto algorithm = static_cast<Algorithm>(other);
    if (std::find(row.begin(), row.end(), algorithm) != row.end() ||
        !plan::Schedule::exists(op, algorithm))
      continue;
    all.push_back({algorithm, plan::work_of(op, algorithm, crew), false});
  }
  return all;
}

int ranks_per_host(const Simulation& simulation, int ranks) {
  if (simulation.ranks_per_host > 0) return std::min(simulation.ranks_per_host, ranks);
  return simulation.hosts > 0 ? ranks / simulation.hosts : 1;
}

/// The placement by which a group of the crew selects its algorithms.
collective::GroupPlacement placement_of(plan::Crew crew) {
  return {.first_ranks = collective::even_hosts(crew.ranks, crew.ranks_per_host)};
}

std::string json_of(Op op, plan::Crew crew, std::uint64_t bytes, const Prediction& each,
                    bool selected) {
  char text[320];
  std::snprintf(text, sizeof text,
                "{\"op\":\"%s\",\"ranks\":%d,\"ranks_per_host\":%d,\"bytes\":%llu,\"algorithm\":\"%"
                "s\",\"predicted_us\":%.3f,"
                "\"muster\":%s,\"selected\":%s}\n",
                std::string(collective::info(op).name).c_str(), crew.ranks, crew.ranks_per_host,
                static_cast<unsigned long long>(bytes),
                std::string(name_of(each.algorithm)).c_str(), each.seconds * 1e6,
                each.ours ? "true" : "false", selected ? "true" : "false");
  std::string row = text;
  if (each.played < 0) return row;
  std::snprintf(text, sizeof text, ",\"played_us\":%.3f}\n", each.played * 1e6);
  return row.substr(0, row.rfind('}')) + text;
}

std::string line_of(Op op, plan::Crew crew, std::uint64_t bytes, const std::vector<Prediction>& all,
                    Algorithm selected) {
  char head[96];
  std::snprintf(head, sizeof head, "%-14s %6d ranks %6d hosts %8s",
                std::string(collective::info(op).name).c_str(), crew.ranks,
                (crew.ranks + crew.ranks_per_host - 1) / crew.ranks_per_host,
                size_text(bytes).c_str());
  std::string line = head;
  const Prediction *picked = nullptr, *best = nullptr;
  for (const Prediction& each : all) {
    // An algorithm that is never used for calls of this size is not compared.
    const bool able = bytes <= most_bytes(Medium::network, op, each.algorithm, crew.ranks) &&
                      (each.algorithm != Algorithm::hosts || each.algorithm == selected ||
                       placement_of(crew).shares_hosts(crew.ranks));
    line += " | " + std::string(name_of(each.algorithm)) + (each.ours ? " " : " (model) ") +
            (able ? seconds_text(each.seconds) : "-");
    if (each.algorithm == selected) picked = &each;
    if (each.ours && able && (best == nullptr || each.seconds < best->seconds)) best = &each;
  }
  line += " | picks " + std::string(name_of(selected));
  if (picked != nullptr && best != nullptr && picked->seconds > 1.01 * best->seconds) {
    char much[64];
    std::snprintf(much, sizeof much, ", %.2f times the best", picked->seconds / best->seconds);
    line += much;
  }
  if (picked != nullptr && picked->played >= 0) {
    line += ", played " + seconds_text(picked->played);
    char ratio[64];
    std::snprintf(ratio, sizeof ratio, ", %.2f of the model", picked->played / picked->seconds);
    if (picked->seconds > 0) line += ratio;
  }
  return line + "\n";
}

/// An error if some number of ranks cannot be played, or be spread evenly over the hosts.
Status check_ranks(const Simulation& simulation) {
  for (const int ranks : simulation.ranks) {
    if (simulation.play && ranks > kMostPlayed)
      return Status(Code::invalid_argument, "--play is for at most " + std::to_string(kMostPlayed) +
                                                " ranks, not for " + std::to_string(ranks) +
                                                "; leave it out to have the model's times alone");
    if (simulation.hosts == 0 || ranks % simulation.hosts == 0) continue;
    return Status(Code::invalid_argument,
                  std::to_string(ranks) + " ranks do not stand evenly on " +
                      std::to_string(simulation.hosts) +
                      " hosts; say multiples with --ranks, or --ranks-per-host instead of --hosts");
  }
  return {};
}

}  // namespace

Status simulate(const Simulation& simulation) {
  if (Status checked = check_ranks(simulation); !checked) return checked;
  auto tuning = collective::tuning_of_environment();
  if (!tuning) return tuning.status();
  const FileSizeSignalBlock block;
  std::ofstream rows;
  if (!simulation.json.empty()) rows.open(simulation.json, std::ios::app);
  for (const std::string& name : simulation.ops) {
    const auto op = collective::op_named(name);
    if (!op) return Status(Code::invalid_argument, name + " has no algorithms to simulate");
    for (const int ranks : simulation.ranks) {
      const plan::Crew crew{ranks, ranks_per_host(simulation, ranks)};
      auto all = algorithms_for(*op, crew);
      const collective::Selection selection =
          collective::select(*tuning, Medium::network, ranks, placement_of(crew));
      const std::vector<std::uint64_t> sizes =
          *op == Op::barrier ? std::vector<std::uint64_t>{0} : simulation.sizes;
      for (const std::uint64_t bytes : sizes) {
        for (Prediction& each : all)
          each.seconds = plan::predict(*op, each.algorithm, static_cast<double>(bytes),
                                       simulation.machine, crew, each.work);
        const Algorithm selected = selection.choose(*op, bytes);
        for (Prediction& each : all)
          if (simulation.play && each.algorithm == selected)
            each.played =
                plan::play(*op, selected, static_cast<double>(bytes), simulation.machine, crew);
        std::printf("%s", line_of(*op, crew, bytes, all, selected).c_str());
        std::fflush(stdout);
        for (const Prediction& each : all)
          rows << json_of(*op, crew, bytes, each, each.algorithm == selected);
      }
    }
  }
  if (!simulation.json.empty() && !rows)
    return Status(Code::invalid_argument, "cannot write " + simulation.json);
  return {};
}

}  // namespace muster::lab

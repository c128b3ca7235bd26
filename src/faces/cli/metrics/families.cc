// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/metrics/families.h"

#if MUSTER_PROMETHEUS
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#endif

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "core/base/version.h"
#include "faces/cli/printable.h"
#include "faces/cli/trace.h"

namespace muster::cli {

#if MUSTER_PROMETHEUS
namespace {

using prometheus::MetricType;
using Labels = std::vector<prometheus::ClientMetric::Label>;

/// A family without metrics is left out of the text.
class Families {
 public:
  /// Metrics that follow are of this family.
  void begin(const std::string& name, MetricType type, const std::string& help) {
    families_.push_back({name, help, type, {}});
  }
  void put(Labels labels, double value) {
    prometheus::ClientMetric metric;
    metric.label = std::move(labels);
    for (auto& label : metric.label) label.value = printable_line(label.value);
    (families_.back().type == MetricType::Counter ? metric.counter.value : metric.gauge.value) =
        value;
    families_.back().metric.push_back(std::move(metric));
  }
  std::string text() {
    std::erase_if(families_, [](const auto& family) { return family.metric.empty(); });
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families_);
    return out.str();
  }

 private:
  std::vector<prometheus::MetricFamily> families_;
};

Labels labels_of(const CallKind& kind) {
  return {
      {"rank", std::to_string(kind.rank)}, {"group", kind.group}, {"operation", kind.operation}};
}
Labels labels_of(int rank) { return {{"rank", std::to_string(rank)}}; }
Labels labels_of(int rank, const std::string& group) {
  return {{"rank", std::to_string(rank)}, {"group", group}};
}

void put_job(Families& families, const NodeSample& sample) {
  const auto& numbers = sample.numbers;
  families.begin("target_info", MetricType::Gauge,
                 "The job and the host that these metrics are of.");
  families.put({{"service_name", "muster"},
                {"service_version", std::string(version())},
                {"service_instance_id", numbers.job},
                {"host_name", numbers.host}},
               1);
  families.begin(
      "muster_job_epoch", MetricType::Gauge,
      "Number of the epoch whose workers run; 0 in a job of one node that repairs none.");
  families.put({}, static_cast<double>(numbers.epoch));
  families.begin("muster_job_ranks", MetricType::Gauge, "Number of ranks of the job.");
  families.put({}, numbers.world_size);
  families.begin("muster_job_restarts_total", MetricType::Counter,
                 "Times that the job's workers were started again.");
  families.put({}, static_cast<double>(numbers.restarts));
  families.begin("muster_worker_failures_total", MetricType::Counter,
                 "Workers of this node that have failed.");
  families.put({}, static_cast<double>(numbers.failures));
  families.begin("muster_job_last_commit", MetricType::Gauge,
                 "Number of the newest commit of an elastic job; 0 before the first one.");
  families.put({}, static_cast<double>(numbers.commits));
  families.begin("muster_store_connections_refused_total", MetricType::Counter,
                 "Connections that the job's store has turned away; on the node that serves it.");
  if (sample.refused) families.put({}, static_cast<double>(*sample.refused));
  families.begin("process_memory_usage_bytes", MetricType::Gauge,
                 "Resident memory of the process that the launcher started.");
  for (const auto& [rank, bytes] : sample.memory)
    families.put(labels_of(rank), static_cast<double>(bytes));
  families.begin("muster_metrics_collection_seconds_total", MetricType::Counter,
                 "Seconds that the launcher has spent on these metrics.");
  families.put({}, sample.collection_seconds);
}

void put_calls(Families& families, const CallTotals& totals) {
  families.begin("muster_calls_total", MetricType::Counter, "Calls that have ended.");
  for (const auto& [kind, sums] : totals.calls()) families.put(labels_of(kind), sums.calls);
  families.begin("muster_call_io_bytes_total", MetricType::Counter,
                 "Bytes of this rank's tensors in calls that have ended.");
  for (const auto& [kind, sums] : totals.calls()) families.put(labels_of(kind), sums.bytes);
  families.begin(
      "muster_call_time_seconds_total", MetricType::Counter,
      "Seconds in calls that have ended. State waiting: until the last rank of this node "
      "had entered the call; moving: from then on; unattributed: of calls whose other "
      "members were not seen.");
  for (const auto& [kind, sums] : totals.calls()) {
    for (const auto& [state, seconds] :
         {std::pair("waiting", sums.waiting), std::pair("moving", sums.moving),
          std::pair("unattributed", sums.unattributed)}) {
      Labels labels = labels_of(kind);
      labels.push_back({"state", state});
      families.put(std::move(labels), seconds);
    }
  }
  families.begin("muster_calls_estimated_total", MetricType::Counter,
                 "Calls, of those in muster_calls_total, whose kind and seconds are taken from "
                 "calls close to them: the trace had forgotten them.");
  for (const auto& [rank, calls] : totals.estimated()) families.put(labels_of(rank), calls);
  families.begin("muster_call_failures_total", MetricType::Counter, "Calls that have failed.");
  for (const auto& [rank, failures] : totals.failures()) families.put(labels_of(rank), failures);
  families.begin("muster_collective_compared_total", MetricType::Counter,
                 "Collectives of this rank that were compared with the node's other ranks.");
  for (const auto& [place, late] : totals.late())
    families.put(labels_of(place.first, place.second), late.calls);
  families.begin("muster_collective_late_seconds_total", MetricType::Counter,
                 "Seconds by which this rank entered them after the node's first rank.");
  for (const auto& [place, late] : totals.late())
    families.put(labels_of(place.first, place.second), late.seconds);
}

void put_present(Families& families, const trace::JobTrace& job) {
  const std::int64_t now = job.now_ns();
  families.begin("muster_rank_up", MetricType::Gauge,
                 "1: the rank's process runs; 0: it is stopped (SIGSTOP) or has ended.");
  for (const auto& trace : job.ranks) {
    const bool runs = trace.life == trace::Life::running || trace.life == trace::Life::left;
    families.put(labels_of(trace.rank), runs ? 1 : 0);
  }
  families.begin("muster_calls_in_flight", MetricType::Gauge,
                 "Calls that the rank has made and that have not ended.");
  for (const auto& trace : job.ranks) {
    std::map<std::string, double> under_way;
    for (const auto& group : trace.groups) under_way[group.name] = 0;
    for (const auto& record : trace.records)
      if (record.under_way()) under_way[trace.groups[record.group].name] += 1;
    for (const auto& [group, calls] : under_way) families.put(labels_of(trace.rank, group), calls);
  }
  families.begin("muster_call_age_seconds", MetricType::Gauge,
                 "Age of the oldest of them; 0: there is none.");
  for (const auto& trace : job.ranks) {
    const auto* oldest = in_flight(trace);
    const std::int64_t age =
        oldest == nullptr ? 0 : std::max<std::int64_t>(now - oldest->start_ns, 0);
    families.put(labels_of(trace.rank), static_cast<double>(age) * 1e-9);
  }
  families.begin("muster_rank_behind_seconds", MetricType::Gauge,
                 "How long the others have waited for this rank in the call that it holds up; 0: "
                 "it holds up none for longer than calls of a healthy job take.");
  std::map<int, std::int64_t> behind;
  for (const auto& trace : job.ranks) behind[trace.rank] = 0;
  for (const auto& holdup : trace::find_holdups(job)) {
    if (holdup.usual) continue;
    for (const int rank : holdup.behind)
      behind[rank] = std::max(behind[rank], now - holdup.since_ns);
  }
  for (const auto& [rank, waited] : behind)
    families.put(labels_of(rank), static_cast<double>(waited) * 1e-9);
}

}  // namespace

std::string metrics_text(const NodeSample& sample) {
  Families families;
  put_job(families, sample);
  put_calls(families, *sample.totals);
  if (sample.job != nullptr) put_present(families, *sample.job);
  return families.text();
}
#else
std::string metrics_text(const NodeSample&) { return {}; }  // `serve_metrics` refuses
#endif

}  // namespace muster::cli

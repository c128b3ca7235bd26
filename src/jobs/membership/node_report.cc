#include "jobs/membership/node_report.h"

#include "core/base/bytes.h"

namespace muster::membership {

std::string encode(const NodeReport& report) {
  ByteWriter writer;
  writer.put(static_cast<std::uint8_t>(report.phase))
      .put(report.epoch)
      .put(report.wanted_slot)
      .put(report.exit_code)
      .put_text(report.host)
      .put_text(report.reason)
      .put_text(report.details)
      .put(static_cast<std::uint8_t>(report.killed))
      .put(report.trained_in)
      .put(report.least_nodes)
      .put(report.most_nodes);
  return writer.take();
}

Result<NodeReport> decode_report(std::string_view record) {
  ByteReader reader(record);
  NodeReport report;
  const auto phase = reader.get<std::uint8_t>();
  report.epoch = reader.get<std::int64_t>();
  report.wanted_slot = reader.get<std::int32_t>();
  report.exit_code = reader.get<std::int32_t>();
  report.host = reader.get_text();
  report.reason = reader.get_text();
  report.details = reader.get_text();
  const auto killed = reader.get<std::uint8_t>();
  report.trained_in = reader.get<std::int64_t>();
  report.least_nodes = reader.get<std::int32_t>();
  report.most_nodes = reader.get<std::int32_t>();
  if (!reader.at_end() || phase > static_cast<std::uint8_t>(NodePhase::finished) || killed > 1 ||
      report.wanted_slot < -1 || report.epoch < 0 || report.trained_in < 0 ||
      report.trained_in > report.epoch || report.least_nodes < 0 ||
      report.most_nodes < report.least_nodes) {
    return Status(Code::mismatch,
                  "a node described itself in a form that this version does not know; run the same "
                  "muster on all nodes");
  }
  report.phase = static_cast<NodePhase>(phase);
  report.killed = killed == 1;
  return report;
}

}  // namespace muster::membership

// SPDX-License-Identifier: BSD-3-Clause
// How a node's report lies in the service.
#include <algorithm>

#include "core/base/bytes.h"
#include "jobs/membership/job_view.h"

namespace muster::membership {
namespace {
constexpr std::size_t kMostTroubleText = 256;  // limit: every node hears it of every member
// Not one of the phases, with which records began that had no version. New fields go to the end.
constexpr std::uint8_t kReportVersion = 18;
}  // namespace

void add_trouble(NodeReport& report, std::int64_t epoch, const std::vector<int>& slots,
                 const std::string& text, std::int64_t committed) {
  if (report.troubled_in != epoch) {
    report.troubled_in = epoch;
    report.blamed.clear();
    report.trouble = text.substr(0, kMostTroubleText);
    // Not within a character.
    if (text.size() > kMostTroubleText)
      while (!report.trouble.empty() && (text[report.trouble.size()] & 0xC0) == 0x80)
        report.trouble.pop_back();
  }
  report.committed = committed;
  for (const int slot : slots)
    if (std::ranges::count(report.blamed, slot) == 0) report.blamed.push_back(slot);
  std::ranges::sort(report.blamed);
}

std::string encode(const NodeReport& report) {
  ByteWriter writer;
  writer.put(kReportVersion)
      .put(static_cast<std::uint8_t>(report.phase))
      .put(report.epoch)
      .put(report.wanted_slot)
      .put(report.exit_code)
      .put_text(report.host)
      .put_text(report.reason)
      .put_text(report.details)
      .put(static_cast<std::uint8_t>(report.killed))
      .put(report.trained_in)
      .put(report.least_nodes)
      .put(report.most_nodes)
      .put_text(report.program_id)
      .put_text(report.incarnation)
      .put(report.troubled_in)
      .put_text(report.trouble)
      .put(report.committed)
      .put(report.ending_in)
      .put(report.state_in)
      .put(static_cast<std::uint8_t>(report.state_divided))
      .put(report.lost_in)
      .put(static_cast<std::uint32_t>(report.blamed.size()));
  for (const std::int32_t slot : report.blamed) writer.put(slot);
  writer.put(report.kept_in).put(report.none_in);
  return writer.take();
}

Result<NodeReport> decode_report(std::string_view record) {
  const Status foreign(Code::mismatch,
                       "a node described itself in a form that this version does not know; run the "
                       "same muster on all nodes");
  ByteReader reader(record);
  if (reader.get<std::uint8_t>() != kReportVersion) return foreign;
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
  report.program_id = reader.get_text();
  report.incarnation = reader.get_text();
  report.troubled_in = reader.get<std::int64_t>();
  report.trouble = reader.get_text();
  report.committed = reader.get<std::int64_t>();
  report.ending_in = reader.get<std::int64_t>();
  report.state_in = reader.get<std::int64_t>();
  const auto divided = reader.get<std::uint8_t>();
  report.lost_in = reader.get<std::int64_t>();
  const auto blamed = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < blamed && reader.ok(); ++i)
    report.blamed.push_back(reader.get<std::int32_t>());
  report.kept_in = reader.get<std::int64_t>();
  report.none_in = reader.get<std::int64_t>();
  if (!reader.at_end() || phase > static_cast<std::uint8_t>(NodePhase::finished) || killed > 1 ||
      report.wanted_slot < -1 || report.epoch < 0 || report.trained_in < 0 ||
      report.trained_in > report.epoch || report.least_nodes < 0 ||
      report.most_nodes < report.least_nodes || report.troubled_in < 0 || report.ending_in < 0 ||
      report.committed < 0 || report.state_in < 0 || divided > 1 || report.lost_in < 0 ||
      report.kept_in < 0 || report.none_in < 0)
    return foreign;
  report.phase = static_cast<NodePhase>(phase);
  report.killed = killed == 1;
  report.state_divided = divided == 1;
  return report;
}

}  // namespace muster::membership

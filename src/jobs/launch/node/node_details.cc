// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/node_details.h"

#include <utility>

#include "core/base/bytes.h"

namespace muster::launch {

std::string encode(const NodeDetails& details) {
  ByteWriter writer;
  writer.put_text(encode(details.facts))
      .put_text(details.launcher)
      .put_text(details.program_addr)
      .put(details.program_port)
      .put_text(details.store_addr)
      .put(details.store_port)
      .put(static_cast<std::uint32_t>(details.failures.size()));
  for (const FailureNote& note : details.failures)
    writer.put(note.epoch).put(note.order).put_text(note.text);
  return writer.put_text(details.identity).put_text(details.program).take();
}

Result<NodeDetails> decode_node_details(const std::string& record) {
  ByteReader reader(record);
  NodeDetails details;
  auto facts = decode_node_facts(std::string(reader.get_text()));
  if (!facts) return facts.status();
  details.facts = std::move(*facts);
  details.launcher = reader.get_text();
  details.program_addr = reader.get_text();
  details.program_port = reader.get<std::uint16_t>();
  details.store_addr = reader.get_text();
  details.store_port = reader.get<std::uint16_t>();
  const auto count = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    FailureNote note;
    note.epoch = reader.get<std::int64_t>();
    note.order = reader.get<std::int64_t>();
    note.text = reader.get_text();
    if (reader.ok()) details.failures.push_back(std::move(note));
  }
  details.identity = reader.get_text();
  details.program = reader.get_text();
  if (reader.at_end()) return details;
  return Status(Code::mismatch,
                "a node described itself in a form that this version does not know; run the same "
                "muster on all nodes");
}

}  // namespace muster::launch

#include "rpc/agent/introduction.h"

#include "core/base/bytes.h"
#include "core/group/errors.h"

namespace muster::rpc {

std::string introduce(const std::string& name, const RpcBackendOptions& options) {
  ByteWriter out;
  out.put_text(name).put(static_cast<std::uint32_t>(options.device_maps.size()));
  for (const auto& [to, map] : options.device_maps) {
    out.put_text(to).put(static_cast<std::uint32_t>(map.size()));
    for (const auto& [from, into] : map)
      out.put_text(from.device().str()).put_text(into.device().str());
  }
  return out.take();
}

Introduction read_introduction(const std::string& text, int rank) {
  ByteReader in(text);
  Introduction worker;
  worker.name = in.get_text();
  const auto maps = in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < maps && in.ok(); ++i) {
    auto& map = worker.device_maps[std::string(in.get_text())];
    const auto entries = in.get<std::uint32_t>();
    for (std::uint32_t j = 0; j < entries && in.ok(); ++j) {
      const std::string from(in.get_text());
      const std::string into(in.get_text());
      if (in.ok()) map.emplace(DeviceName(from), DeviceName(into));
    }
  }
  if (!in.at_end())
    throw DistError(
        "init_rpc: what rank " + std::to_string(rank) + " says of itself cannot be read",
        Code::mismatch, {rank});
  return worker;
}

}  // namespace muster::rpc

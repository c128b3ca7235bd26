#include "muster/membership/value_proof.h"

#include <algorithm>

#include "muster/base/bytes.h"

namespace muster::membership {

Secret::Proof ValueProof::proof_of(std::string_view key, std::string_view value) const {
  const std::string text = ByteWriter()
                               .put_text("muster membership in " + service_)
                               .put_text(key)
                               .put_text(value)
                               .take();
  return secret_.prove(as_bytes(text));
}

std::string ValueProof::sign(std::string_view key, std::string_view value) const {
  const Secret::Proof proof = proof_of(key, value);
  return std::string(as_text(proof)).append(value);
}

std::optional<std::string> ValueProof::open(std::string_view key, std::string_view stored) const {
  const std::string_view value = stored.substr(std::min(stored.size(), sizeof(Secret::Proof)));
  const std::string_view proof = stored.substr(0, stored.size() - value.size());
  if (!equal_in_constant_time(as_bytes(proof), proof_of(key, value))) return std::nullopt;
  return std::string(value);
}

Status ValueProof::missing(const std::string& what) const {
  return Status(Code::refused, what + " in " + service_ +
                                   " carries no proof of this job's secret; set the same "
                                   "MUSTER_SECRET on all nodes, unless somebody else writes into " +
                                   service_);
}

}  // namespace muster::membership

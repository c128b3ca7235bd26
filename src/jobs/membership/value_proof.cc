#include "jobs/membership/value_proof.h"

#include <algorithm>

#include "core/base/bytes.h"

namespace muster::membership {
namespace {

constexpr std::size_t kShown = 200;

}  // namespace

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

Status held_by_another(std::string_view name, std::string_view value) {
  const auto is_readable = [](char each) { return each >= ' ' && each <= '~'; };
  const bool readable =
      !value.empty() && value.size() <= kShown && std::ranges::all_of(value, is_readable);
  return Status(Code::refused,
                "the name \"" + std::string(name) + "\" is held by another process" +
                    (readable ? ", which says of itself: " + std::string(value) : std::string()));
}

}  // namespace muster::membership

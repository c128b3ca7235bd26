// SPDX-License-Identifier: BSD-3-Clause
/// The values that kinds of membership keep in a service that only stores values: they carry proofs
/// of the job's secret, because others may write there as well. Also the rule by which an epoch is
/// committed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/security/secret.h"
#include "jobs/membership/membership.h"
#include "muster/status.h"

namespace muster::membership {

/// Puts before a value an HMAC of the job's secret over the service, the key and the value.
class ValueProof {
 public:
  /// `service`: "etcd", for the HMAC and for messages.
  ValueProof(std::string service, Secret secret)
      : service_(std::move(service)), secret_(std::move(secret)) {}

  std::string sign(std::string_view key, std::string_view value) const;
  /// The value without its proof; nothing if that is not the job's.
  std::optional<std::string> open(std::string_view key, std::string_view stored) const;
  /// Code::refused: `what` carries no proof.
  Status missing(const std::string& what) const;

 private:
  Secret::Proof proof_of(std::string_view key, std::string_view value) const;

  const std::string service_;
  const Secret secret_;
};

/// Code::refused: another process has the name. `value`: what that says of itself, which is bytes
/// for other programs: at most its readable beginning is shown.
Status held_by_another(std::string_view name, std::string_view value);

/// Whether `epoch` may be committed where `present` (number 0: none) lies at `revision`.
/// Code::refused, with both numbers.
Status judge_commit(const Epoch& epoch, std::int64_t expected_revision, const Epoch& present,
                    std::int64_t revision);

}  // namespace muster::membership

// SPDX-License-Identifier: BSD-3-Clause
/// How further nodes come to a job with nothing but one line that its first node prints.
///
/// The line has a token: an address and a key of its own. The first node's launcher keeps a small
/// store there (the door), which only the key opens, and in which a node finds where the job's
/// nodes meet, and the job's secret if the launcher has made one. A secret that a user has given
/// stays with the user. The key opens nothing once the door is closed, so a token in a
/// scrolled-away terminal or in a shell's history is worth nothing then.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/security/secret.h"
#include "core/store/factory.h"
#include "jobs/launch/options.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::launch {

/// "HOST:PORT/" and 40 hexadecimal digits, the last 8 of which check all before them.
struct JoinToken {
  Endpoint door;
  std::string key;  ///< 32 random hexadecimal digits

  std::string text() const;
};
/// Errors do not repeat the text.
Result<JoinToken> parse_join_token(const std::string& text);

/// The first node's part for those that come by the token.
struct JoinOffer {
  std::optional<Secret> secret;  ///< made for this job; absent: nodes have their own
  std::string words;             ///< of the line behind the token: options and program
};

/// The record that a node gets at the door.
struct JoinFacts {
  std::optional<Secret> secret;
  Endpoint store;  ///< where the nodes meet, as --rdzv-endpoint has it
  std::string run_id;
  NodeRange nodes;
};
std::string encode(const JoinFacts& facts);
Result<JoinFacts> parse_join_facts(const std::string& record);

/// The store behind the token. Its end closes it.
class JoinDoor {
 public:
  /// Listens at `host`, a free port.
  static Result<std::shared_ptr<JoinDoor>> open(const std::string& host, const JoinFacts& facts,
                                                TimePoint deadline);
  const JoinToken& token() const { return token_; }

 private:
  JoinDoor(JoinToken token, std::shared_ptr<store::TcpStore> store)
      : token_(std::move(token)), store_(std::move(store)) {}
  const JoinToken token_;
  const std::shared_ptr<store::TcpStore> store_;
};

/// Asks at the door, for `timeout` at most.
Result<JoinFacts> ask_at_door(const JoinToken& token, Duration timeout);

}  // namespace muster::launch

// SPDX-License-Identifier: BSD-3-Clause
/// The state and the decisions of an etcd cluster's client, without I/O: which member to ask, what
/// to do when one fails, when to log in, how a watch's stream is cut into messages.
///
/// Requests are sent again after every failure that another member or a later moment may cure, so a
/// request may be carried out twice: callers make theirs idempotent (see `Writer`).
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/security/secret.h"
#include "core/store/etcd/messages.h"
#include "core/store/http/connection.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::store::etcd {

/// The members of a cluster and the login. Thread-safe.
class EtcdSession {
 public:
  EtcdSession(std::vector<std::string> endpoints, std::string user, std::string_view password);

  /// A request to the member that answered last.
  HttpRequest request(std::string path, std::string body) const;
  HttpRequest login_request() const;
  /// The member did not answer: later requests go to the next one.
  void failed(const std::string& endpoint);
  std::size_t members() const { return endpoints_.size(); }
  bool has_user() const { return !user_.empty(); }
  bool needs_login() const;
  void set_token(std::string token);
  /// Unless another one has come in the meantime.
  void forget_token(const std::string& token);
  /// "etcd at http://a:2379, http://b:2379".
  std::string name() const;

 private:
  const std::vector<std::string> endpoints_;
  const std::string user_;
  const SecretBytes password_;
  mutable std::mutex mutex_;  // guards all below; not held during a request
  std::size_t current_ = 0;   // the member that is asked
  std::string token_;
};

/// Paces the attempts of one request: at once with the next member, a pause after each round.
class Attempts {
 public:
  explicit Attempts(EtcdSession& session) : session_(session) {}
  /// `rejected`: this member will not answer differently later (its certificate is wrong).
  void failed(const std::string& endpoint, const std::string& why, bool rejected, TimePoint now);
  TimePoint resume_at() const { return resume_at_; }
  /// Every member has rejected this client.
  bool hopeless() const { return rejected_ >= session_.members(); }
  /// Why the last attempt failed; empty: none has.
  const std::string& why() const { return why_; }

 private:
  EtcdSession& session_;
  std::size_t failed_ = 0;
  std::size_t rejected_ = 0;
  TimePoint resume_at_{};
  std::string why_;
};

/// One request from its first attempt to its reply, with a login where one is needed.
class HttpExchange {
 public:
  /// An empty path: only log in.
  HttpExchange(EtcdSession& session, std::string path, std::string body);

  /// The request to send now. None: `done()`, or nothing before `resume_at()`.
  std::optional<HttpRequest> next(TimePoint now);
  TimePoint resume_at() const { return attempts_.resume_at(); }
  void answered(int http_status, std::string body, TimePoint now);
  void lost(const std::string& why, bool rejected, TimePoint now);
  bool done() const { return result_.has_value(); }
  /// The body of the reply. Call when done.
  Result<std::string> take() { return std::move(*result_); }
  /// Why there is no reply yet; empty: the first attempt goes on.
  const std::string& trouble() const { return attempts_.why(); }

 private:
  void refused(const Refusal& refusal, int http_status, TimePoint now);

  EtcdSession& session_;
  Attempts attempts_;
  const std::string path_;
  const std::string body_;
  HttpRequest sent_;
  bool logging_in_ = false;
  int logins_ = 0;
  std::optional<Result<std::string>> result_;
};

/// Cuts the stream of a watch into its messages, one a line.
class WatchStream {
 public:
  /// Code::store where a line is no message or is longer than any that etcd sends.
  Status feed(std::string_view bytes, std::vector<WatchMessage>& messages);

 private:
  std::string held_;
};

/// A watch that survives failures of etcd's members. Changes that happen while no stream is open
/// are not reported, so its user must read the keys after each message with `created`.
class KeyWatch {
 public:
  KeyWatch(EtcdSession& session, std::string key, std::string range_end);

  /// The request that opens a stream. None before `resume_at()`.
  std::optional<HttpRequest> open(TimePoint now);
  TimePoint resume_at() const { return attempts_.resume_at(); }
  /// Appends the messages that say that the watch has begun or have events. False: the stream is to
  /// be opened again, or `failure()`.
  bool feed(std::string_view bytes, std::vector<WatchMessage>& messages, TimePoint now);
  void lost(const std::string& why, bool rejected, TimePoint now);
  /// Why it cannot go on.
  const Status& failure() const { return failure_; }
  const std::string& trouble() const { return attempts_.why(); }

 private:
  EtcdSession& session_;
  Attempts attempts_;
  const std::string key_;
  const std::string range_end_;
  HttpRequest sent_;
  WatchStream stream_;
  Status failure_;
};

}  // namespace muster::store::etcd

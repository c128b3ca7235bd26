// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/etcd/session.h"

#include <algorithm>
#include <utility>

#include "core/base/bytes.h"

namespace muster::store::etcd {
namespace {

// gRPC's numbers for the outcome of a call.
constexpr int kPermissionDenied = 7, kExhausted = 8, kUnavailable = 14, kUnauthenticated = 16;

constexpr Duration kFirstPause = std::chrono::milliseconds(50);  // limit: pace of attempts
constexpr Duration kLongestPause = std::chrono::seconds(1);      // limit: pace of attempts
constexpr std::size_t kLongestLine = std::size_t{1} << 30;       // limit: protocol

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

/// Another member, or the same one later, may answer well.
bool may_pass(const Refusal& refusal) {
  return refusal.code == kUnavailable || has(refusal.message, "leader changed") ||
         has(refusal.message, "no leader") || has(refusal.message, "request timed out") ||
         has(refusal.message, "too many requests") || has(refusal.message, "context deadline");
}

bool token_is_stale(const Refusal& refusal) {
  return refusal.code == kUnauthenticated || has(refusal.message, "invalid auth token") ||
         has(refusal.message, "user name is empty") ||
         has(refusal.message, "revision of auth store is old");
}

}  // namespace

EtcdSession::EtcdSession(std::vector<std::string> endpoints, std::string user,
                         std::string_view password)
    : endpoints_(std::move(endpoints)), user_(std::move(user)), password_(as_bytes(password)) {}

HttpRequest EtcdSession::request(std::string path, std::string body) const {
  const std::lock_guard lock(mutex_);
  HttpRequest request{endpoints_[current_], std::move(path), std::move(body), token_};
  // A member that is cut off from its leader shall end a watch instead of keeping silent.
  request.header = "Grpc-Metadata-hasleader: true";
  return request;
}

HttpRequest EtcdSession::login_request() const {
  HttpRequest login = request("/v3/auth/authenticate", encode_login(user_, password_.text()));
  login.authorization.clear();
  return login;
}

void EtcdSession::failed(const std::string& endpoint) {
  const std::lock_guard lock(mutex_);
  if (endpoints_[current_] == endpoint) current_ = (current_ + 1) % endpoints_.size();
}

bool EtcdSession::needs_login() const {
  const std::lock_guard lock(mutex_);
  return !user_.empty() && token_.empty();
}

void EtcdSession::set_token(std::string token) {
  const std::lock_guard lock(mutex_);
  token_ = std::move(token);
}

void EtcdSession::forget_token(const std::string& token) {
  const std::lock_guard lock(mutex_);
  if (token_ == token) token_.clear();
}

std::string EtcdSession::name() const {
  std::string all;
  for (const std::string& each : endpoints_) all += (all.empty() ? "" : ", ") + each;
  return "etcd at " + all;
}

void Attempts::failed(const std::string& endpoint, const std::string& why, bool rejected,
                      TimePoint now) {
  session_.failed(endpoint);
  why_ = endpoint + ": " + why;
  rejected_ = rejected ? rejected_ + 1 : 0;
  ++failed_;
  const std::size_t rounds = failed_ / session_.members();
  resume_at_ = now;
  if (failed_ % session_.members() == 0) {
    constexpr std::size_t kDoublings = 5;
    resume_at_ += std::min(kLongestPause, kFirstPause * (1 << std::min(rounds - 1, kDoublings)));
  }
}

HttpExchange::HttpExchange(EtcdSession& session, std::string path, std::string body)
    : session_(session), attempts_(session), path_(std::move(path)), body_(std::move(body)) {}

std::optional<HttpRequest> HttpExchange::next(TimePoint now) {
  if (done() || now < attempts_.resume_at()) return std::nullopt;
  logging_in_ = session_.needs_login();
  if (!logging_in_ && path_.empty()) {
    result_.emplace(std::string());
    return std::nullopt;
  }
  sent_ = logging_in_ ? session_.login_request() : session_.request(path_, body_);
  return sent_;
}

void HttpExchange::answered(int http_status, std::string body, TimePoint now) {
  constexpr int kOk = 200;
  const bool failed_in_stream = body.starts_with("{\"error\"");
  if (http_status != kOk || failed_in_stream)
    return refused(decode_refusal(body, http_status), http_status, now);
  if (!logging_in_) {
    result_.emplace(std::move(body));
    return;
  }
  auto token = decode_token(body);
  if (!token) {
    result_.emplace(token.status());
    return;
  }
  session_.set_token(std::move(*token));
}

void HttpExchange::lost(const std::string& why, bool rejected, TimePoint now) {
  attempts_.failed(sent_.endpoint, why, rejected, now);
  if (attempts_.hopeless()) result_.emplace(Status(Code::refused, attempts_.why()));
}

void HttpExchange::refused(const Refusal& refusal, int http_status, TimePoint now) {
  constexpr int kNotFound = 404, kMostLogins = 3;
  const std::string text = sent_.endpoint + " answered: " + refusal.message;
  if (may_pass(refusal)) {
    attempts_.failed(sent_.endpoint, refusal.message, false, now);
  } else if (!logging_in_ && token_is_stale(refusal) && session_.has_user() &&
             ++logins_ < kMostLogins) {
    session_.forget_token(sent_.authorization);
  } else if (token_is_stale(refusal) && !session_.has_user()) {
    result_.emplace(Status(Code::refused, text + "; give a user and a password"));
  } else if (logging_in_ || token_is_stale(refusal) || refusal.code == kPermissionDenied) {
    result_.emplace(
        Status(Code::refused, text + "; check the user, the password and the role's permissions"));
  } else if (refusal.code == kExhausted) {
    result_.emplace(Status(Code::exhausted, text));
  } else if (http_status == kNotFound) {
    result_.emplace(Status(
        Code::store, text + " to " + sent_.path +
                         "; expected an etcd server of version 3.4 or later, with its v3 gateway"));
  } else {
    result_.emplace(Status(Code::store, text));
  }
}

Status WatchStream::feed(std::string_view bytes, std::vector<WatchMessage>& messages) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    if (held_.size() + std::min(end, bytes.size()) > kLongestLine)
      return Status(Code::store, "a watch of etcd's sent a line of more than 1 GiB");
    held_ += bytes.substr(0, end);
    if (end == std::string_view::npos) return {};
    bytes.remove_prefix(end + 1);
    const std::string line = std::exchange(held_, {});
    if (line.find_first_not_of(" \r\t") == std::string::npos) continue;
    auto message = decode_watch(line);
    if (!message) return message.status();
    messages.push_back(std::move(*message));
  }
  return {};
}

KeyWatch::KeyWatch(EtcdSession& session, std::string key, std::string range_end)
    : session_(session),
      attempts_(session),
      key_(std::move(key)),
      range_end_(std::move(range_end)) {}

std::optional<HttpRequest> KeyWatch::open(TimePoint now) {
  if (!failure_.ok() || now < attempts_.resume_at()) return std::nullopt;
  stream_ = {};
  sent_ = session_.request("/v3/watch", encode_watch(key_, range_end_));
  return sent_;
}

bool KeyWatch::feed(std::string_view bytes, std::vector<WatchMessage>& messages, TimePoint now) {
  std::vector<WatchMessage> read;
  if (Status status = stream_.feed(bytes, read); !status) {
    lost(status.message(), false, now);
    return false;
  }
  for (WatchMessage& message : read) {
    if (message.cancelled) {
      const Refusal why{0, message.reason};
      if (token_is_stale(why)) session_.forget_token(sent_.authorization);
      if (has(message.reason, "permission denied")) {
        failure_ = Status(Code::refused, sent_.endpoint + " ended a watch: " + message.reason);
        return false;
      }
      lost("it ended the watch: " + message.reason, false, now);
      return false;
    }
    if (message.created || !message.events.empty()) messages.push_back(std::move(message));
  }
  return true;
}

void KeyWatch::lost(const std::string& why, bool rejected, TimePoint now) {
  attempts_.failed(sent_.endpoint, why, rejected, now);
  if (attempts_.hopeless()) failure_ = Status(Code::refused, attempts_.why());
}

}  // namespace muster::store::etcd

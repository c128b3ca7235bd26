// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/kubernetes_client.h"

#include <arpa/inet.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/base/bytes.h"
#include "core/base/environment.h"
#include "core/base/process/interruption.h"
#include "core/store/http/connection.h"

namespace muster::membership {
namespace {

using nlohmann::json;
using store::HttpTransfer;

constexpr Duration kAttemptLimit = std::chrono::seconds(8);  // limit: patience with a request
constexpr Duration kPause = std::chrono::milliseconds(200);  // limit: pace of attempts
constexpr Duration kListLimit = std::chrono::seconds(2);     // limit: patience with a request
// A step of `follow` takes less while this process runs.
constexpr Duration kStoodStill = std::chrono::seconds(4);  // limit: kListLimit, and scheduling
// A stream without an error for so long is connected.
constexpr Duration kConnected = std::chrono::seconds(4);     // limit: more than it takes to connect
constexpr std::size_t kLongestLine = std::size_t{16} << 20;  // limit: protocol
constexpr std::size_t kLongestAnnotations = std::size_t{1} << 18;  // limit: of Kubernetes
constexpr std::size_t kLongestLabel = 63;                          // limit: of Kubernetes
constexpr std::size_t kReadable = 40;  // limit: of a name's readable part
constexpr std::size_t kShown = 300;    // limit: text of an error

constexpr int kUnauthorized = 401, kForbidden = 403, kNotFound = 404, kConflict = 409, kGone = 410,
              kTooMany = 429, kServerError = 500;

constexpr const char* kJobLabel = "muster.dev/job";
constexpr const char* kValue = "muster.dev/value";
constexpr std::string_view kServiceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/";

bool is_alphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

std::string digest(std::string_view text) {
  constexpr std::size_t kBytes = 14;
  std::array<std::byte, EVP_MAX_MD_SIZE> whole{};
  EVP_Digest(text.data(), text.size(), reinterpret_cast<unsigned char*>(whole.data()), nullptr,
             EVP_sha256(), nullptr);
  return hexadecimal(ConstBytes(whole).first(kBytes));
}

/// Lower-case letters, digits and single hyphens between them.
std::string readable(std::string_view text, std::size_t longest) {
  std::string out;
  for (const char c : text) {
    if (out.size() >= longest) break;
    if (is_alphanumeric(c))
      out += static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    else if (!out.empty() && out.back() != '-')
      out += '-';
  }
  while (out.ends_with('-')) out.pop_back();
  return out;
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  std::string text(std::istreambuf_iterator<char>(file), {});
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

/// RFC 3339 with microseconds.
std::string micro_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  constexpr std::int64_t kMicroseconds = 1'000'000;
  const auto seconds = static_cast<std::time_t>(us / kMicroseconds);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  std::string fraction = std::to_string(us % kMicroseconds + kMicroseconds);
  fraction.front() = '.';
  return text.data() + fraction + "Z";
}

const json& child(const json& from, const char* name) {
  static const json none = json::object();
  if (!from.is_object()) return none;
  const auto found = from.find(name);
  return found == from.end() ? none : *found;
}
std::string text_of(const json& from, const char* name) {
  const json& field = child(from, name);
  return field.is_string() ? field.get<std::string>() : std::string();
}
/// 0: there is none, or it is none of this service.
std::int64_t revision_of(const json& object) {
  const std::string text = text_of(child(object, "metadata"), "resourceVersion");
  std::int64_t revision = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), revision);
  return error == std::errc() && end == text.data() + text.size() ? revision : 0;
}

Result<KubernetesLease> lease_of(const json& object) {
  const json& metadata = child(object, "metadata");
  const json& spec = child(object, "spec");
  KubernetesLease lease{.name = text_of(metadata, "name"),
                        .uid = text_of(metadata, "uid"),
                        .revision = revision_of(object),
                        .holder = text_of(spec, "holderIdentity")};
  const json& ttl = child(spec, "leaseDurationSeconds");
  if (ttl.is_number_integer()) lease.ttl_s = ttl.get<std::int64_t>();
  // Somebody else's words are no error: they carry no proof, and are ignored.
  if (!store::from_base64(text_of(child(metadata, "annotations"), kValue), lease.value))
    lease.value.clear();
  if (!lease.name.empty() && lease.revision > 0) return lease;
  return Status(Code::store,
                "the Kubernetes API sent a Lease without a name or a numeric resourceVersion: " +
                    object.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, kShown));
}

Status check_size(const KubernetesLease& lease) {
  if (lease.value.size() * 4 / 3 < kLongestAnnotations - kShown) return {};
  return Status(Code::exhausted,
                "a value of " + std::to_string(lease.value.size()) +
                    " bytes does not fit into a Lease, whose annotations have at most 256 KiB");
}

unsigned bit_of(std::string_view method) {
  return method == "GET" ? 1 : method == "POST" ? 2 : method == "PUT" ? 4 : 8;
}

json parsed(std::string_view text) { return json::parse(text, nullptr, false); }

/// The server's message about a request that it did not carry out.
std::string reason_in(const std::string& body, int http_status) {
  std::string message = text_of(parsed(body), "message");
  if (message.empty()) message = body.substr(0, kShown);
  return message.empty() ? "HTTP status " + std::to_string(http_status) : message;
}

/// `authority`: host[:port]. A name that only begins like an address is somebody else's.
bool is_loopback(std::string_view authority) {
  if (authority.starts_with("[::1]")) return authority.size() == 5 || authority[5] == ':';
  const std::string host(authority.substr(0, authority.find(':')));
  in_addr address{};
  return host == "localhost" ||
         (inet_pton(AF_INET, host.c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127);
}

}  // namespace

std::string label_value(std::string_view text) {
  const bool valid = !text.empty() && text.size() <= kLongestLabel &&
                     is_alphanumeric(text.front()) && is_alphanumeric(text.back()) &&
                     std::all_of(text.begin(), text.end(), [](char c) {
                       return is_alphanumeric(c) || c == '-' || c == '_' || c == '.';
                     });
  if (valid) return std::string(text);
  const std::string hash = digest(text);
  return "job-" + readable(text, kLongestLabel - hash.size() - 5) + "-" + hash;
}

std::string object_name(std::string_view job, std::string_view name) {
  const std::string both = ByteWriter().put_text(job).put_text(name).take();
  return "muster-" + readable(job, kReadable) + "-" + readable(name, kReadable) + "-" +
         digest(both);
}

Result<std::optional<LeaseEvent>> decode_lease_event(std::string_view line,
                                                     std::int64_t& revision) {
  const json whole = parsed(line);
  const std::string type = text_of(whole, "type");
  const json& object = child(whole, "object");
  if (type == "BOOKMARK") {
    revision = std::max(revision, revision_of(object));
    return std::optional<LeaseEvent>();
  }
  if (type == "ERROR") {
    const json& code = child(object, "code");
    return Status(code.is_number_integer() && code.get<int>() == kGone ? Code::closed : Code::store,
                  "the Kubernetes API ended the watch: " + text_of(object, "message"));
  }
  if (type != "ADDED" && type != "MODIFIED" && type != "DELETED")
    return Status(Code::store, "the Kubernetes API's watch says what is no event: " +
                                   std::string(line.substr(0, kShown)));
  auto lease = lease_of(object);
  if (!lease) return lease.status();
  revision = std::max(revision, lease->revision);
  return std::optional(LeaseEvent{type == "DELETED", std::move(*lease)});
}

Result<KubernetesOptions> kubernetes_options(const std::string& server) {
  const std::string account(kServiceAccount);
  KubernetesOptions options{
      .server = server,
      .token_file = env_text("MUSTER_KUBERNETES_TOKEN_FILE").value_or(account + "token"),
      .authority_file = env_text("MUSTER_KUBERNETES_CACERT").value_or(account + "ca.crt"),
      .name_space = env_text("MUSTER_KUBERNETES_NAMESPACE").value_or("")};
  if (options.name_space.empty()) options.name_space = contents(account + "namespace");
  if (options.name_space.empty()) options.name_space = "default";
  if (options.server.empty()) {
    std::string host = env_text("KUBERNETES_SERVICE_HOST").value_or("");
    if (host.empty())
      return Status(Code::invalid_argument,
                    "--rdzv-backend kubernetes: this is no pod (KUBERNETES_SERVICE_HOST is not "
                    "set); give the API server as --rdzv-endpoint https://HOST:PORT");
    if (host.find(':') != std::string::npos) host = "[" + host + "]";
    options.server = "https://" + host + ":" + env_text("KUBERNETES_SERVICE_PORT").value_or("443");
  }
  if (options.server.find("://") == std::string::npos) options.server = "https://" + options.server;
  while (options.server.ends_with('/')) options.server.pop_back();
  return options;
}

Result<std::shared_ptr<KubernetesClient>> KubernetesClient::make(const KubernetesOptions& options,
                                                                 std::string job) {
  const std::size_t scheme = options.server.find("://");
  const std::string host =
      scheme == std::string::npos ? std::string() : options.server.substr(scheme + 3);
  const bool plain = options.server.starts_with("http://");
  if (host.empty() || host.find_first_of("/?#@ ") != std::string::npos ||
      (!plain && !options.server.starts_with("https://")))
    return Status(Code::invalid_argument, "\"" + options.server +
                                              "\" is no address of a Kubernetes API server; "
                                              "expected https://HOST:PORT");
  if (plain && !is_loopback(host))
    return Status(Code::invalid_argument,
                  options.server +
                      " would show the token to the network; http is for a proxy on this host "
                      "(kubectl proxy), say https");
  return std::make_shared<KubernetesClient>(
      options, std::move(job),
      store::curl_connections({.authority = plain ? std::string() : options.authority_file,
                               .certificate = {},
                               .key = {}}));
}

KubernetesClient::KubernetesClient(const KubernetesOptions& options, std::string job,
                                   store::MakeConnection connections)
    : options_(options), job_(std::move(job)), connections_(std::move(connections)) {}

std::string KubernetesClient::collection() const {
  return "/apis/coordination.k8s.io/v1/namespaces/" + options_.name_space + "/leases";
}

std::string KubernetesClient::selector() const {
  return "?labelSelector=muster.dev%2Fjob%3D" + job_;
}

// The token is read each time: the kubelet puts another one into the file before the old one ends.
Result<store::HttpRequest> KubernetesClient::request(const char* method, std::string path,
                                                     std::string body) const {
  store::HttpRequest request{.endpoint = options_.server,
                             .path = std::move(path),
                             .body = std::move(body),
                             .authorization = {},
                             .method = method};
  const std::string token = contents(options_.token_file);
  if (token.find_first_of(std::string_view("\r\n\0", 3)) != std::string::npos)
    return Status(Code::refused, "the file " + options_.token_file + " holds no token");
  if (!token.empty()) request.authorization = "Bearer " + token;
  return request;
}

Status KubernetesClient::judge(int http_status, const std::string& body) const {
  const std::string why = reason_in(body, http_status);
  if (http_status == kUnauthorized)
    return Status(Code::refused, name() + " does not accept the token in " + options_.token_file +
                                     ": " + why +
                                     "; is it of this cluster, and the pod's service account's "
                                     "(automountServiceAccountToken)?");
  if (http_status == kForbidden)
    return Status(
        Code::refused,
        name() + " forbids it: " + why +
            "; bind to the pods' service account a Role in namespace " + options_.name_space +
            " with the rule apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, "
            "list, watch, create, update, delete]");
  if (http_status == kTooMany || http_status >= kServerError) return Status(Code::network, why);
  constexpr int kBadRequest = 400;
  if (http_status >= kBadRequest) return Status(Code::store, name() + " refused a request: " + why);
  return {};
}

Result<KubernetesClient::HttpReply> KubernetesClient::call(const char* method,
                                                           const std::string& path,
                                                           const std::string& body,
                                                           TimePoint deadline) {
  std::string trouble;
  Status refused;
  store::ConnectionPool::Borrowed connection(connections_);
  while (true) {
    if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
    if (steady_clock().now() >= deadline && !refused.ok()) return refused;
    if (steady_clock().now() >= deadline)
      return Status(Code::timed_out, name() + " did not answer in time" +
                                         (trouble.empty() ? "" : "; the last attempt: " + trouble));
    auto sent = request(method, path, body);
    if (!sent) return sent.status();
    const TimePoint limit = std::min(deadline, deadline_after(steady_clock(), kAttemptLimit));
    if (Status interrupted = connection.exchange(*sent, limit); !interrupted) return interrupted;
    HttpTransfer& transfer = connection->transfer();
    if (transfer.rejected) return Status(Code::refused, name() + ": " + transfer.error);
    if (transfer.ended && transfer.error.empty()) {
      const int status = transfer.http_status;
      // The callers know what these mean.
      Status judged = status == kNotFound || status == kConflict || status == kGone
                          ? Status()
                          : judge(status, transfer.received);
      // A token may have rotated, a Role be written anew.
      const bool may_end = judged.code() == Code::refused &&
                           (served_ & (status == kUnauthorized ? ~0U : bit_of(method))) != 0;
      refused = may_end ? judged : Status();
      if (judged.code() != Code::network && !may_end) {
        connection.keep();
        if (!judged) return judged;
        if (status < 300) served_ |= bit_of(method);
        return HttpReply{status, std::move(transfer.received)};
      }
      trouble = judged.message();
    } else {
      trouble = transfer.ended ? transfer.error : "no answer";
    }
    std::this_thread::sleep_until(
        store::earliest_look(std::min(deadline, deadline_after(steady_clock(), kPause))));
  }
}

std::string KubernetesClient::encode(const KubernetesLease& lease) const {
  json metadata{{"name", lease.name},
                {"namespace", options_.name_space},
                {"labels", {{kJobLabel, job_}}},
                {"annotations", {{kValue, store::base64(lease.value)}}}};
  if (!lease.uid.empty()) metadata["uid"] = lease.uid;
  if (lease.revision > 0) metadata["resourceVersion"] = std::to_string(lease.revision);
  json spec{{"holderIdentity", lease.holder}, {"renewTime", micro_time()}};
  if (lease.ttl_s > 0) spec["leaseDurationSeconds"] = lease.ttl_s;
  return json{{"apiVersion", "coordination.k8s.io/v1"},
              {"kind", "Lease"},
              {"metadata", std::move(metadata)},
              {"spec", std::move(spec)}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<std::optional<KubernetesLease>> KubernetesClient::lease_in(const HttpReply& reply) const {
  if (reply.status == kNotFound || reply.status == kConflict)
    return std::optional<KubernetesLease>();
  auto lease = lease_of(parsed(reply.body));
  if (!lease) return lease.status();
  return std::optional(std::move(*lease));
}

Result<std::optional<KubernetesLease>> KubernetesClient::create(const KubernetesLease& lease,
                                                                TimePoint deadline) {
  if (Status fits = check_size(lease); !fits) return fits;
  auto reply = call("POST", collection(), encode(lease), deadline);
  if (!reply) return reply.status();
  if (reply->status == kNotFound)
    return Status(Code::store, name() + " knows no Leases in the namespace " + options_.name_space +
                                   ": " + reason_in(reply->body, kNotFound));
  return lease_in(*reply);
}

Result<std::optional<KubernetesLease>> KubernetesClient::get(const std::string& name,
                                                             TimePoint deadline) {
  auto reply = call("GET", collection() + "/" + name, {}, deadline);
  if (!reply) return reply.status();
  return lease_in(*reply);
}

// With its uid: a PUT without one would create an object that is gone.
Result<std::optional<KubernetesLease>> KubernetesClient::update(const KubernetesLease& lease,
                                                                TimePoint deadline) {
  if (Status fits = check_size(lease); !fits) return fits;
  auto reply = call("PUT", collection() + "/" + lease.name, encode(lease), deadline);
  if (!reply) return reply.status();
  return lease_in(*reply);
}

Status KubernetesClient::remove(const KubernetesLease& lease, TimePoint deadline) {
  json preconditions{{"uid", lease.uid}};
  if (lease.revision > 0) preconditions["resourceVersion"] = std::to_string(lease.revision);
  const std::string body = json{{"apiVersion", "v1"},
                                {"kind", "DeleteOptions"},
                                {"preconditions", std::move(preconditions)}}
                               .dump();
  return call("DELETE", collection() + "/" + lease.name, body, deadline).status();
}

Result<KubernetesClient::LeaseList> KubernetesClient::list(TimePoint deadline) {
  auto reply = call("GET", collection() + selector(), {}, deadline);
  if (!reply) return reply.status();
  const json body = parsed(reply->body);
  LeaseList all{.revision = revision_of(body)};
  const json& items = child(body, "items");
  if (reply->status >= kNotFound || all.revision == 0)
    return Status(Code::store, name() + " did not list the job's Leases: " +
                                   reason_in(reply->body, reply->status));
  for (const json& item : items) {
    auto lease = lease_of(item);
    if (!lease) return lease.status();
    all.leases.push_back(std::move(*lease));
  }
  return all;
}

/// One watch: the request that is under way, and what has come of it.
class KubernetesClient::LeaseStream {
 public:
  LeaseStream(KubernetesClient& client, const FollowOptions& options)
      : client_(client), options_(options), connection_(client.connections_) {}
  Status begin(std::int64_t revision);
  /// Takes in what comes until `until`. Code::network: it has ended and may be begun again;
  /// Code::closed: list anew.
  Status step(TimePoint until);
  std::int64_t revision() const { return revision_; }

 private:
  Status take_lines();

  KubernetesClient& client_;
  const FollowOptions& options_;
  store::ConnectionPool::Borrowed connection_;
  std::int64_t revision_ = 0;
  std::string held_;
  TimePoint heard_{};
};

Status KubernetesClient::LeaseStream::begin(std::int64_t revision) {
  revision_ = revision;
  heard_ = steady_clock().now();
  auto request = client_.request("GET",
                                 client_.collection() + client_.selector() +
                                     "&watch=1&allowWatchBookmarks=true" +
                                     "&resourceVersion=" + std::to_string(revision),
                                 {});
  if (!request) return request.status();
  connection_->start(*request);
  return {};
}

Status KubernetesClient::LeaseStream::take_lines() {
  for (std::size_t end = held_.find('\n'); end != std::string::npos; end = held_.find('\n')) {
    auto event = decode_lease_event(std::string_view(held_).substr(0, end), revision_);
    if (!event) return event.status();
    held_.erase(0, end + 1);
    if (*event) options_.on_event(**event);
  }
  if (held_.size() > kLongestLine)
    return Status(Code::store, client_.name() + " sent a line of a watch that never ends");
  return {};
}

Status KubernetesClient::LeaseStream::step(TimePoint until) {
  constexpr int kOk = 200;
  HttpTransfer& transfer = connection_->transfer();
  if (!transfer.ended) connection_->drive(store::earliest_look(until));
  const TimePoint now = steady_clock().now();
  if (!transfer.received.empty()) heard_ = now;
  held_ += std::exchange(transfer.received, {});
  if (transfer.http_status == kOk) {
    if (Status taken = take_lines(); !taken) return taken;
  }
  if (transfer.rejected) return Status(Code::refused, client_.name() + ": " + transfer.error);
  if (transfer.ended) {
    if (transfer.http_status == kGone) return Status(Code::closed, reason_in(held_, kGone));
    Status judged = client_.judge(transfer.http_status, held_);
    if (judged.ok())
      judged = Status(Code::network, transfer.error.empty() ? "the watch ended" : transfer.error);
    return judged;
  }
  // Its other end may be gone without a word; a list tells.
  if (now >= heard_ + options_.silence_limit) return Status(Code::closed, "the watch was silent");
  return {};
}

Status KubernetesClient::follow(const FollowOptions& options) {
  std::optional<LeaseStream> stream;
  std::int64_t revision = 0;  // that is known; 0: list
  TimePoint working_at = steady_clock().now();
  Status trouble;  // the last
  TimePoint resume_at{}, next_idle{}, begun_at{};
  while (true) {
    if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
    const TimePoint now = steady_clock().now();
    if (!stream && !trouble.ok() && options.lost_limit >= Duration::zero() &&
        now - working_at >= options.lost_limit)
      return Status(trouble.code() == Code::timed_out ? Code::network : trouble.code(),
                    name() + " has let no watch work for " + describe(options.lost_limit) +
                        "; the last attempt: " + trouble.message());
    if (!stream && now < resume_at) {
      std::this_thread::sleep_until(store::earliest_look(resume_at));
      if (steady_clock().now() - now > kStoodStill) working_at = steady_clock().now();
      continue;
    }
    Status stepped;
    if (!stream && revision == 0) {
      auto all = list(deadline_after(steady_clock(), kListLimit));
      if (all) {
        options.on_list(all->revision, all->leases);
        revision = all->revision;
      } else {
        stepped = all.status();
      }
    }
    if (!stream && stepped.ok()) {
      stream.emplace(*this, options);
      stepped = stream->begin(revision);
      begun_at = now;
    }
    if (stepped.ok() && now >= next_idle) {
      options.on_idle();
      next_idle = deadline_after(steady_clock(), options.idle);
    }
    if (stepped.ok()) {
      stepped = stream->step(next_idle);
      if (stream->revision() > revision || now - begun_at >= kConnected)
        working_at = steady_clock().now();
      revision = stream->revision();
    }
    if (steady_clock().now() - now > kStoodStill) working_at = steady_clock().now();
    if (stepped.ok()) continue;
    if (stepped.code() == Code::aborted) return stepped;
    stream.reset();
    revision = 0;
    resume_at = deadline_after(steady_clock(), kPause);
    trouble = std::move(stepped);
  }
}

}  // namespace muster::membership

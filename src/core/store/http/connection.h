// SPDX-License-Identifier: BSD-3-Clause
/// How HTTP requests travel to services that a job leans on (etcd, the API of Kubernetes). Real
/// jobs use libcurl; a simulation gives another kind.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster::store {

/// `body` is JSON and is not sent with GET. `authorization`: the header of that name, unless empty.
struct HttpRequest {
  std::string endpoint;  ///< "http://host:2379"
  std::string path;      ///< "/v3/kv/txn"
  std::string body{};
  std::string authorization{};
  const char* method = "POST";
  const char* header = nullptr;  ///< one more, "Name: value"
};

/// The state of the transfer in progress.
struct HttpTransfer {
  std::string received;  ///< of the body; who reads it may empty it
  int http_status = 0;   ///< 0: not known yet
  bool ended = false;
  /// Ended without a whole reply, for this reason.
  std::string error;
  /// Another attempt would end in the same way: a certificate or a host name is wrong.
  bool rejected = false;
};

/// One transfer at a time. Not thread-safe.
class HttpConnection {
 public:
  virtual ~HttpConnection() = default;
  /// Begins a transfer and forgets the one before.
  virtual void start(const HttpRequest& request) = 0;
  /// Sleeps until something has changed or `until` has come.
  virtual void drive(TimePoint until) = 0;
  virtual HttpTransfer& transfer() = 0;
  /// False in a forked child, where it must not be used.
  virtual bool usable() const = 0;
};

using MakeConnection = std::function<std::unique_ptr<HttpConnection>()>;

struct TlsFiles {
  std::string authority;    ///< PEM; empty: the system's
  std::string certificate;  ///< PEM, of this client; empty: none
  std::string key;          ///< PEM, of `certificate`
};

/// Connections over libcurl, which honours no proxy and follows no redirect.
MakeConnection curl_connections(TlsFiles files);

/// Keeps connections for later requests. Thread-safe; outlives its connections.
class ConnectionPool {
 public:
  explicit ConnectionPool(MakeConnection make) : make_(std::move(make)) {}

  /// A connection for exclusive use as long as this lives.
  class Borrowed {
   public:
    explicit Borrowed(ConnectionPool& pool);
    ~Borrowed();
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    HttpConnection* operator->() { return connection_.get(); }
    /// Sends `request` and waits for the whole reply: at most until `limit`, when the transfer has
    /// not `ended`. Code::aborted where the thread is interrupted.
    Status exchange(const HttpRequest& request, TimePoint limit);
    /// The transfer has ended in good order.
    void keep() { reusable_ = true; }

   private:
    ConnectionPool& pool_;
    std::unique_ptr<HttpConnection> connection_;
    bool reusable_ = false;
  };

 private:
  const MakeConnection make_;
  std::mutex mutex_;  // guards `idle_`; a connection in use belongs to its thread
  std::vector<std::unique_ptr<HttpConnection>> idle_;
};

/// `until`, or earlier: the thread may not sleep longer without asking whether it is interrupted.
TimePoint earliest_look(TimePoint until);

/// Base64 of RFC 4648, with padding: bytes in JSON.
std::string base64(std::string_view bytes);
/// False, with `bytes` undefined, if `text` is no base64.
bool from_base64(std::string_view text, std::string& bytes);

}  // namespace muster::store

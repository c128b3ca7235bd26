/// How HTTP requests travel. Real jobs use libcurl; a simulation gives another kind.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/clock.h"
#include "muster/store/etcd/session.h"

namespace muster::store::etcd {

/// What is known of the transfer that goes on.
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

}  // namespace muster::store::etcd

// SPDX-License-Identifier: BSD-3-Clause
/// Test support: TCP stores on this host that share a secret.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "core/security/secret.h"
#include "core/store/factory.h"
#include "core/store/testing/long_wait.h"

namespace muster::store {

inline const Secret kTcpSecret = Secret::given("the secret of the tcp store's tests");

inline TcpStoreOptions server_options(const std::string& host = "127.0.0.1",
                                      std::uint16_t port = 0) {
  TcpStoreOptions options;
  options.host = host;
  options.port = port;
  options.is_server = true;
  options.timeout = kLong;
  options.secret = kTcpSecret;
  return options;
}

inline TcpStoreOptions client_options(const TcpStore& server) {
  TcpStoreOptions options = server_options(server.host(), server.port());
  options.is_server = false;
  return options;
}

inline std::shared_ptr<TcpStore> made(const Result<std::shared_ptr<TcpStore>>& store) {
  EXPECT_TRUE(store.ok()) << store.status().message();
  return store.ok() ? *store : nullptr;
}

inline bool mentions(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

}  // namespace muster::store

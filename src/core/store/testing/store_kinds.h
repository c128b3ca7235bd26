// SPDX-License-Identifier: BSD-3-Clause
/// The kinds of stores, for the suite over all of them.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/store/factory.h"
#include "core/store/testing/long_wait.h"
#include "testing/etcd_cluster.h"

namespace muster::store::testing {

using Strings = std::vector<std::string>;

constexpr Duration kShort = std::chrono::milliseconds(50);

/// A store of one kind and a way to more users of the same data.
class Kind {
 public:
  virtual ~Kind() = default;
  virtual std::shared_ptr<Store> user() = 0;
};

class HashKind final : public Kind {
 public:
  std::shared_ptr<Store> user() override { return *store_->clone(); }

 private:
  std::shared_ptr<Store> store_ = make_hash_store(kLong);
};

class PrefixKind final : public Kind {
 public:
  std::shared_ptr<Store> user() override {
    return make_prefix_store("outer", make_prefix_store("inner", *store_->clone()));
  }

 private:
  std::shared_ptr<Store> store_ = make_hash_store(kLong);
};

inline TcpStoreOptions tcp_options(bool server, std::uint16_t port) {
  TcpStoreOptions options;
  options.port = port;
  options.is_server = server;
  options.timeout = kLong;
  options.secret = Secret::given("the secret of the test suite");
  return options;
}

class TcpKind final : public Kind {
 public:
  explicit TcpKind(bool within_host) : within_host_(within_host) {}
  std::shared_ptr<Store> user() override {
    auto options = tcp_options(!server_, server_ ? server_->port() : 0);
    options.within_host = within_host_;
    auto store = made(make_tcp_store(options));
    if (!server_) server_ = store;
    return store;
  }

 private:
  static std::shared_ptr<TcpStore> made(Result<std::shared_ptr<TcpStore>> store) {
    EXPECT_TRUE(store.ok()) << store.status().message();
    return *store;
  }
  const bool within_host_;
  std::shared_ptr<TcpStore> server_;
};

class FileKind final : public Kind {
 public:
  FileKind() {
    static std::atomic<int> count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("muster-suite-" + std::to_string(::getpid()) + "-" + std::to_string(count++));
  }
  ~FileKind() override { std::filesystem::remove(path_); }
  std::shared_ptr<Store> user() override {
    auto store = make_file_store(path_.string(), -1, kLong);
    EXPECT_TRUE(store.ok()) << store.status().message();
    return *store;
  }

 private:
  std::filesystem::path path_;
};

/// One server for all tests of this process, a prefix for each.
class EtcdKind final : public Kind {
 public:
  std::shared_ptr<Store> user() override {
    static muster::testing::EtcdCluster cluster;
    EtcdOptions options;
    options.endpoints = cluster.endpoints();
    options.prefix = prefix_;
    options.timeout = kLong;
    auto store = make_etcd_store(std::move(options));
    EXPECT_TRUE(store.ok()) << store.status().message();
    return *store;
  }

 private:
  static std::string next_prefix() {
    static std::atomic<int> count = 0;
    return "suite-" + std::to_string(count++);
  }
  const std::string prefix_ = next_prefix();
};

struct Named {
  const char* name;
  std::function<std::unique_ptr<Kind>()> make;
};

/// Keeps the tests' names readable.
inline void PrintTo(const Named& named, std::ostream* out) { *out << named.name; }

class StoreSuite : public ::testing::TestWithParam<Named> {
 protected:
  void SetUp() override {
    if (kind() == "etcd" && !muster::testing::EtcdCluster::installed())
      GTEST_SKIP() << muster::testing::EtcdCluster::kMissing;
  }
  std::shared_ptr<Store> user() { return kind_->user(); }
  std::string kind() const { return GetParam().name; }
  std::string kind_in_words() const { return is_tcp() ? "tcp" : kind(); }
  bool is_tcp() const { return kind() == "tcp" || kind() == "tls"; }
  std::unique_ptr<Kind> kind_ = GetParam().make();
};

#define ASSERT_OK(expression)                                                   \
  do {                                                                          \
    const auto result_ = (expression);                                          \
    ASSERT_TRUE(result_.ok()) << ::muster::store::testing::message_of(result_); \
  } while (false)
inline std::string message_of(const Status& status) { return status.message(); }
template <class T>
std::string message_of(const Result<T>& result) {
  return result.status().message();
}

}  // namespace muster::store::testing

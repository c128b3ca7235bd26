// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/http/connection.h"

#include <curl/curl.h>
#include <sodium.h>

#include <algorithm>
#include <mutex>
#include <string_view>

#include "core/base/process/fork_guard.h"
#include "core/base/process/interruption.h"
#include "core/tunables/tunables.h"

namespace muster::store {

TimePoint earliest_look(TimePoint until) {
  return std::min(until, deadline_after(steady_clock(), Interruption::look_every()));
}

ConnectionPool::Borrowed::Borrowed(ConnectionPool& pool) : pool_(pool) {
  const std::lock_guard lock(pool_.mutex_);
  while (!pool_.idle_.empty() && !connection_) {
    connection_ = std::move(pool_.idle_.back());
    pool_.idle_.pop_back();
    if (!connection_->usable()) connection_.reset();
  }
  if (!connection_) connection_ = pool_.make_();
}

ConnectionPool::Borrowed::~Borrowed() {
  const std::lock_guard lock(pool_.mutex_);
  if (reusable_ && pool_.idle_.size() < static_cast<std::size_t>(tunables().kept_connections))
    pool_.idle_.push_back(std::move(connection_));
}

Status ConnectionPool::Borrowed::exchange(const HttpRequest& request, TimePoint limit) {
  connection_->start(request);
  const HttpTransfer& transfer = connection_->transfer();
  while (!transfer.ended && steady_clock().now() < limit) {
    if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
    connection_->drive(earliest_look(limit));
  }
  return {};
}

namespace {

constexpr std::size_t kLongestReply = std::size_t{1} << 30;  // limit: memory for one reply
constexpr long kKeepAliveSeconds = 2;                        // limit: patience with one server
constexpr long kConnectLimitMs = 2000;                       // limit: patience with one server

class CurlConnection final : public HttpConnection {
 public:
  explicit CurlConnection(const TlsFiles& files) {
    static std::once_flag once;
    std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
    multi_ = curl_multi_init();
    easy_ = curl_easy_init();
    if (easy_ == nullptr || multi_ == nullptr) return;
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_PROXY, "");
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_CONNECTTIMEOUT_MS, kConnectLimitMs);
    set(CURLOPT_TCP_NODELAY, 1L);
    set(CURLOPT_TCP_KEEPALIVE, 1L);
    set(CURLOPT_TCP_KEEPIDLE, kKeepAliveSeconds);
    set(CURLOPT_TCP_KEEPINTVL, kKeepAliveSeconds);
    set(CURLOPT_ERRORBUFFER, error_);
    set(CURLOPT_WRITEDATA, this);
    curl_easy_setopt(easy_, CURLOPT_WRITEFUNCTION, &CurlConnection::take);
    set(CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
    if (!files.authority.empty()) set(CURLOPT_CAINFO, files.authority.c_str());
    if (!files.certificate.empty()) set(CURLOPT_SSLCERT, files.certificate.c_str());
    if (!files.key.empty()) set(CURLOPT_SSLKEY, files.key.c_str());
  }
  ~CurlConnection() override {
    if (mark_.forked()) return;  // the parent's connections: closing them in order would end them
    stop();
    curl_slist_free_all(headers_);
    curl_easy_cleanup(easy_);
    curl_multi_cleanup(multi_);
  }
  CurlConnection(const CurlConnection&) = delete;
  CurlConnection& operator=(const CurlConnection&) = delete;

  void start(const HttpRequest& request) override {
    stop();
    transfer_ = {};
    if (easy_ == nullptr || multi_ == nullptr) {
      transfer_.ended = true;
      transfer_.error = "libcurl has no memory for a connection";
      return;
    }
    body_ = request.body;
    curl_slist_free_all(headers_);
    headers_ = curl_slist_append(nullptr, "Content-Type: application/json");
    headers_ = curl_slist_append(headers_, "Expect:");
    if (request.header != nullptr) headers_ = curl_slist_append(headers_, request.header);
    if (!request.authorization.empty())
      headers_ = curl_slist_append(headers_, ("Authorization: " + request.authorization).c_str());
    const std::string url = request.endpoint + request.path;
    set(CURLOPT_URL, url.c_str());
    set(CURLOPT_HTTPHEADER, headers_);
    if (std::string_view(request.method) == "GET") {
      set(CURLOPT_HTTPGET, 1L);
    } else {
      set(CURLOPT_POSTFIELDS, body_.data());
      curl_easy_setopt(easy_, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body_.size()));
    }
    set(CURLOPT_CUSTOMREQUEST, request.method);
    error_[0] = '\0';
    curl_multi_add_handle(multi_, easy_);
    running_ = true;
  }

  void drive(TimePoint until) override {
    const std::size_t before = transfer_.received.size();
    for (bool first = true;; first = false) {
      int going = 0;
      const CURLMcode code = curl_multi_perform(multi_, &going);
      if (code != CURLM_OK) return end(curl_multi_strerror(code), false);
      if (going == 0) finish();
      if (transfer_.ended || transfer_.received.size() != before) return;
      const TimePoint now = steady_clock().now();
      if (!first && now >= until) return;
      constexpr Duration kLongest = std::chrono::seconds(60);  // limit: fits curl's int
      const Duration left = std::clamp<Duration>(until - now, Duration::zero(), kLongest);
      const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
      curl_multi_poll(multi_, nullptr, 0, static_cast<int>(ms), nullptr);
    }
  }

  HttpTransfer& transfer() override { return transfer_; }
  bool usable() const override { return !mark_.forked(); }

 private:
  template <class Value>
  void set(CURLoption option, Value value) {
    curl_easy_setopt(easy_, option, value);
  }

  static std::size_t take(char* bytes, std::size_t one, std::size_t count, void* self) {
    auto& connection = *static_cast<CurlConnection*>(self);
    HttpTransfer& transfer = connection.transfer_;
    if (transfer.received.size() + one * count > kLongestReply) return 0;  // curl ends it
    long status = 0;
    curl_easy_getinfo(connection.easy_, CURLINFO_RESPONSE_CODE, &status);
    transfer.http_status = static_cast<int>(status);
    transfer.received.append(bytes, one * count);
    return one * count;
  }

  void finish() {
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const CURLcode code = message->data.result;
      long status = 0;
      curl_easy_getinfo(easy_, CURLINFO_RESPONSE_CODE, &status);
      transfer_.http_status = static_cast<int>(status);
      if (code == CURLE_OK) return end({}, false);
      const bool rejected = code == CURLE_PEER_FAILED_VERIFICATION ||
                            code == CURLE_SSL_CERTPROBLEM || code == CURLE_SSL_CACERT_BADFILE ||
                            code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL;
      return end(error_[0] != '\0' ? error_ : curl_easy_strerror(code), rejected);
    }
    if (!running_) end("the transfer was not begun", false);
  }

  void end(std::string error, bool rejected) {
    stop();
    transfer_.ended = true;
    transfer_.error = std::move(error);
    transfer_.rejected = rejected;
  }

  void stop() {
    if (running_) curl_multi_remove_handle(multi_, easy_);
    running_ = false;
  }

  CURLM* multi_ = nullptr;
  CURL* easy_ = nullptr;
  curl_slist* headers_ = nullptr;
  char error_[CURL_ERROR_SIZE] = {};
  std::string body_;
  HttpTransfer transfer_;
  bool running_ = false;
  ProcessMark mark_;
};

}  // namespace

MakeConnection curl_connections(TlsFiles files) {
  return [files = std::move(files)]() -> std::unique_ptr<HttpConnection> {
    return std::make_unique<CurlConnection>(files);
  };
}

std::string base64(std::string_view bytes) {
  std::string text(sodium_base64_encoded_len(bytes.size(), sodium_base64_VARIANT_ORIGINAL), '\0');
  sodium_bin2base64(text.data(), text.size(), reinterpret_cast<const unsigned char*>(bytes.data()),
                    bytes.size(), sodium_base64_VARIANT_ORIGINAL);
  text.pop_back();  // its end, as of C's strings
  return text;
}

bool from_base64(std::string_view text, std::string& bytes) {
  bytes.resize(text.size() / 4 * 3);
  std::size_t length = 0;
  if (sodium_base642bin(reinterpret_cast<unsigned char*>(bytes.data()), bytes.size(), text.data(),
                        text.size(), nullptr, &length, nullptr,
                        sodium_base64_VARIANT_ORIGINAL) != 0)
    return false;
  bytes.resize(length);
  return true;
}

}  // namespace muster::store

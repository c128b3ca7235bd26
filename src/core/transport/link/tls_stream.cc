// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/byte_stream.h"

#include <utility>

#include "core/security/tls_session.h"
#include "core/transport/link/pieces.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::transport {
namespace {

class TlsStream final : public ByteStream {
 public:
  TlsStream(std::unique_ptr<ByteStream> wire, TlsSession session)
      : wire_(std::move(wire)), session_(std::move(session)) {}

  Result<std::size_t> write(std::span<const ConstBytes> pieces) override {
    Pieces<ConstBytes> offered(pieces);
    std::size_t total = 0;
    for (;;) {
      if (Status status = flush(); !status) return status;
      if (has_unsent() || offered.empty()) return total;
      const Result<std::size_t> took = session_.write(offered.left());
      if (!took) return cut();
      offered.took(*took);
      total += *took;
    }
  }

  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    Pieces<MutableBytes> wanted(pieces);
    std::size_t total = 0;
    for (bool dry = false;;) {
      if (session_.readable()) {
        const Result<std::size_t> got = session_.read(wanted.left());
        if (!got) return total > 0 ? Result<std::size_t>(total) : cut();
        wanted.took(*got);
        total += *got;
      }
      if (dry || wanted.empty()) return total;
      const MutableBytes room = session_.room(much_comes_ ? 2 * fixed::kIoBuffer : kFewBytes);
      const Result<std::size_t> came = wire_->read(std::span(&room, 1));
      if (!came) return total > 0 ? Result<std::size_t>(total) : came;
      session_.came(*came);
      dry = *came < room.size();
      much_comes_ = *came >= kFewBytes;
    }
  }

  bool has_unsent() const override { return !session_.output().empty(); }
  bool holds_more() const override { return session_.readable(); }
  int descriptor() const override { return wire_->descriptor(); }
  const char* kind() const override { return wire_->kind(); }

 private:
  Status flush() {
    while (has_unsent()) {
      const ConstBytes output = session_.output();
      const Result<std::size_t> sent = wire_->write(std::span(&output, 1));
      if (!sent) return sent.status();
      if (*sent == 0) break;
      session_.sent(*sent);
    }
    return {};
  }
  Status cut() const {
    return Status(Code::refused, session_.failure().message(), session_.failure().ranks());
  }

  // Small inputs are decrypted into a small buffer: most links of a large job are idle and should
  // use little memory.
  static constexpr std::size_t kFewBytes = 4 * fixed::kSmallMessage;  // limit: memory

  const std::unique_ptr<ByteStream> wire_;
  TlsSession session_;
  bool much_comes_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> make_tls_stream(std::unique_ptr<ByteStream> wire, TlsSession session) {
  return std::make_unique<TlsStream>(std::move(wire), std::move(session));
}

}  // namespace muster::transport

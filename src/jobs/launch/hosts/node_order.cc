// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/hosts/node_order.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "core/base/threads/thread_start.h"
#include "jobs/launch/node/adopted_secret.h"

namespace muster::launch {
namespace {

constexpr std::string_view kOrderTitle = "muster node 1\n";   // the version of all below
constexpr std::size_t kLongestOrder = std::size_t{16} << 20;  // limit: memory
constexpr std::uint32_t kMostEntries = 1 << 20;               // limit: memory

struct WipedText {
  std::string text;
  ~WipedText() { ::explicit_bzero(text.data(), text.size()); }
};

void put_list(ByteWriter& writer, const std::vector<std::string>& list) {
  writer.put(static_cast<std::uint32_t>(list.size()));
  for (const std::string& each : list) writer.put_text(each);
}

bool get_list(ByteReader& reader, std::vector<std::string>& list) {
  const auto count = reader.get<std::uint32_t>();
  if (!reader.ok() || count > kMostEntries) return false;
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) list.emplace_back(reader.get_text());
  return reader.ok();
}

Status read_whole(int fd, char* to, std::size_t size) {
  for (std::size_t at = 0; at < size;) {
    const ssize_t got = ::read(fd, to + at, size - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      return Status(Code::aborted, "the launcher's order cannot be read: " + errno_text(errno));
    if (got == 0)
      return Status(Code::aborted,
                    "the launcher or the connection to it went before it said what to start");
    at += static_cast<std::size_t>(got);
  }
  return {};
}

Result<NodeOrder> decode(std::string_view record) {
  ByteReader reader(record);
  const std::string_view key = reader.get_text();
  NodeOrder order;
  if (!key.empty()) order.secret = Secret::given(key);
  order.folder = reader.get_text();
  if (!get_list(reader, order.variables) || !get_list(reader, order.words) || !reader.at_end())
    return Status(Code::invalid_argument, "the launcher's order is damaged");
  return order;
}

}  // namespace

std::string encode(const NodeOrder& order) {
  ByteWriter writer;
  writer.put_text(order.secret ? order.secret->key().text() : std::string_view());
  writer.put_text(order.folder);
  put_list(writer, order.variables);
  put_list(writer, order.words);
  const WipedText record{writer.take()};
  std::string text;
  text.reserve(kOrderTitle.size() + sizeof(std::uint32_t) + record.text.size());
  const auto size = static_cast<std::uint32_t>(record.text.size());
  text.append(kOrderTitle).append(reinterpret_cast<const char*>(&size), sizeof size);
  return text.append(record.text);
}

Result<NodeOrder> read_node_order(int fd) {
  std::string title(kOrderTitle.size(), '\0');
  if (Status read = read_whole(fd, title.data(), title.size()); !read) return read;
  if (title != kOrderTitle)
    return Status(Code::invalid_argument,
                  "this is no order of this version: muster on this machine and on the one that "
                  "starts the job must be of one version; `muster node` is started by `muster run "
                  "--hosts`, not by people");
  std::uint32_t size = 0;
  if (Status read = read_whole(fd, reinterpret_cast<char*>(&size), sizeof size); !read) return read;
  if (size > kLongestOrder)
    return Status(Code::invalid_argument, "the launcher's order is longer than 16 MiB");
  WipedText record{std::string(size, '\0')};
  if (Status read = read_whole(fd, record.text.data(), size); !read) return read;
  return decode(record.text);
}

Status take_order(const NodeOrder& order) {
  for (const std::string& each : order.variables) {
    const std::size_t equals = each.find('=');
    if (equals == std::string::npos || equals == 0)
      return Status(Code::invalid_argument, "\"" + each + "\" is no NAME=value");
    ::setenv(each.substr(0, equals).c_str(), each.c_str() + equals + 1, 1);
  }
  if (::chdir(order.folder.c_str()) != 0)
    return Status(Code::invalid_argument, "the folder " + order.folder + ": " + errno_text(errno) +
                                              "; --wdir names the one to work in on all machines");
  ::setenv("PWD", order.folder.c_str(), 1);
  return order.secret ? adopt_secret(*order.secret) : Status();
}

Status follow_launcher() {
  const int stream = ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3);
  const Descriptor nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (stream < 0 || !nothing || ::dup2(nothing.get(), STDIN_FILENO) < 0)
    return Status(Code::exhausted, "no descriptor for the launcher's words: " + errno_text(errno));
  // The launcher here takes them over. One that comes before would end this process, and no worker
  // is there that it could be for.
  for (const int signal : {SIGUSR1, SIGUSR2}) ::signal(signal, SIG_IGN);
  auto thread = start_thread("the thread that hears the launcher", [stream] {
    const pid_t self = ::getpid();
    for (;;) {
      unsigned char number = 0;
      const ssize_t got = ::read(stream, &number, 1);
      if (got < 0 && errno == EINTR) continue;
      // Workers that nobody watches would run on.
      ::kill(self, got == 1 ? static_cast<int>(number) : SIGTERM);
      if (got != 1) return;
    }
  });
  if (!thread) return thread.status();
  thread->detach();
  return {};
}

}  // namespace muster::launch

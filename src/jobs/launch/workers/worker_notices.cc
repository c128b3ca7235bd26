// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/worker_notices.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <string_view>
#include <thread>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "core/net/unix_socket.h"
#include "muster/clock.h"

namespace muster::launch {
namespace {

constexpr std::size_t kReasonShown = 2048;
constexpr std::size_t kLongestNews = 8192;  // limit: a name of a host has at most 255 bytes

constexpr Duration kLauncherBusy =
    std::chrono::seconds(60);                              // limit: it may stand still for a time
constexpr Duration kPause = std::chrono::milliseconds(2);  // limit: pace of attempts
// A worker's words.
constexpr char kTrained = 0, kMemories = 1, kCommitted = 2, kLost = 3, kTrouble = 4, kEnding = 5,
               kState = 6, kHandedOver = 7;

struct WorkerRecordRead {
  DescriptorMessage message;
  std::array<std::byte, kLongestNews> text;

  std::string_view view() const {
    return as_text(ConstBytes(text).first(static_cast<std::size_t>(message.bytes)));
  }
};

/// A reset is the peer's end, behind which there may be records of it.
void receive(int descriptor, WorkerRecordRead& into, int flags) {
  do {
    into.message = receive_descriptors(descriptor, into.text, flags);
  } while (into.message.bytes < 0 && errno == ECONNRESET);
}

/// Until the deadline it tries again where the socket is full, or too many files are under way.
Status send_memories(int channel, std::string_view record, std::span<const int> memories,
                     TimePoint deadline) {
  int error = 0;
  while (!send_descriptors(channel, as_bytes(record), memories, MSG_DONTWAIT)) {
    error = errno;
    const bool may_pass = error == EAGAIN || error == ETOOMANYREFS;
    if (!may_pass || steady_clock().now() >= deadline) break;
    std::this_thread::sleep_for(kPause);
    error = 0;
  }
  if (error == 0) return {};
  if (error == EPIPE || error == ECONNRESET) return {Code::closed, errno_text(error)};
  if (error == EAGAIN)
    return {Code::timed_out, "the other side does not take the memory files of commits"};
  return {Code::exhausted, std::to_string(memories.size()) +
                               " memory files of commits cannot be passed on: " +
                               errno_text(error) + "; raise the number of open files (ulimit -n)"};
}

std::string encode(const WorkerNotice& notice) {
  return ByteWriter()
      .put(notice.kind)
      .put(notice.epoch)
      .put(notice.restarts)
      .put(notice.ranks)
      .put_text(notice.agent_store)
      .put_text(notice.master_addr)
      .put(notice.master_port)
      .put(notice.committed)
      .put(notice.state_in)
      .put_text(notice.reason.substr(0, kReasonShown))
      .take();
}

GroupTrouble read_trouble(ByteReader& reader) {
  GroupTrouble trouble;
  trouble.epoch = reader.get<std::int64_t>();
  trouble.text = reader.get_text();
  const auto count = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i)
    trouble.blamed.push_back(reader.get<int>());
  return trouble;
}

}  // namespace

Result<WorkerChannel> make_worker_channel() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return Status(Code::exhausted, "no pair of sockets for a worker: " + errno_text(errno));
  return WorkerChannel{Descriptor(ends[0]), Descriptor(ends[1])};
}

bool tell_worker(int descriptor, const WorkerNotice& notice) {
  return send_descriptors(descriptor, as_bytes(encode(notice)), {}, MSG_DONTWAIT);
}

Status tell_memories(int descriptor, std::span<const Descriptor> memories) {
  if (memories.empty()) return {};
  WorkerNotice notice;
  notice.kind = WorkerNoticeKind::memories;
  std::vector<int> numbers;
  for (const Descriptor& each : memories) numbers.push_back(each.get());
  return send_memories(descriptor, encode(notice), numbers, TimePoint{});
}

WorkerWords take_words(int descriptor) {
  WorkerWords words;
  WorkerRecordRead record;
  for (;;) {
    receive(descriptor, record, MSG_DONTWAIT);
    if (record.message.bytes < 0) return words;
    words.at_end = record.message.bytes == 0;
    if (words.at_end) return words;
    ByteReader reader(record.view());
    const char word = reader.get<char>();
    if (word == kTrained) words.trained = true;
    if (word == kCommitted) words.committed = reader.get<std::int64_t>();
    if (word == kEnding) words.ending = reader.get<std::int64_t>();
    if (word == kState) {
      HeldState state;
      state.epoch = reader.get<std::int64_t>();
      state.divided = reader.get<char>() != 0;
      const auto commits = reader.get<std::int64_t>();
      if (reader.at_end()) {
        words.state = state;
        words.committed = commits;
      }
    }
    if (word == kTrouble) {
      GroupTrouble trouble = read_trouble(reader);
      if (reader.at_end()) words.trouble = std::move(trouble);
    }
    if (word == kLost) {
      words.lost = reader.get<std::int64_t>();
      words.kept = reader.get<std::int64_t>();
      words.committed = words.kept;  // those after that were lost
      words.state = {};
    }
    if (word == kHandedOver) {
      words.memories_missed |= record.message.cut_off;
      words.handed_over = std::move(record.message.descriptors);
    }
    if (word != kMemories) continue;
    words.memories_missed = record.message.cut_off;
    if (!words.memories_missed) words.memories = std::move(record.message.descriptors);
  }
}

Result<WorkerNotice> read_worker_notice(int descriptor, std::vector<Descriptor>& memories) {
  WorkerRecordRead record;
  receive(descriptor, record, 0);
  if (record.message.bytes < 0)
    return Status(Code::network, "reading the launcher's notices: " + errno_text(errno));
  if (record.message.bytes == 0)
    return Status(Code::closed, "the launcher of this process has ended");
  ByteReader reader(record.view());
  WorkerNotice notice;
  notice.kind = reader.get<WorkerNoticeKind>();
  notice.epoch = reader.get<std::int64_t>();
  notice.restarts = reader.get<int>();
  notice.ranks = reader.get<WorkerRanks>();
  notice.agent_store = reader.get_text();
  notice.master_addr = reader.get_text();
  notice.master_port = reader.get<std::uint16_t>();
  notice.committed = reader.get<std::int64_t>();
  notice.state_in = reader.get<std::int64_t>();
  notice.reason = reader.get_text();
  if (notice.kind == WorkerNoticeKind::memories) {
    memories = std::move(record.message.descriptors);
    if (record.message.cut_off) {
      memories.clear();
      log(LogLevel::warning,
          "this process has no descriptors left for the commits that its launcher holds for it; "
          "they are restored only if another rank has them too: raise the number of open files "
          "(ulimit -n)");
    }
  }
  if (reader.at_end() && notice.kind <= WorkerNoticeKind::hand_over) return notice;
  return Status(Code::mismatch,
                "the launcher tells its workers what this version does not know; run `muster run` "
                "and the program with the same muster");
}

bool has_worker_notice(int descriptor) {
  char first = 0;
  return ::recv(descriptor, &first, 1, MSG_PEEK | MSG_DONTWAIT) >= 0;
}

void tell_trained(int descriptor) {
  const Status sent =
      send_memories(descriptor, {&kTrained, 1}, {}, deadline_after(steady_clock(), kLauncherBusy));
  if (!sent && sent.code() != Code::closed)
    log(LogLevel::warning,
        "the launcher does not hear that training has ended, and may repair a "
        "death from now on as one during training: " +
            sent.message());
}

void tell_committed(int descriptor, std::int64_t number) {
  const std::string record = ByteWriter().put(kCommitted).put(number).take();
  // A full socket has earlier numbers in it, and a later one comes.
  (void)send_descriptors(descriptor, as_bytes(record), {}, MSG_DONTWAIT);
}

void tell_state(int descriptor, const HeldState& state, std::int64_t commits) {
  const char divided = state.divided ? 1 : 0;
  const std::string record =
      ByteWriter().put(kState).put(state.epoch).put(divided).put(commits).take();
  const Status sent =
      send_memories(descriptor, record, {}, deadline_after(steady_clock(), kLauncherBusy));
  if (!sent && sent.code() != Code::closed)
    log(LogLevel::warning,
        "the launcher does not hear that this process has the job's state, and may begin an epoch "
        "without it: " +
            sent.message());
}

void tell_lost(int descriptor, std::int64_t commits, std::int64_t kept) {
  const std::string record = ByteWriter().put(kLost).put(commits).put(kept).take();
  const Status sent =
      send_memories(descriptor, record, {}, deadline_after(steady_clock(), kLauncherBusy));
  if (!sent && sent.code() != Code::closed)
    log(LogLevel::warning,
        "the launcher does not hear that the job's state is lost, and says "
        "nothing of it in its report: " +
            sent.message());
}

void tell_trouble(int descriptor, const GroupTrouble& trouble) {
  const std::size_t blamed = std::min(trouble.blamed.size(), kMostBlamed);
  ByteWriter writer;
  writer.put(kTrouble)
      .put(trouble.epoch)
      .put_text(trouble.text.substr(0, kReasonShown))
      .put(static_cast<std::uint32_t>(blamed));
  for (std::size_t i = 0; i < blamed; ++i) writer.put(trouble.blamed[i]);
  const Status sent =
      send_memories(descriptor, writer.take(), {}, deadline_after(steady_clock(), kLauncherBusy));
  if (!sent && sent.code() != Code::closed)
    log(LogLevel::warning,
        "the launcher does not hear that the group has failed, and may begin no further epoch: " +
            sent.message());
}

void tell_ending(int descriptor, std::int64_t epoch) {
  const std::string record = ByteWriter().put(kEnding).put(epoch).take();
  // A launcher that is busy or gone misses it, and decides as if the worker had said nothing.
  (void)send_descriptors(descriptor, as_bytes(record), {}, MSG_DONTWAIT);
}

Status give_memories(int descriptor, std::span<const int> memories) {
  if (memories.size() > kMostMemories)
    return {Code::exhausted, "a launcher holds at most " + std::to_string(kMostMemories) +
                                 " memory files for a worker, and not " +
                                 std::to_string(memories.size()) +
                                 "; give the nodes of the job more equal numbers of workers"};
  if (memories.empty()) return {};
  return send_memories(descriptor, {&kMemories, 1}, memories,
                       deadline_after(steady_clock(), kLauncherBusy));
}

Status hand_over(int descriptor, int memory) {
  const std::span memories(&memory, memory < 0 ? 0U : 1U);
  return send_memories(descriptor, {&kHandedOver, 1}, memories,
                       deadline_after(steady_clock(), kLauncherBusy));
}

}  // namespace muster::launch

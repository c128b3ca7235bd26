// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/file/file_store.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/base/bytes.h"
#include "core/store/factory.h"
#include "core/store/file/file_log.h"
#include "core/store/request.h"

namespace muster::store {
namespace {

using Transaction = FileLog::Transaction;

std::string user_key(std::string_view key) { return "k" + std::string(key); }
bool is_user_key(const std::string& key) { return key.front() == 'k'; }
std::string queue_key(std::string_view key) { return "qh" + std::string(key); }
std::string queue_entry(std::string_view key, std::uint64_t number) {
  ByteWriter out;
  out.put_bytes("qe").put(number).put_bytes(key);
  return out.take();
}

struct Queue {
  std::uint64_t first = 0, end = 0;
};
Queue read_queue(Transaction& file, std::string_view key) {
  const std::string* text = file.find(queue_key(key));
  if (text == nullptr) return {};
  ByteReader in(*text);
  Queue queue;
  queue.first = in.get<std::uint64_t>();
  queue.end = in.get<std::uint64_t>();
  return queue;
}
void write_queue(Transaction& file, std::string_view key, const Queue& queue) {
  ByteWriter out;
  out.put(queue.first).put(queue.end);
  file.put(queue_key(key), out.view());
}

Value shared(std::string_view text) { return std::make_shared<const std::string>(text); }
Reply failure(Code code, std::string message) { return {Status(code, std::move(message)), 0, {}}; }

Reply add(Transaction& file, std::string_view key, std::int64_t amount) {
  std::int64_t sum = amount;
  if (const std::string* text = file.find(user_key(key))) {
    std::int64_t current = 0;
    const auto [stop, error] = std::from_chars(text->data(), text->data() + text->size(), current);
    if (error != std::errc() || stop != text->data() + text->size()) {
      return failure(Code::store, "add(" + quoted(key) + "): the value stored there, " +
                                      quoted(*text) + ", is not a whole number");
    }
    if (__builtin_add_overflow(current, amount, &sum)) {
      return failure(Code::store, "add(" + quoted(key) + "): " + *text + " + " +
                                      std::to_string(amount) + " does not fit into 64 bits");
    }
  }
  file.put(user_key(key), std::to_string(sum));
  return {{}, sum, {}};
}

Reply compare_set(Transaction& file, std::string_view key, std::string_view expected,
                  std::string_view desired) {
  const std::string* current = file.find(user_key(key));
  const bool matches = current == nullptr ? expected.empty() : *current == expected;
  if (!matches)
    return {{}, 0, {shared(current == nullptr ? expected : std::string_view(*current))}};
  file.put(user_key(key), desired);
  return {{}, 1, {shared(desired)}};
}

Reply append(Transaction& file, std::string_view key, std::string_view value) {
  const std::string* current = file.find(user_key(key));
  if (current != nullptr && value.size() > kMaxValueBytes - current->size()) {
    return failure(Code::exhausted, "append(" + quoted(key) +
                                        "): the value would grow beyond the limit of " +
                                        std::to_string(kMaxValueBytes) + " bytes");
  }
  file.append(user_key(key), value);
  return {};
}

Reply execute(Transaction& file, const Request& request) {
  const std::string_view key = request.keys.empty() ? std::string_view() : request.keys[0];
  switch (request.op) {
    case StoreOp::set: file.put(user_key(key), request.values[0]); return {};
    case StoreOp::multi_set:
      for (std::size_t i = 0; i < request.keys.size(); ++i)
        file.put(user_key(request.keys[i]), request.values[i]);
      return {};
    case StoreOp::add: return add(file, key, request.number);
    case StoreOp::compare_set: return compare_set(file, key, request.values[0], request.values[1]);
    case StoreOp::append: return append(file, key, request.values[0]);
    case StoreOp::queue_push: {
      Queue queue = read_queue(file, key);
      file.put(queue_entry(key, queue.end++), request.values[0]);
      write_queue(file, key, queue);
      return {{}, static_cast<std::int64_t>(queue.end - queue.first), {}};
    }
    case StoreOp::queue_len: {
      const Queue queue = read_queue(file, key);
      return {{}, static_cast<std::int64_t>(queue.end - queue.first), {}};
    }
    case StoreOp::num_keys:
      return {{},
              std::count_if(file.map().begin(), file.map().end(),
                            [](const auto& entry) { return is_user_key(entry.first); }),
              {}};
    case StoreOp::check: {
      const bool all =
          std::all_of(request.keys.begin(), request.keys.end(),
                      [&](std::string_view each) { return file.find(user_key(each)) != nullptr; });
      return {{}, all ? 1 : 0, {}};
    }
    case StoreOp::list_keys: {
      Reply reply;
      for (const auto& [name, value] : file.map()) {
        if (is_user_key(name)) reply.values.push_back(shared(std::string_view(name).substr(1)));
      }
      return reply;
    }
    default:
      return failure(Code::internal,
                     "the file store was asked to execute " + std::string(name_of(request.op)));
  }
}

/// The reply of a request that may have to wait, or nothing yet.
std::optional<Reply> attempt(Transaction& file, const Request& request,
                             std::vector<std::string_view>& missing) {
  missing.clear();
  if (request.op == StoreOp::queue_pop) {
    Queue queue = read_queue(file, request.keys[0]);
    if (queue.first == queue.end) return std::nullopt;
    const std::string entry = queue_entry(request.keys[0], queue.first++);
    Reply reply{{}, 0, {shared(*file.find(entry))}};
    file.erase(entry);
    write_queue(file, request.keys[0], queue);
    return reply;
  }
  Reply reply;
  for (const std::string_view key : request.keys) {
    const std::string* value = file.find(user_key(key));
    if (value == nullptr) missing.push_back(key);
    if (value != nullptr && request.op != StoreOp::wait && missing.empty())
      reply.values.push_back(shared(*value));
  }
  if (!missing.empty()) return std::nullopt;
  return reply;
}

Status timeout_of(const Request& request, const std::vector<std::string_view>& missing,
                  Duration waited) {
  const std::string time = describe(waited);
  if (request.op == StoreOp::get)
    return Status(Code::timed_out,
                  "get(" + quoted(request.keys[0]) + "): nobody set this key within " + time);
  if (request.op == StoreOp::queue_pop)
    return Status(Code::timed_out, "queue_pop(" + quoted(request.keys[0]) +
                                       "): nothing came into the queue within " + time);
  return Status(Code::timed_out,
                std::string(name_of(request.op)) + ": " + std::to_string(missing.size()) + " of " +
                    std::to_string(request.keys.size()) + " keys are still missing after " + time +
                    ": " + quoted(missing));
}

/// Runs once, when the last clone of a store is destroyed.
class FileMembership {
 public:
  FileMembership(std::shared_ptr<FileLog> log, std::function<void(FileLog&)> on_last_release)
      : log_(std::move(log)), on_last_release_(std::move(on_last_release)) {}
  ~FileMembership() {
    if (on_last_release_ && !mark_.forked()) on_last_release_(*log_);
  }
  FileLog& log() { return *log_; }

 private:
  std::shared_ptr<FileLog> log_;
  std::function<void(FileLog&)> on_last_release_;
  ProcessMark mark_;
};

class FileBackedStore final : public RequestStore<Store> {
 public:
  FileBackedStore(std::shared_ptr<FileMembership> membership, Duration timeout)
      : RequestStore(timeout), membership_(std::move(membership)) {}

  Result<bool> delete_key(std::string_view key) override {
    return Status(Code::unsupported, "delete_key(" + quoted(key) +
                                         "): a file store cannot delete keys; use a tcp or hash "
                                         "store, or set the key to something else");
  }
  Result<std::shared_ptr<Store>> clone() override {
    return std::shared_ptr<Store>(std::make_shared<FileBackedStore>(membership_, timeout()));
  }
  const char* kind() const override { return "file"; }

 protected:
  Reply call(const Request& request) override {
    switch (request.op) {
      case StoreOp::get:
      case StoreOp::wait:
      case StoreOp::multi_get:
      case StoreOp::queue_pop: return call_waiting(request);
      case StoreOp::barrier:
      case StoreOp::all_gather: return call_meeting(request);
      default: break;
    }
    Reply reply;
    const Status done = log().transact(deadline_after(steady_clock(), timeout()),
                                       [&](Transaction& file) { reply = execute(file, request); });
    if (!done) return {done.with_context(name_of(request.op)), 0, {}};
    return reply;
  }

 private:
  FileLog& log() { return membership_->log(); }

  Reply call_waiting(const Request& request) {
    const TimePoint begin = steady_clock().now();
    std::optional<Reply> reply;
    std::vector<std::string_view> missing(request.keys);
    const bool once = request.op == StoreOp::queue_pop && request.number == 0;
    const Status done = log().transact_until(deadline_after(steady_clock(), request.timeout),
                                             [&](Transaction& file) {
                                               reply = attempt(file, request, missing);
                                               return reply.has_value() || once;
                                             });
    if (reply) return std::move(*reply);
    if (once && done)
      return failure(Code::store, "queue_pop(" + quoted(request.keys[0]) + "): the queue is empty");
    if (done.code() != Code::timed_out) return {done.with_context(name_of(request.op)), 0, {}};
    return {timeout_of(request, missing, steady_clock().now() - begin), 0, {}};
  }

  Reply call_meeting(const Request& request) {
    const TimePoint begin = steady_clock().now(),
                    deadline = deadline_after(steady_clock(), request.timeout);
    FileMeeting meeting(request);
    bool arrived = false, over = false;
    const auto finished = [&](const FileLog::Map& map) { return over = meeting.finished(map); };
    Status done = log().transact(deadline, [&](Transaction& file) {
      arrived = meeting.arrive(file);
      over = !arrived || meeting.finished(file.map());
    });
    if (done && !over) done = log().await(deadline, finished);
    if (done || over) return std::move(meeting.reply());
    if (done.code() != Code::timed_out || !arrived)
      return {done.with_context(name_of(request.op)), 0, {}};
    done = log().transact(steady_clock().now() + kFileGoodbyeLimit, [&](Transaction& file) {
      meeting.give_up(file, steady_clock().now() - begin);
    });
    if (!done) return {done.with_context(name_of(request.op)), 0, {}};
    return std::move(meeting.reply());
  }

  std::shared_ptr<FileMembership> membership_;
};

/// One more of `world_size` users has finished; the last removes the file.
void count_out(FileLog& log, int world_size) {
  const Status ignored =
      log.transact(steady_clock().now() + kFileGoodbyeLimit, [&](Transaction& file) {
        const std::string key = std::string(1, kFileOwnKey) + "finished";
        const std::string* text = file.find(key);
        const int finished = 1 + (text == nullptr ? 0 : std::atoi(text->c_str()));
        file.put(key, std::to_string(finished));
        if (finished >= world_size) file.remove_file();
      });
  static_cast<void>(
      ignored);  // no caller is left to report to; the next run reports a leftover file
}

}  // namespace

std::shared_ptr<Store> make_file_store_over(std::shared_ptr<FileLog> log, Duration timeout,
                                            std::function<void(FileLog&)> on_last_release) {
  return std::make_shared<FileBackedStore>(
      std::make_shared<FileMembership>(std::move(log), std::move(on_last_release)), timeout);
}

Result<std::shared_ptr<Store>> make_file_store(std::string path, int world_size, Duration timeout) {
  auto log = FileLog::open(std::move(path));
  if (!log) return log.status();
  if (Status readable =
          (*log)->transact(deadline_after(steady_clock(), timeout), [](Transaction&) {});
      !readable)
    return readable;
  std::function<void(FileLog&)> on_last_release;
  if (world_size > 0)
    on_last_release = [world_size](FileLog& file) { count_out(file, world_size); };
  return make_file_store_over(std::move(*log), timeout, std::move(on_last_release));
}

}  // namespace muster::store

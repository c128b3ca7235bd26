// SPDX-License-Identifier: BSD-3-Clause
/// Failures of processes, stores and addresses, and the resulting error messages: the third part of
/// docs/user/errors.md (misuse_test.cc writes it).
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/group/testing/ranks.h"
#include "core/net/socket_address.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::testing {

/// The message of `call`'s exception; empty if it throws none.
inline std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const DistError& error) {
    return error.what();
  }
  return {};
}

/// Produces each failure with ranks as processes and records the message that one of them, the
/// reader, receives.
class FailureGallery {
 public:
  struct Row {
    std::string done, text;
  };

  FailureGallery() {
    of_ranks();
    of_init();
    of_stores();
  }
  const std::vector<Row>& rows() const { return rows_; }

 private:
  static constexpr Duration kLong = muster::testing::kMustHappen;
  static constexpr Duration kShort = std::chrono::seconds(2);  // a timeout that must expire

  /// Shared by the ranks of one row: an address with no listener yet, a file that does not exist
  /// yet, and a step counter.
  struct Stage {
    std::uint16_t port = reserve_port();
    ScratchFolder folder;
    SharedCounter steps;

    std::string address() const { return "tcp://127.0.0.1:" + std::to_string(port); }
    std::string file() const { return "file://" + folder.file("meeting"); }
    /// Waits until the ranks have taken this many steps in total.
    void await(int count) { EXPECT_TRUE(steps.wait_for(count, kLong)); }
  };
  using Body = std::function<std::string(Stage&, int rank)>;

  static std::string masked(std::string text, const Stage& stage) {
    const auto replace = [&](const std::string& what, const std::string& by) {
      if (what.empty()) return;
      for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
        text.replace(at, what.size(), by);
    };
    char host[256] = "";
    ::gethostname(host, sizeof host - 1);
    replace(stage.folder.file(""), "<folder>/");
    text = std::regex_replace(text, std::regex("(process|pid) \\d+"), "$1 <number>");
    replace("<number> on " + std::string(host), "<number> on <host>");
    replace(std::to_string(stage.port), "<port>");
    // A rank that comes before the store's socket for its own host connects by TCP, where more may
    // have gone wrong.
    replace(", unless somebody on the network tampers with this connection", "");
    return text;
  }

  /// The other ranks may hang; they are killed once the reader has its message.
  void play(const char* done, const char* part, int ranks, int reader, const Body& body) {
    SCOPED_TRACE(done);
    Stage stage;
    SharedCounter told;
    RankProcesses processes(ranks, [&](int rank) {
      for (const char* name : {"MUSTER_SECRET", "MUSTER_SECRET_FILE", "MUSTER_INSECURE",
                               "MUSTER_SOCKET_IFNAME", "MUSTER_TLS"})
        ::unsetenv(name);
      std::string text;
      try {
        text = body(stage, rank);
      } catch (const std::exception& error) {
        text = std::string("unexpected: ") + error.what();
      }
      if (rank == reader) told.add(1);
      return text;
    });
    EXPECT_TRUE(told.wait_for(1, kLong));
    for (int rank = 0; rank < ranks; ++rank)
      if (rank != reader) processes.kill(rank, SIGKILL);
    const auto text = processes.join(kLong)[static_cast<std::size_t>(reader)].report;
    EXPECT_HAS(text, part);
    rows_.push_back({done, masked(text, stage)});
  }

  static void join_job(const std::string& where, int rank, int world_size,
                       Duration timeout = kLong) {
    init_process_group(
        {.init_method = where, .timeout = timeout, .world_size = world_size, .rank = rank});
  }

  /// Rank 1 of two runs `end` after the first call has completed on both and rank 0 is in the
  /// second.
  void lost(const char* done, const char* part, const std::function<void()>& end) {
    play(done, part, 2, 0, [&](Stage& stage, int rank) {
      join_job(stage.file(), rank, 2);
      const auto tensor = torch::zeros({4});
      all_reduce(tensor);
      if (rank == 1) {
        stage.await(1);
        end();
        ::pause();
      }
      const auto work = all_reduce(tensor, {.async_op = true});
      stage.steps.add(1);
      return thrown_by([&] { work->wait(); });
    });
  }

  void of_ranks() {
    lost("rank 1 is killed (SIGKILL)", "rank 1", [] { ::raise(SIGKILL); });
    lost("rank 1 ends without destroy_process_group", "rank 1", [] { ::_exit(0); });
    lost("rank 1 is stopped (SIGSTOP)", "rank 1", [] { ::raise(SIGSTOP); });
    lost("rank 1 aborts the group", "the loss is not a number",
         [] { abort_process_group(nullptr, "the loss is not a number"); });
    lost("rank 1 leaves out a call and destroys the group", "skipped a call",
         [] { thrown_by([] { destroy_process_group(); }); });
    play("a function of spawn throws on rank 1", "the data of rank 1 is bad", 1, 0,
         [](Stage&, int) {
           return thrown_by([] {
             spawn(
                 [](int rank) {
                   if (rank == 1) throw std::runtime_error("the data of rank 1 is bad");
                   for (;;) ::pause();
                 },
                 {.nprocs = 2});
           });
         });
  }

  void of_init() {
    play("ranks 1 and 2 do not come to init_process_group", "ranks 1 and 2", 1, 0,
         [](Stage& stage, int) {
           return thrown_by([&] { join_job(stage.address(), 0, 3, kShort); });
         });
    play("rank 0, which hosts the store, does not come to init_process_group",
         "its host (rank 0 or the launcher)", 1, 0, [](Stage& stage, int) {
           return thrown_by([&] { join_job(stage.address(), 1, 3, kShort); });
         });
    play("the port of the store is taken", "in use", 1, 0, [](Stage& stage, int) {
      const auto address = *SocketAddress::numeric("127.0.0.1", stage.port);
      const Descriptor other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const int on = 1;
      ::setsockopt(other.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      if (::bind(other.get(), address.raw(), address.length()) != 0 ||
          ::listen(other.get(), 1) != 0)
        return std::string("no port");
      return thrown_by([&] { join_job(stage.address(), 0, 2, kShort); });
    });
    const auto secrets = [&](const char* done, const char* part, const char* other) {
      play(done, part, 2, 1, [=](Stage& stage, int rank) {
        const char* own = rank == 0 ? "the secret of rank zero" : other;
        if (own != nullptr) ::setenv("MUSTER_SECRET", own, 1);
        return thrown_by([&] { join_job(stage.address(), rank, 2); });
      });
    };
    secrets("rank 1 has another secret than rank 0", "different secrets",
            "the secret of another job");
    secrets("rank 1 has no secret, rank 0 was given one", "same MUSTER_SECRET on all ranks",
            nullptr);
    secrets("rank 1 has a secret that is too short", "at least 16", "too short");
    play("the file of file:// is left over from a run that was killed", "left over", 2, 1,
         [](Stage& stage, int rank) {
           if (rank == 1) {
             stage.await(1);
             return thrown_by([&] { join_job(stage.file(), 0, 1); });
           }
           RankProcesses killed(1, [&](int) {
             join_job(stage.file(), 0, 1);
             ::raise(SIGKILL);
             return std::string();
           });
           killed.join(kLong);
           stage.steps.add(1);
           return std::string();
         });
    play("the folder of the file of file:// does not exist", "does not exist", 1, 0,
         [](Stage& stage, int) {
           return thrown_by(
               [&] { join_job("file://" + stage.folder.file("missing/meeting"), 0, 1); });
         });
    play("the ranks give different backends", "rank", 2, 0, [](Stage& stage, int rank) {
      return thrown_by([&] {
        init_process_group({.backend = rank == 0 ? "native" : "tcp",
                            .init_method = stage.file(),
                            .timeout = kLong,
                            .world_size = 2,
                            .rank = rank});
      });
    });
    play("env:// without a launcher", "WORLD_SIZE", 1, 0, [](Stage&, int) {
      for (const char* name : {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"})
        ::unsetenv(name);
      return thrown_by([] { init_process_group(); });
    });
  }

  void of_stores() {
    play("the process that hosts the store has ended, and another uses it", "closed the connection",
         1, 0, [](Stage& stage, int) {
           RankProcesses host(1, [&](int) {
             const TCPStore store("127.0.0.1", stage.port,
                                  {.is_master = true, .wait_for_workers = false});
             for (;;) ::pause();
             return std::string();
           });
           TCPStore store("127.0.0.1", stage.port, {.wait_for_workers = false});
           store.set("a key", "its value");
           host.kill(0, SIGKILL);
           host.join(kLong);
           // Whether it is reached over TCP, where the text goes on, is settled by who is sooner.
           const std::string text = thrown_by([&] { store.get("a key"); });
           return text.substr(0, text.find(", or somebody cut the connection"));
         });
    play("nobody sets the key that a store's get waits for", "a key", 1, 0, [](Stage&, int) {
      HashStore store;
      store.set_timeout(std::chrono::milliseconds(200));
      return thrown_by([&] { store.get("a key"); });
    });
  }

  std::vector<Row> rows_;
};

}  // namespace muster::testing

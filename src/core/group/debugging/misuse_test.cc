// SPDX-License-Identifier: BSD-3-Clause
// Invalid calls and their error messages. `tools/errors_gallery` writes the same messages to
// docs/user/errors.md.
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <regex>
#include <sstream>

#include "core/group/testing/failures.h"
#include "core/group/testing/ranks.h"
#include "muster/objects.h"
#include "testing/needs_all_wings.h"

namespace muster {
namespace {

using testing::on_ranks;
using testing::thrown_by;

/// An invalid call on rank 1 of three, and the valid call the others make meanwhile (none for
/// messages, which no rank waits for).
struct Misuse {
  std::string done;  ///< for the gallery
  std::string part;  ///< of the message
  std::function<void()> wrong;
  std::function<void(int rank)> right;
};

at::Tensor zeros(std::vector<std::int64_t> sizes, at::ScalarType dtype = at::kFloat) {
  return torch::zeros(sizes, dtype);
}
TensorList three(std::int64_t elements) {
  return {zeros({elements}), zeros({elements}), zeros({elements})};
}
TensorList at_root(int rank, int root = 0) { return rank == root ? three(2) : TensorList{}; }

std::vector<Misuse> misuses() {
  const auto reduce_all = [](int) { all_reduce(zeros({2})); };
  const auto gather_all = [](int) { all_gather(three(2), zeros({2})); };
  const auto gather_flat = [](int) { all_gather_into_tensor(zeros({6}), zeros({2})); };
  const auto scatter_sum = [](int) { reduce_scatter(zeros({2}), three(2)); };
  const auto exchange = [](int) { all_to_all_single(zeros({3}), zeros({3})); };
  const auto from_zero = [](int) { broadcast(zeros({2}), {.src = 0}); };
  const auto gather_zero = [](int rank) { gather(zeros({2}), {.gather_list = at_root(rank)}); };
  const auto scatter_zero = [](int rank) { scatter(zeros({2}), {.scatter_list = at_root(rank)}); };
  const auto gather_one = [](int) { gather(zeros({2}), {.dst = 1}); };
  const auto scatter_one = [](int) { scatter(zeros({2}), {.src = 1}); };
  const auto sparse = torch::ones({2}).to_sparse();
  const auto quantized = torch::quantize_per_tensor(torch::ones({2}), 0.1, 0, at::kQInt8);
  std::vector<Misuse> all{
      {"all_reduce of an undefined tensor", "undefined", [] { all_reduce({}); }, reduce_all},
      {"broadcast of a sparse tensor", "only dense", [=] { broadcast(sparse, {.src = 0}); },
       from_zero},
      {"all_reduce of a quantized tensor", "quantized", [=] { all_reduce(quantized); }, reduce_all},
      {"all_reduce of a sparse tensor with MAX", "SUM only",
       [=] { all_reduce(sparse, {.op = ReduceOp::MAX}); }, reduce_all},
      {"all_reduce of an expanded view", "expanded view",
       [] { all_reduce(zeros({1}).expand({4})); }, reduce_all},
      {"all_reduce of floats with BAND", "BAND is not defined on float32",
       [] { all_reduce(zeros({2}), {.op = ReduceOp::BAND}); }, reduce_all},
      {"all_reduce of complex numbers with MIN", "MIN is not defined on complex64",
       [] { all_reduce(zeros({2}, at::kComplexFloat), {.op = ReduceOp::MIN}); }, reduce_all},
      {"all_reduce of uint16", "can be moved but not reduced",
       [] { all_reduce(zeros({2}, at::kUInt16)); }, reduce_all},
      {"all_reduce of a tensor on a device that the group has no backend for", "no tensors on meta",
       [] { all_reduce(torch::zeros({2}, at::kMeta)); }, reduce_all},
      {"broadcast without src", "needs src", [] { broadcast(zeros({2}), {}); }, from_zero},
      {"broadcast with src outside the group", "rank 7", [] { broadcast(zeros({2}), {.src = 7}); },
       from_zero},
      {"broadcast with src and group_src", "exclude each other",
       [] { broadcast(zeros({2}), {.src = 0, .group_src = 0}); }, from_zero},
      {"reduce without dst", "needs dst", [] { reduce(zeros({2}), {}); },
       [](int) { reduce(zeros({2}), {.dst = 0}); }},
      {"all_gather into too short a list", "3 output tensors, one per member",
       [] { all_gather({zeros({2})}, zeros({2})); }, gather_all},
      {"all_gather of a tensor that does not fit its place", "the same number of elements",
       [] { all_gather(three(2), zeros({3})); }, gather_all},
      {"all_gather with two dtypes", "one dtype",
       [] { all_gather(three(2), zeros({2}, at::kInt)); }, gather_all},
      {"all_gather with tensors on two devices", "one device",
       [] { all_gather(three(2), torch::zeros({2}, at::kMeta)); }, gather_all},
      {"all_gather with one tensor three times in the list", "memory of its own",
       [] {
         const auto same = zeros({2});
         all_gather({same, same, same}, zeros({2}));
       },
       gather_all},
      {"all_gather_into_tensor into a tensor of the wrong shape", "neither concatenated",
       [] { all_gather_into_tensor(zeros({5}), zeros({2})); }, gather_flat},
      {"gather without a list on dst", "3 output tensors", [] { gather(zeros({2}), {.dst = 1}); },
       gather_one},
      {"gather with a list elsewhere", "the root, takes the list",
       [] { gather(zeros({2}), {.gather_list = three(2)}); }, gather_zero},
      {"gather into tensors of another size", "the same number of elements",
       [] { gather(zeros({2}), {.gather_list = three(3), .dst = 1}); }, gather_one},
      {"scatter without a list on src", "3 input tensors", [] { scatter(zeros({2}), {.src = 1}); },
       scatter_one},
      {"scatter with a list elsewhere", "the root, takes the list",
       [] { scatter(zeros({2}), {.scatter_list = three(2)}); }, scatter_zero},
      {"scatter of tensors of another size", "the same number of elements",
       [] { scatter(zeros({2}), {.scatter_list = three(3), .src = 1}); }, scatter_one},
      {"reduce_scatter of too short a list", "3 input tensors",
       [] { reduce_scatter(zeros({2}), {zeros({2})}); }, scatter_sum},
      {"reduce_scatter_tensor of a tensor of the wrong shape", "neither concatenated",
       [] { reduce_scatter_tensor(zeros({2}), zeros({7})); }, scatter_sum},
      {"all_to_all_single of rows that cannot be shared equally", "4 rows",
       [] { all_to_all_single(zeros({4}), zeros({4})); }, exchange},
      {"all_to_all_single with too few splits", "2 entries",
       [] {
         all_to_all_single(zeros({3}), zeros({3}), {.input_split_sizes = {1, 2}});
       },
       exchange},
      {"all_to_all_single with splits that do not sum to the rows", "must sum",
       [] {
         all_to_all_single(zeros({3}), zeros({3}), {.output_split_sizes = {1, 1, 2}});
       },
       exchange},
      {"all_to_all_single of a scalar", "no dimension 0",
       [] { all_to_all_single(zeros({3}), torch::tensor(1.0f)); }, exchange},
      {"all_to_all with too short a list", "3 input tensors",
       [] { all_to_all(three(1), {zeros({1})}); }, exchange},
      {"all_reduce_coalesced of nothing", "at least one", [] { all_reduce_coalesced({}); },
       reduce_all},
      {"all_gather_coalesced into lists of another length", "the numbers must be equal",
       [] {
         all_gather_coalesced({three(1), three(1), three(1)}, {zeros({1})});
       },
       gather_all},
      {"broadcast_object_list with a list of another length", "length 2",
       [] {
         std::vector<int> list(2);
         broadcast_object_list(list);
       },
       [](int) {
         std::vector<int> list(3);
         broadcast_object_list(list);
       }},
      {"all_gather_object into too short a list", "must have 3",
       [] {
         std::vector<int> list(2);
         all_gather_object(list, 1);
       },
       [](int rank) {
         std::vector<int> list(3);
         all_gather_object(list, rank);
       }},
      {"gather_object with a list off dst", "dst alone",
       [] {
         std::vector<int> list(3);
         gather_object(1, &list);
       },
       [](int rank) {
         std::vector<int> list(rank == 0 ? 3 : 0);
         gather_object(1, &list);
       }},
      {"scatter_object_list with an empty output list", "is empty",
       [] {
         std::vector<int> list;
         scatter_object_list(list);
       },
       [](int) {
         std::vector<int> list(1);
         scatter_object_list(list, {1, 2, 3});
       }},
  };
  const auto message = [&](const char* done, const char* part, std::function<void()> wrong) {
    all.push_back({done, part, wrong, nullptr});
  };
  message("send to oneself", "this process itself", [] { send(zeros({2}), {.dst = 1}); });
  message("recv from oneself", "this process itself", [] { recv(zeros({2}), {.src = 1}); });
  message("send to a rank that does not exist", "rank 5", [] { send(zeros({2}), {.dst = 5}); });
  message("send without dst", "needs dst", [] { send(zeros({2}), {}); });
  message("send with a negative tag", "tag -3", [] { send(zeros({2}), {.dst = 0, .tag = -3}); });
  message("send of an undefined tensor", "undefined", [] { send({}, {.dst = 0}); });
  message("send of a sparse tensor", "only dense", [=] { send(sparse, {.dst = 0}); });
  message("recv into an expanded view", "expanded view",
          [] { recv(zeros({1}).expand({3}), {.src = 0}); });
  message("send_object_list without dst", "needs dst",
          [] { send_object_list(std::vector<int>{1}, {}); });
  message("recv_object_list from a rank that does not exist", "rank 9", [] {
    std::vector<int> list(1);
    recv_object_list(list, {.src = 9});
  });
  return all;
}

struct Seen {
  std::string wrong;      ///< on rank 1
  std::string others[2];  ///< on ranks 0 and 2
  std::string next;       ///< on rank 1, at its next call
};
/// Rank 1 makes an invalid call, the others a valid one and then another, as a program would.
Seen play(const Misuse& misuse, const char* backend) {
  Seen seen;
  on_ranks(
      3,
      [&](int rank) {
        if (rank == 1) {
          seen.wrong = thrown_by(misuse.wrong);
          if (misuse.right && seen.wrong.find("object") == std::string::npos)
            seen.next = thrown_by([] { barrier(); });
        } else if (misuse.right) {
          seen.others[rank / 2] = thrown_by([&] {
            misuse.right(rank);
            barrier();
          });
        }
      },
      backend);
  return seen;
}

// spec: F18 a call that one rank could not make ends in an error on every rank, without a hang; H7
// DistError
TEST(Misuse, OfOneRankIsAnErrorOnEveryRank) {
  for (const char* backend : {"native", "tcp"}) {
    for (const auto& misuse : misuses()) {
      SCOPED_TRACE(misuse.done + std::string(" over ") + backend);
      const auto seen = play(misuse, backend);
      EXPECT_HAS(seen.wrong, misuse.part);
      EXPECT_HAS(seen.wrong, "on rank 1");
      if (!misuse.right) continue;
      for (const auto& text : seen.others) EXPECT_HAS(text, "rank 1");
      // The error is about the call, not about a timeout; object collectives give the reason, and
      // their group stays usable.
      const bool objects = seen.wrong.find("object") != std::string::npos;
      if (objects) continue;
      for (const auto& text : seen.others)
        EXPECT_HAS(text, "with arguments that were refused there");
      EXPECT_HAS(seen.next, "refused there");
    }
  }
}

// A call that is invalid on every rank leaves the group usable.
TEST(Misuse, OfAllRanksLeavesTheGroupUsable) {
  for (const char* backend : {"native", "tcp"}) {
    on_ranks(
        3,
        [](int rank) {
          for (const auto& misuse : misuses()) {
            if (!misuse.right || misuse.done.find("object") != std::string::npos) continue;
            const auto text =
                thrown_by(rank == 1 ? misuse.wrong : std::function<void()>([] { all_reduce({}); }));
            EXPECT_HAS(text, rank == 1 ? misuse.part : std::string("undefined"));
          }
          auto tensor = torch::ones({2});
          all_reduce(tensor);
          EXPECT_SAME(tensor, torch::full({2}, 3.0f));
        },
        backend);
  }
}

// spec: F18 an exception while a call is prepared or staged counts as a refused call: the others
// learn it immediately, though their timeout is an hour
TEST(Misuse, OfTensorsThatCannotBeStagedIsToldToTheOthers) {
  const auto csr = torch::eye(6).to_sparse_csr();
  const auto nested = at::_nested_tensor_from_tensor_list({zeros({2, 2}), zeros({4, 2})});
  const auto endless =
      zeros({1}).expand({std::int64_t{1} << 46});  // read only, so expanded tensors are allowed
  const Duration hour = std::chrono::hours(1);
  const std::vector<std::pair<std::string, std::function<void()>>> wrong{
      {"can't allocate memory", [&] { reduce(endless, {.dst = 0}); }},
      {"can't allocate memory", [&] { reduce(endless, {.dst = 0, .async_op = true}); }},
      {"only dense", [&] { all_gather_into_tensor(csr, zeros({6})); }},
      {"only dense", [&] { reduce_scatter_tensor(zeros({6}), csr); }},
      {"only dense",
       [&] {
         all_to_all_single(csr, zeros({6, 6}));
       }},
      {"nested", [&] { all_reduce(nested); }},
      {"nested", [&] { all_gather_into_tensor(nested, zeros({6})); }}};
  for (const auto& [said, call] : wrong) {
    on_ranks(2, [&, &said = said, &call = call](int rank) {
      default_group()->set_timeout(hour);
      if (rank == 1) {
        EXPECT_HAS(thrown_by(call), said);
      }
      EXPECT_HAS(thrown_by([] { barrier(); }), "rank 1");
    });
  }
}

// Few slices are compared pairwise, many are sorted.
TEST(Misuse, SlicesThatOverlapAreRefused) {
  constexpr int kRoot = 1;
  const auto parts = [](const at::Tensor& whole, int number, int apart) {
    TensorList list;
    for (int i = 0; i < number; ++i) list.push_back(whole.slice(0, i * apart, i * apart + 2));
    return list;
  };
  struct Case {
    const char* what;
    std::function<void(int rank, int ranks, const at::Tensor& whole)> call;
  };
  const std::vector<Case> cases{
      {"all_gather into overlapping tensors",
       [&](int, int ranks, const at::Tensor& whole) {
         all_gather(parts(whole, ranks, 1), zeros({2}));
       }},
      {"all_gather of what another's is gathered into",
       [&](int rank, int ranks, const at::Tensor& whole) {
         const auto to = parts(whole, ranks, 2);
         all_gather(to, to[static_cast<std::size_t>((rank + 1) % ranks)]);
       }},
      {"gather into overlapping tensors",
       [&](int rank, int ranks, const at::Tensor& whole) {
         gather(zeros({2}), {.gather_list = rank == kRoot ? parts(whole, ranks, 1) : TensorList{},
                             .dst = kRoot});
       }},
      {"scatter into what another is given",
       [&](int rank, int ranks, const at::Tensor& whole) {
         scatter(
             whole.slice(0, 0, 2),
             {.scatter_list = rank == kRoot ? parts(whole, ranks, 2) : TensorList{}, .src = kRoot});
       }},
      {"reduce_scatter into what another is given",
       [&](int rank, int ranks, const at::Tensor& whole) {
         const auto from = parts(whole, ranks, 2);
         reduce_scatter(from[static_cast<std::size_t>((rank + 1) % ranks)], from);
       }},
      {"all_to_all from one list into the same turned round",
       [&](int, int ranks, const at::Tensor& whole) {
         const auto from = parts(whole, ranks, 2);
         all_to_all(TensorList(from.rbegin(), from.rend()), from);
       }},
  };
  for (const int ranks : {3, 8}) {
    for (const auto& wrong : cases) {
      SCOPED_TRACE(wrong.what + std::string(" on ") + std::to_string(ranks));
      on_ranks(ranks, [&](int rank) {
        const auto text = thrown_by([&] { wrong.call(rank, ranks, zeros({2 * ranks})); });
        thrown_by([] {
          barrier();
        });  // a rank that has not yet learned of the refused root learns it here
        if (rank == kRoot) EXPECT_HAS(text, "give every slice memory of its own");
      });
    }
  }
}

// The rank whose call was refused may be busy for a long time; the other ranks are told
// immediately.
TEST(Misuse, OthersDoNotWaitForTheNextCallOfTheRefusedRank) {
  for (const char* backend : {"native", "tcp"}) {
    testing::RankLatch told(2);
    on_ranks(
        3,
        [&](int rank) {
          if (rank == 0) {
            EXPECT_HAS(thrown_by([] { broadcast(zeros({2}), {.src = 0, .group_src = 0}); }),
                       "exclude each other");
            told.wait();
            const auto text = thrown_by([] { barrier(); });
            EXPECT_HAS(text, "refused there");
          } else {
            const auto text = thrown_by([] { broadcast(zeros({2}), {.src = 0}); });
            EXPECT_HAS(text, "broadcast() with arguments that were refused there");
            EXPECT_HAS(text, "rank 0");
            told.count_down();
          }
        },
        backend);
  }
}

/// Mismatched calls, as reported on rank 0 of two.
std::vector<std::pair<std::string, std::string>> disagreements() {
  std::vector<std::pair<std::string, std::string>> rows;
  const auto two = [&](const char* done, const std::function<std::string(int)>& body) {
    std::string text;
    on_ranks(2, [&](int rank) {
      const auto mine = body(rank);
      if (rank == 0) text = mine;
    });
    rows.emplace_back(done, text);
  };
  two("rank 0 calls all_reduce, rank 1 broadcast", [](int rank) {
    return thrown_by([&] {
      rank == 0 ? all_reduce(zeros({4})) : broadcast(zeros({4}), {.src = 0});
      barrier();
    });
  });
  two("rank 0 gives all_reduce 4 elements, rank 1 5", [](int rank) {
    return thrown_by([&] {
      all_reduce(zeros({4 + rank}));
      barrier();
    });
  });
  testing::RankLatch over(1);
  two("rank 1 does not call all_reduce within the timeout", [&](int rank) {
    if (rank == 1) return over.wait(), thrown_by([] { barrier(); });  // also gets the error
    const auto text =
        thrown_by([] { all_reduce(zeros({4}), {.timeout = std::chrono::milliseconds(200)}); });
    over.count_down();
    return text;
  });
  testing::RankLatch waited(1);
  two("nobody sends what recv waits for", [&](int rank) {
    if (rank == 1) return waited.wait(), std::string();
    const auto text =
        thrown_by([] { recv(zeros({4}), {.src = 1, .timeout = std::chrono::milliseconds(200)}); });
    waited.count_down();
    return text;
  });
  two("rank 1 sends 6 elements, rank 0 receives 4", [](int rank) {
    if (rank == 1) return send(zeros({6}), {.dst = 0}), std::string();
    return thrown_by([] { recv(zeros({4}), {.src = 1}); });
  });
  two("rank 1 sends int32, rank 0 receives float32", [](int rank) {
    if (rank == 1) return send(zeros({4}, at::kInt), {.dst = 0}), std::string();
    return thrown_by([] { recv(zeros({4}), {.src = 1}); });
  });
  two("rank 1 sends a list of two objects, rank 0 receives one", [](int rank) {
    std::vector<int> list(1);
    if (rank == 1) return send_object_list(std::vector<int>{1, 2}, {.dst = 0}), std::string();
    return thrown_by([&] { recv_object_list(list, {.src = 1}); });
  });
  testing::RankLatch missed(1);
  two("rank 1 does not come to monitored_barrier", [&](int rank) {
    if (rank == 1)
      return missed.wait(), thrown_by([] { monitored_barrier(); });  // also gets the error
    const auto text =
        thrown_by([] { monitored_barrier({.timeout = std::chrono::milliseconds(200)}); });
    missed.count_down();
    return text;
  });
  two("the ranks make different groups",
      [](int rank) { return thrown_by([&] { new_group({.ranks = std::vector<int>{rank}}); }); });
  two("the ranks divide a group differently", [](int rank) {
    return thrown_by([&] {
      split_group(nullptr, rank == 0 ? std::vector<std::vector<int>>{{0, 1}}
                                     : std::vector<std::vector<int>>{{0}, {1}});
    });
  });
  two("a call on a group that was destroyed", [](int) {
    const auto group = new_group();
    destroy_process_group(group);
    return thrown_by([&] { barrier({.group = group}); });
  });
  two("a group is destroyed twice", [](int) {
    const auto group = new_group();
    destroy_process_group(group);
    return thrown_by([&] { destroy_process_group(group); });
  });
  two("init_process_group is called twice", [](int) {
    return thrown_by([] {
      init_process_group({.world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
    });
  });
  two("shrink_group with this rank among those to be left out",
      [](int rank) { return thrown_by([&] { shrink_group({rank}); }); });
  rows.emplace_back("a call before init_process_group", thrown_by([] { barrier(); }));
  return rows;
}

std::string steady(const std::string& text) {
  // Durations vary between runs, and a table row is one line.
  return std::regex_replace(std::regex_replace(text, std::regex("\n ?"), "<br>"),
                            std::regex(R"(\b\d+(\.\d+)? ?(ns|us|ms|s|min)\b)"), "<time>");
}

constexpr const char* kHead = R"(# Error messages

`tools/errors_gallery` has written this page from jobs that it ran; do not edit it. Parts that
differ from run to run are shown as `<time>`, `<port>`, `<number>` (of a process), `<host>` and
`<folder>`.

## Wrong arguments

Rank 1 of three makes the wrong call and gets this error. The other ranks, whose calls were right,
get an error that says that rank 1's call was refused, and the group has failed. If all ranks make a
wrong call, the group stays usable.

| what was done | what the user reads |
| --- | --- |
)";

std::string page() {
  const testing::FailureGallery
      failures;  // first, because they fork, which a process with threads should not do
  std::ostringstream out;
  out << kHead;
  for (const auto& misuse : misuses())
    out << "| " << misuse.done << " | " << steady(play(misuse, "native").wrong) << " |\n";
  out << "\n## Disagreements, deadlines, messages\n\nThe errors that rank 0 of two gets.\n\n"
         "| what was done | what the user reads |\n| --- | --- |\n";
  for (const auto& [done, text] : disagreements())
    out << "| " << done << " | " << steady(text) << " |\n";
  out << "\n## Failures\n\nRanks are processes. The errors are those of the ranks that are left, "
         "or that join.\n\n| what happened | what the user reads |\n| --- | --- |\n";
  for (const auto& [happened, text] : failures.rows())
    out << "| " << happened << " | " << steady(text) << " |\n";
  return out.str();
}

/// docs/user/errors.md of the source tree: under MUSTER_SOURCE_DIR, or above this program.
std::filesystem::path page_path() {
  if (const char* root = std::getenv("MUSTER_SOURCE_DIR"))
    return std::filesystem::path(root) / "docs/user/errors.md";
  auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  while (folder != folder.parent_path() &&
         !std::filesystem::exists(folder / "include/muster/distributed.h"))
    folder = folder.parent_path();
  return folder / "docs/user/errors.md";
}

// docs/user/errors.md matches this build's messages.
TEST(Misuse, TheGalleryIsUpToDate) {
  NEEDS_ALL_WINGS();
  const auto now = page();
  if (std::getenv("MUSTER_WRITE_GALLERY") != nullptr) {
    std::ofstream(page_path()) << now;
    return;
  }
  std::stringstream kept;
  kept << std::ifstream(page_path()).rdbuf();
  EXPECT_EQ(kept.str(), now) << page_path() << " is of another build; run tools/errors_gallery";
}

}  // namespace
}  // namespace muster

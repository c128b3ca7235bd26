// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/responder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/store/factory.h"
#include "core/trace/analysis.h"
#include "core/trace/reader.h"
#include "testing/fuzz.h"
#include "testing/limits.h"
#include "testing/scratch_folder.h"

namespace muster::trace {
namespace {

using std::chrono::seconds;
constexpr int kRanks = 3;

/// Three ranks of one job, whose traces lie in two folders: 0 and 1 in one, 2 in the other, as on
/// two hosts. They share a TCP store.
class AskedJobs : public ::testing::Test {
 protected:
  AskedJobs() {
    const auto secret = Secret::given("the secret of this test");
    store::TcpStoreOptions served;
    served.host = "127.0.0.1";
    served.port = 0;
    served.is_server = true;
    served.secret = secret;
    server_ = *store::make_tcp_store(served);
    job_ = store::make_prefix_store("some job", server_);
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto place = folder_.file("host" + std::to_string(rank / 2));
      recorders_[rank] = *Recorder::create({"a job", rank, kRanks, 64, place, "job7"});
      group_ = recorders_[rank]->add_group("default", std::vector<int>{0, 1, 2}, rank);
      responders_[rank] = TraceResponder::start(recorders_[rank], job_, [rank](bool links) {
        RankReport report{.refusals = std::uint64_t{10} + static_cast<std::uint64_t>(rank)};
        if (links) report.links[(rank + 1) % kRanks] = figures_of(rank);
        return report;
      });
    }
  }
  static LinkFigures figures_of(int rank) {
    return {.round_trip = std::chrono::microseconds(100 + rank),
            .bytes_per_s = 1000,
            .sent = 7,
            .resent = 1};
  }
  void call(int rank, std::uint64_t sequence, bool ends) {
    const auto now = steady_clock().now();
    const std::int64_t shape[] = {4};
    const auto ticket = recorders_[rank]->begin(
        group_,
        {.name = "all_reduce", .sequence = sequence, .bytes = 16, .dtype = 0, .shape = shape}, now);
    if (ends) recorders_[rank]->end(ticket, now);
  }
  store::TcpStoreOptions client() const {
    store::TcpStoreOptions options;
    options.host = "127.0.0.1";
    options.port = server_->port();
    options.timeout = muster::testing::kMustHappen;
    return options;
  }
  Result<AskedJob> ask(Duration patience = muster::testing::kMustHappen, bool links = false) {
    auto options = client();
    options.secret = Secret::given("the secret of this test").observer();
    options.role = Handshake::Role::observer;
    const auto store = store::make_tcp_store(options);
    if (!store) return store.status();
    return ask_job(**store, {.records = 64, .patience = patience, .links = links});
  }

  testing::ScratchFolder folder_;
  std::shared_ptr<store::TcpStore> server_;
  std::shared_ptr<store::Store> job_;
  std::shared_ptr<Recorder> recorders_[kRanks];
  std::unique_ptr<TraceResponder> responders_[kRanks];
  std::uint16_t group_ = 0;
};

// spec: W1 the observers' key suffices to ask; ranks tell whom they have refused
TEST_F(AskedJobs, EveryRankTellsWhatItIsIn) {
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_NE(responders_[rank], nullptr);
    call(rank, 1, true);
    if (rank != 1) call(rank, 2, false);
  }
  const auto late = steady_clock().now() + muster::testing::kMustHappen;
  const auto is_short = [](const Result<AskedJob>& asked) {
    return asked && find_holdups(asked->job).front().usual;
  };
  while (is_short(ask()) && steady_clock().now() < late) std::this_thread::yield();
  for (int time = 0; time < 3; ++time) {
    const auto asked = ask();
    ASSERT_TRUE(asked.ok()) << asked.status().message();
    ASSERT_EQ(asked->job.ranks.size(), 3u);
    EXPECT_TRUE(asked->notes.empty());
    EXPECT_EQ(headline(asked->job, find_holdups(asked->job))
                  .find("rank 1 is behind: ranks 0 and 2 are in call 2 of group 'default'"),
              0u)
        << summary(asked->job);
    EXPECT_EQ(asked->job.ranks[2].job, "a job");
    EXPECT_EQ(asked->job.ranks[2].run_id, "job7");
    EXPECT_EQ(asked->job.ranks[2].life, Life::running);
    EXPECT_EQ(asked->job.ranks[2].records.size(), 2u);
    const std::map<int, std::uint64_t> refusals{{0, 10}, {1, 11}, {2, 12}};
    EXPECT_EQ(asked->refusals, refusals);
    EXPECT_TRUE(asked->links.empty()) << "no question was about them";
  }
  // Answers do not pile up: those that were read are gone.
  const auto keys = *server_->list_keys();
  EXPECT_EQ(keys, std::vector<std::string>{"some job/trace/job"});
}

// spec: X4.links every rank tells what was measured of its links, if that is asked for
TEST_F(AskedJobs, EveryRankTellsOfItsLinks) {
  for (int rank = 0; rank < kRanks; ++rank) call(rank, 1, true);
  const auto asked = ask(muster::testing::kMustHappen, /*links=*/true);
  ASSERT_TRUE(asked.ok()) << asked.status().message();
  ASSERT_EQ(asked->links.size(), 3u);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto found = asked->links.find({rank, (rank + 1) % kRanks});
    ASSERT_NE(found, asked->links.end());
    EXPECT_EQ(found->second.round_trip, figures_of(rank).round_trip);
    EXPECT_EQ(found->second.bytes_per_s, 1000u);
    EXPECT_EQ(found->second.sent, 7u);
    EXPECT_EQ(found->second.resent, 1u);
  }
}

TEST_F(AskedJobs, SeveralMayAskAtOnce) {
  for (int rank = 0; rank < kRanks; ++rank) call(rank, 1, true);
  constexpr int kAskers = 4, kTimes = 10;
  std::vector<std::thread> askers;
  std::atomic<int> whole{0};
  for (int asker = 0; asker < kAskers; ++asker) {
    askers.emplace_back([&] {
      for (int time = 0; time < kTimes; ++time) {
        const auto asked = ask();
        if (asked.ok() && asked->job.ranks.size() == 3 && asked->notes.empty()) ++whole;
      }
    });
  }
  for (auto& asker : askers) asker.join();
  EXPECT_EQ(whole, kAskers * kTimes);
}

TEST_F(AskedJobs, AWrongSecretIsRefused) {
  auto options = client();
  options.secret = Secret::given("the secret of another job");
  const auto store = store::make_tcp_store(options);
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), Code::refused);
}

TEST_F(AskedJobs, OfARankThatDoesNotAnswerAnotherOfItsHostTells) {
  call(1, 7, false);
  call(2, 7, false);
  responders_[1]->stop();
  responders_[2]->stop();
  ASSERT_TRUE(
      job_->set("trace/2", encode_trace(cut_to_latest(*read_trace(recorders_[2]->path())))).ok());
  const auto asked = ask(seconds(5));
  ASSERT_TRUE(asked.ok()) << asked.status().message();
  ASSERT_EQ(asked->job.ranks.size(), 3u);
  EXPECT_EQ(asked->job.ranks[1].records.back().sequence, 7u);
  EXPECT_EQ(asked->job.ranks[2].records.back().sequence, 7u);
  ASSERT_EQ(asked->notes.size(), 2u);
  EXPECT_NE(asked->notes[0].find("rank 1 does not answer; what is shown was read from its file"),
            std::string::npos)
      << asked->notes[0];
  EXPECT_NE(asked->notes[1].find("rank 2 does not answer, nor does any rank of its host"),
            std::string::npos)
      << asked->notes[1];
}

TEST_F(AskedJobs, WhereNobodyAnswersThatIsSaid) {
  responders_[2]->stop();
  const auto asked = ask(seconds(5));
  ASSERT_TRUE(asked.ok());
  ASSERT_EQ(asked->notes.size(), 1u);
  EXPECT_EQ(asked->notes[0], "rank 2 does not answer, and nothing else is known of it");
  for (auto& responder : responders_) responder->stop();
  const auto over = ask();
  ASSERT_FALSE(over.ok());
  EXPECT_NE(over.status().message().find("no job that can be asked runs on this store"),
            std::string::npos);
}

TEST_F(AskedJobs, RanksSpeakOnlyWhereOthersCanListen) {
  EXPECT_EQ(TraceResponder::start(recorders_[0], store::make_hash_store()), nullptr);
  EXPECT_EQ(TraceResponder::start(nullptr, job_), nullptr);
}

// Nonsense among the questions and answers neither ends a responder nor fools who asks.
TEST_F(AskedJobs, DamagedQuestionsAndAnswersAreLeftOut) {
  call(0, 1, true);
  testing::Fuzz fuzz(77);
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(job_->queue_push("trace/ask/0", "x" + fuzz.noise(80)).ok());
    const auto asked = ask();
    ASSERT_TRUE(asked.ok());
    ASSERT_EQ(asked->job.ranks.size(), 3u);
  }

  const auto whole = encode_trace(*read_trace(recorders_[0]->path()));
  ASSERT_TRUE(decode_trace(whole).has_value());
  for (std::size_t length = 0; length < whole.size(); ++length)
    ASSERT_FALSE(decode_trace(whole.substr(0, length)).has_value());
  for (testing::FuzzRun run(2000); run.goes_on();) {
    auto bytes = whole;
    bytes[fuzz.below(bytes.size())] = static_cast<char>(fuzz.word());
    const auto sent = decode_trace(bytes);
    if (!sent) continue;
    for (const auto& record : sent->trace.records)
      ASSERT_LT(record.group, sent->trace.groups.size());
  }
}

/// The traces in rank 0's answer to a question about `about`, and its bytes.
struct RawAnswer {
  std::uint32_t traces = 0;
  std::size_t bytes = 0;
};
RawAnswer ask_about(store::Store& job, const std::vector<int>& about) {
  ByteWriter question;
  question.put(kVersion).put_text("a-question").put(std::uint64_t{1'000'000});
  question.put(static_cast<std::uint32_t>(about.size()));
  for (const int rank : about) question.put(rank);
  EXPECT_TRUE(job.queue_push("trace/ask/0", question.take()).ok());
  const std::string key = "trace/answer/a-question/0";
  const auto answer = job.get(key, muster::testing::kMustHappen);
  EXPECT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_TRUE(job.delete_key(key).ok());
  ByteReader in(answer.ok() ? std::string_view(*answer) : std::string_view());
  static_cast<void>(in.get<std::uint64_t>());  // refusals
  return {in.get<std::uint32_t>(), answer.ok() ? answer->size() : 0};
}

// spec: W1 a question makes a rank read every trace once, and those of its job's ranks only
TEST_F(AskedJobs, RanksReadATraceOnceWhateverIsAsked) {
  call(0, 1, true);
  const auto beyond = *Recorder::create({"a job", 9, 10, 64, recorders_[0]->directory(), "job7"});
  EXPECT_EQ(ask_about(*job_, std::vector<int>(200, 0)).traces, 1u);
  EXPECT_EQ(ask_about(*job_, {1, 0, 1, 9, -1, 0}).traces, 2u);
}

// spec: W1 whatever is asked, an answer is of a few megabytes
TEST_F(AskedJobs, AnswersHaveABound) {
  constexpr std::uint32_t kEntries = 1 << 16;
  const auto place = folder_.file("wordy");
  std::vector<std::shared_ptr<Recorder>> wordy;
  for (int rank = 0; rank < 2; ++rank) {
    wordy.push_back(*Recorder::create({"a wordy job", rank, 2, kEntries, place, "job8"}));
    const auto group = wordy.back()->add_group("default", std::vector<int>{0, 1}, rank);
    const std::int64_t shape[] = {4, 4, 4, 4};
    const auto now = steady_clock().now();
    for (std::uint64_t call = 1; call <= kEntries; ++call)
      wordy.back()->end(
          wordy.back()->begin(
              group,
              {.name = "all_reduce", .sequence = call, .bytes = 16, .dtype = 0, .shape = shape},
              now),
          now);
  }
  const auto job = store::make_prefix_store("a wordy job", server_);
  const auto responder = TraceResponder::start(wordy[0], job);
  ASSERT_NE(responder, nullptr);
  const RawAnswer answer = ask_about(*job, {0, 1});
  EXPECT_EQ(answer.traces, 2u);
  EXPECT_LE(answer.bytes, std::size_t{5} << 20);
}

TEST(TraceBytes, CarryEverything) {
  RankTrace trace;
  trace.rank = 3;
  trace.world_size = 9;
  trace.life = Life::stopped;
  trace.host = "h";
  trace.path = "/p";
  trace.failure = "why";
  trace.failures = 2;
  trace.failure_at_ns = 70;
  trace.groups = {{"default", 9, 3, {0, 3, 8}, 5, 4}, {"[3]", 1, 0, {3}, 1, 1}};
  Record record;
  record.ticket = 9;
  record.sequence = 5;
  record.start_ns = 50;
  record.name = "all_reduce";
  record.dtype = "float32";
  record.shape = {4, 2};
  record.dimensions = 2;
  record.async = true;
  trace.records = {record, record};
  trace.records[0].group = 1;
  const auto sent = decode_trace(encode_trace(trace));
  ASSERT_TRUE(sent.has_value());
  EXPECT_EQ(summary({"", {sent->trace}, {}}), summary({"", {trace}, {}}));
  EXPECT_EQ(sent->trace.groups[0].members, (std::vector<int>{0, 3, 8}));
  EXPECT_EQ(sent->trace.records[1].shape, (std::vector<std::int64_t>{4, 2}));
  EXPECT_EQ(sent->trace.failure, "why");
  EXPECT_EQ(sent->trace.path, "/p");
  EXPECT_GT(sent->as_of_ns, 0);

  auto moved = trace;
  shift(moved, 10);
  EXPECT_EQ(moved.records[0].start_ns, 60);
  EXPECT_EQ(moved.records[0].end_ns, 0);
  EXPECT_EQ(moved.failure_at_ns, 80);
  EXPECT_EQ(cut_to(trace, 1).records.size(), 1u);
  EXPECT_EQ(cut_to_latest(trace).records.size(), 2u);
}

}  // namespace
}  // namespace muster::trace

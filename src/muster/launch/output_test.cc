#include "muster/launch/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

namespace muster::launch {
namespace {

std::string prefixed(const std::vector<std::string>& pieces) {
  LinePrefixer lines("[7] ");
  std::string out;
  for (const std::string& piece : pieces) lines.feed(piece, out);
  lines.finish(out);
  return out;
}

// spec: J3 output is prefixed with the rank, line by line
TEST(LinePrefixer, PrefixesLines) {
  EXPECT_EQ(prefixed({"one\ntwo\n"}), "[7] one\n[7] two\n");
  EXPECT_EQ(prefixed({"\n\n"}), "[7] \n[7] \n");
  EXPECT_EQ(prefixed({}), "");
}

// spec: J3 a line comes out whole however it arrives, and the last one without its newline too
TEST(LinePrefixer, AnyCutGivesTheSame) {
  const std::string text = "ab\r\ncd\ref\n\n\rgh";
  const std::string whole = prefixed({text});
  EXPECT_EQ(whole, "[7] ab\r\n[7] cd\r[7] ef\n[7] \n[7] \r[7] gh\n");
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(prefixed({text.substr(0, cut), text.substr(cut)}), whole) << cut;
  }
  std::vector<std::string> bytes;
  for (char byte : text) bytes.emplace_back(1, byte);
  EXPECT_EQ(prefixed(bytes), whole);
}

// spec: J3 an incomplete line is held back until it is complete
TEST(LinePrefixer, HoldsPartialLines) {
  LinePrefixer lines("> ");
  std::string out;
  lines.feed("par", out);
  EXPECT_EQ(out, "");
  lines.feed("tial\nnext", out);
  EXPECT_EQ(out, "> partial\n");
}

// spec: J3 a flood without newlines is bounded and nothing of it is lost
TEST(LinePrefixer, CutsEndlessLines) {
  LinePrefixer lines("> ");
  std::string out;
  const std::string piece(100000, 'x');
  for (int i = 0; i < 25; ++i) lines.feed(piece, out);
  lines.finish(out);
  EXPECT_EQ(std::count(out.begin(), out.end(), 'x'), 2500000);
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 3);
}

// spec: J3 the tail of a worker's standard error: its last 20 lines, 4 KiB at most
TEST(Tail, KeepsTheEnd) {
  Tail tail;
  EXPECT_EQ(tail.text(), "");
  std::string expected;
  for (int i = 0; i < 1000; ++i) {
    tail.feed("line " + std::to_string(i) + "\n");
    if (i >= 980) expected += (expected.empty() ? "line " : "\nline ") + std::to_string(i);
  }
  EXPECT_EQ(tail.text(), expected);
  tail.feed(std::string(100000, 'y'));
  EXPECT_EQ(tail.text(), std::string(Tail::kBytes, 'y'));
  Tail last;
  last.feed("one\ntwo");
  EXPECT_EQ(last.text(), "one\ntwo");
}

// spec: J3 a console that nobody reads never blocks the launcher, and loses nothing once somebody
// does
TEST(ConsoleSink, NeverBlocks) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ConsoleSink sink(ends[1]);
  const std::string text(std::size_t{1} << 20, 'z');
  sink.queue().append(text);
  sink.pump();
  EXPECT_FALSE(sink.empty());
  std::string got;
  char buffer[65536];
  while (got.size() < text.size()) {
    const ssize_t count = ::read(ends[0], buffer, sizeof buffer);
    ASSERT_GT(count, 0);
    got.append(buffer, static_cast<std::size_t>(count));
    sink.pump();
  }
  EXPECT_EQ(got, text);
  EXPECT_TRUE(sink.empty());
  ::signal(SIGPIPE, SIG_IGN);
  ::close(ends[0]);
  sink.queue().append("nobody");
  sink.pump();
  EXPECT_TRUE(sink.empty());
  EXPECT_TRUE(sink.broken());
  ::close(ends[1]);
}

// spec: L13 what cannot be written is told, once, and the next output is tried again
TEST(ConsoleSink, TellsOfAFullDisk) {
  const Descriptor full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(full);
  ConsoleSink sink(full.get());
  ::testing::internal::CaptureStderr();
  for (int line = 0; line < 3; ++line) {
    sink.queue().append("a line\n");
    sink.pump();
    EXPECT_TRUE(sink.empty());
    EXPECT_FALSE(sink.broken());
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string words = "cannot be written to standard output: no space left on device";
  EXPECT_NE(said.find(words), std::string::npos) << said;
  EXPECT_EQ(said.find(words), said.rfind(words)) << said;
}

// spec: L2 --log-line-prefix-template: names are replaced, others stay
TEST(ExpandNames, NamesThatAreKnown) {
  const std::map<std::string, std::string> names = {{"rank", "3"}, {"hostname", "node${rank}"}};
  EXPECT_EQ(expand_names("${hostname}:${rank}: ", names), "node${rank}:3: ");
  EXPECT_EQ(expand_names("${other} $rank ${", names), "${other} $rank ${");
  EXPECT_EQ(expand_names("", names), "");
}

}  // namespace
}  // namespace muster::launch

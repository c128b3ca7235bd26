// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>

#include "jobs/launch/workers/worker_output.h"

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

// spec: L2 --log-line-prefix-template: names are replaced, others stay
TEST(ExpandNames, NamesThatAreKnown) {
  const std::map<std::string, std::string> names = {{"rank", "3"}, {"hostname", "node${rank}"}};
  EXPECT_EQ(expand_names("${hostname}:${rank}: ", names), "node${rank}:3: ");
  EXPECT_EQ(expand_names("${other} $rank ${", names), "${other} $rank ${");
  EXPECT_EQ(expand_names("", names), "");
}

}  // namespace

}  // namespace muster::launch

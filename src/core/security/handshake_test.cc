// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>

#include "core/security/handshake.h"

namespace muster {
namespace {

using Side = Handshake::Side;

Handshake::Hello hello_of(std::int32_t rank) {
  return {.role = Handshake::Role::link,
          .rank = rank,
          .world_size = 8,
          .job = "job",
          .build = 1,
          .note = 7};
}
const Secret kJobSecret = Secret::given("the secret of the handshake tests");

/// Carries bytes both ways until neither side has anything to say, in pieces of at most `piece`
/// bytes.
void talk(Handshake& connector, Handshake& acceptor, std::size_t piece = 1000) {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto [from, to] : {std::pair(&connector, &acceptor), std::pair(&acceptor, &connector)}) {
      const std::string bytes = from->take_output();
      for (std::size_t at = 0; at < bytes.size(); at += piece) {
        const auto part = as_bytes(std::string_view(bytes).substr(at, piece));
        const std::size_t eaten = to->feed(part);
        EXPECT_TRUE(to->failed() || eaten == part.size());
        moved = true;
      }
    }
  }
}

TEST(Handshake, BothSidesMeetWhateverThePieces) {
  for (const std::size_t piece : {1u, 2u, 31u, 127u, 128u, 129u, 1000u}) {
    Handshake connector(Side::connector, hello_of(3), kJobSecret),
        acceptor(Side::acceptor, hello_of(5), kJobSecret);
    talk(connector, acceptor, piece);
    ASSERT_TRUE(connector.done()) << connector.failure().message();
    ASSERT_TRUE(acceptor.done()) << acceptor.failure().message();
    EXPECT_EQ(connector.peer().rank, 5);
    EXPECT_EQ(acceptor.peer().rank, 3);
    EXPECT_EQ(acceptor.peer().world_size, 8);
    EXPECT_EQ(acceptor.peer().note, 7u);
    EXPECT_EQ(acceptor.peer().build, 1u);
  }
}

TEST(Handshake, TellsWhichOfABundleOfConnectionsItIs) {
  Handshake::Hello hello = hello_of(3);
  hello.strand = {.number = 2, .of = 5, .bundle = 77};
  Handshake connector(Side::connector, hello, kJobSecret),
      acceptor(Side::acceptor, hello_of(5), kJobSecret);
  talk(connector, acceptor);
  ASSERT_TRUE(acceptor.done()) << acceptor.failure().message();
  EXPECT_EQ(acceptor.peer().strand, hello.strand);
  EXPECT_EQ(connector.peer().strand, Handshake::Strand());
}

TEST(Handshake, WhatFollowsIsLeftAlone) {
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, hello_of(5), kJobSecret);
  acceptor.feed(as_bytes(connector.take_output()));
  connector.feed(as_bytes(acceptor.take_output()));
  const std::string proof = connector.take_output();
  EXPECT_EQ(acceptor.feed(as_bytes(proof + "a request")), proof.size());
  ASSERT_TRUE(acceptor.done());
  const std::string verdict = acceptor.take_output();
  EXPECT_EQ(verdict.size(), 33u);
  EXPECT_EQ(connector.feed(as_bytes(verdict + "a reply")), verdict.size());
  EXPECT_TRUE(connector.done());
  EXPECT_EQ(connector.feed(as_bytes("more")), 0u);
}

TEST(Handshake, WrongSecretsAreRefusedAlways) {
  for (int i = 0; i < 10000; ++i) {
    Handshake connector(Side::connector, hello_of(3), Secret::given("guess " + std::to_string(i))),
        acceptor(Side::acceptor, hello_of(5), kJobSecret);
    talk(connector, acceptor);
    ASSERT_TRUE(acceptor.failed());
    ASSERT_TRUE(connector.failed());
    ASSERT_EQ(acceptor.failure().code(), Code::refused);
    ASSERT_NE(connector.failure().message().find("MUSTER_SECRET"), std::string::npos);
  }
}

TEST(Handshake, TheAcceptorMakesNothingWithTheSecretBeforeTheConnectorHasProvedIt) {
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, hello_of(5), kJobSecret);
  acceptor.feed(as_bytes(connector.take_output()));
  EXPECT_EQ(acceptor.take_output().size(), 128u) << "the greeting and nothing more";
  acceptor.feed(as_bytes(std::string(32, 'x')));
  EXPECT_EQ(acceptor.take_output().size(), 1u) << "the verdict and nothing more";
}

TEST(Handshake, AnImpostorWhoAcceptsWithoutProofIsNoticed) {
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, hello_of(5), kJobSecret);
  acceptor.feed(as_bytes(connector.take_output()));
  connector.feed(as_bytes(acceptor.take_output()));
  connector.take_output();
  connector.feed(as_bytes(std::string(33, '\0')));
  ASSERT_TRUE(connector.failed());
  EXPECT_NE(connector.failure().message().find("impostor"), std::string::npos);
}

// A peer that reflects a greeting as its own must not get a proof that it can reflect too.
TEST(Handshake, AReflectionProvesNothing) {
  Handshake connector(Side::connector, hello_of(3), kJobSecret);
  connector.feed(as_bytes(connector.take_output()));
  const std::string proof = connector.take_output();
  ASSERT_EQ(proof.size(), 32u);
  connector.feed(as_bytes(std::string(1, '\0') + proof));
  EXPECT_TRUE(connector.failed());
}

TEST(Handshake, ARecordingProvesNothingTheNextTime) {
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, hello_of(5), kJobSecret);
  const std::string greeting = connector.take_output();
  acceptor.feed(as_bytes(greeting));
  connector.feed(as_bytes(acceptor.take_output()));
  const std::string proof = connector.take_output();
  Handshake again(Side::acceptor, hello_of(5), kJobSecret);
  again.feed(as_bytes(greeting + proof));
  EXPECT_TRUE(again.failed());
}

struct Differing {
  const char* what;
  Handshake::Hello theirs;
  Secret secret;
  std::vector<std::string> named;  // in both sides' messages
};

TEST(Handshake, DifferencesAreToldApartAndNamed) {
  auto role = hello_of(5), job = hello_of(5), build = hello_of(5);
  role.role = Handshake::Role::store;
  job.job = "another";
  build.build = 0xabcdef;
  ::setenv("MUSTER_INSECURE", "1", 1);
  ::unsetenv("MUSTER_SECRET");
  const auto open = Secret::from_environment();
  ::unsetenv("MUSTER_INSECURE");
  const std::vector<Differing> all = {
      {"role", role, kJobSecret, {"link", "store"}},
      {"job", job, kJobSecret, {"job with hash"}},
      {"build", build, kJobSecret, {"0000000000000001", "0000000000abcdef"}},
      {"kind", hello_of(5), *open, {"MUSTER_SECRET", "MUSTER_INSECURE=1"}}};
  for (const Differing& each : all) {
    Handshake connector(Side::connector, hello_of(3), kJobSecret),
        acceptor(Side::acceptor, each.theirs, each.secret);
    talk(connector, acceptor);
    ASSERT_TRUE(connector.failed()) << each.what;
    ASSERT_TRUE(acceptor.failed()) << each.what;
    EXPECT_EQ(connector.failure().code(), Code::refused);
    for (const auto& text : each.named) {
      EXPECT_NE(connector.failure().message().find(text), std::string::npos)
          << connector.failure().message();
      EXPECT_NE(acceptor.failure().message().find(text), std::string::npos)
          << acceptor.failure().message();
    }
    EXPECT_NE(connector.failure().message().find("rank 5"), std::string::npos)
        << connector.failure().message();
    EXPECT_NE(acceptor.failure().message().find("rank 3"), std::string::npos)
        << acceptor.failure().message();
  }
}

TEST(Handshake, JobsAreNamedByBothHashes) {
  auto other = hello_of(5);
  other.job = "another";
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, other, kJobSecret);
  talk(connector, acceptor);
  const std::string& mine = connector.failure().message();
  const std::string& theirs = acceptor.failure().message();
  const auto first_hash = [](const std::string& text) {
    return text.substr(text.find("hash ") + 5, 32);
  };
  EXPECT_NE(first_hash(mine), first_hash(theirs));
  EXPECT_NE(mine.find(first_hash(theirs)), std::string::npos);
  EXPECT_NE(theirs.find(first_hash(mine)), std::string::npos);
}

TEST(Handshake, ABuildOfZeroIsNotCompared) {
  auto any = hello_of(5);
  any.build = 0;
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, any, kJobSecret);
  talk(connector, acceptor);
  EXPECT_TRUE(connector.done());
}

TEST(Handshake, AnotherProtocolIsNamed) {
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, hello_of(5), kJobSecret);
  std::string greeting = connector.take_output();
  greeting[8] = 99;
  acceptor.feed(as_bytes(greeting));
  ASSERT_TRUE(acceptor.failed());
  EXPECT_NE(acceptor.failure().message().find("protocol 99"), std::string::npos)
      << acceptor.failure().message();
  EXPECT_NE(acceptor.failure().message().find("protocol " + std::to_string(kProtocolVersion)),
            std::string::npos);
}

TEST(Handshake, UnwelcomeIsKnownAndSaysSo) {
  Handshake connector(Side::connector, hello_of(3), kJobSecret),
      acceptor(Side::acceptor, hello_of(5), kJobSecret);
  acceptor.set_unwelcome();
  talk(connector, acceptor);
  ASSERT_TRUE(acceptor.failed());
  ASSERT_TRUE(connector.failed());
  EXPECT_NE(connector.failure().message().find("does not want"), std::string::npos)
      << connector.failure().message();
}

TEST(Handshake, ChangingAnyByteOnTheWayIsNoticed) {
  // Any byte that a man in the middle changes in either greeting breaks the proofs, also one that
  // means nothing.
  for (std::size_t at = 0; at < 128; ++at) {
    for (const bool first : {true, false}) {
      Handshake connector(Side::connector, hello_of(3), kJobSecret),
          acceptor(Side::acceptor, hello_of(5), kJobSecret);
      std::string greeting = connector.take_output();
      if (first) greeting[at] = static_cast<char>(greeting[at] ^ 1);
      acceptor.feed(as_bytes(greeting));
      std::string answer = acceptor.take_output();
      if (!first && at < answer.size()) answer[at] = static_cast<char>(answer[at] ^ 1);
      connector.feed(as_bytes(answer));
      talk(connector, acceptor);
      EXPECT_FALSE(acceptor.done()) << at;
      EXPECT_FALSE(connector.done()) << at;
    }
  }
}

TEST(Handshake, CutAtEveryByteItSimplyWaits) {
  Handshake model(Side::connector, hello_of(3), kJobSecret);
  const std::string greeting = model.take_output();
  for (std::size_t cut = 0; cut < greeting.size(); ++cut) {
    Handshake acceptor(Side::acceptor, hello_of(5), kJobSecret);
    EXPECT_EQ(acceptor.feed(as_bytes(greeting.substr(0, cut))), cut);
    EXPECT_FALSE(acceptor.done());
    EXPECT_FALSE(acceptor.failed());
    EXPECT_EQ(acceptor.take_output(), "");
  }
}

TEST(Handshake, RandomBytesAreRefusedByTheFirstWrongOne) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 10000; ++i) {
    Handshake acceptor(Side::acceptor, hello_of(5), kJobSecret);
    std::string bytes(1 + random() % 200, '\0');
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<char>(random()); });
    if (bytes[0] == 'm') continue;
    acceptor.feed(as_bytes(bytes));
    ASSERT_TRUE(acceptor.failed());
    ASSERT_EQ(acceptor.take_output(), "") << "not a word to somebody who does not even greet";
    Handshake connector(Side::connector, hello_of(5), kJobSecret);
    connector.take_output();
    connector.feed(as_bytes(bytes));
    ASSERT_TRUE(connector.failed());
  }
}

TEST(Handshake, UnknownVerdictsAreRefusals) {
  for (int verdict = 1; verdict < 256; ++verdict) {
    Handshake connector(Side::connector, hello_of(3), kJobSecret),
        acceptor(Side::acceptor, hello_of(5), kJobSecret);
    acceptor.feed(as_bytes(connector.take_output()));
    connector.feed(as_bytes(acceptor.take_output()));
    connector.feed(as_bytes(std::string(1, static_cast<char>(verdict))));
    EXPECT_TRUE(connector.failed());
    EXPECT_FALSE(connector.failure().message().empty());
  }
}

using Payloads = Handshake::Payloads;

// spec: W1.encrypted everything is encrypted unless it is said; there is no word for no encryption
TEST(TlsSetting, OnlyPayloadsMayBeLeftPlain) {
  ::unsetenv("MUSTER_TLS");
  EXPECT_EQ(payloads_from_environment().value(), Payloads::encrypted);
  for (const auto& [text, payloads] :
       {std::pair("full", Payloads::encrypted), std::pair("control-plain", Payloads::plain)}) {
    ::setenv("MUSTER_TLS", text, 1);
    EXPECT_EQ(payloads_from_environment().value(), payloads) << text;
    EXPECT_EQ(describe(payloads).find(text) != std::string::npos, payloads != Payloads::encrypted);
  }
  for (const char* text : {"plain", "off", "0", "none", "control", "CONTROL-PLAIN"}) {
    ::setenv("MUSTER_TLS", text, 1);
    const Status refused = payloads_from_environment().status();
    EXPECT_EQ(refused.code(), Code::invalid_argument) << text;
    EXPECT_NE(refused.message().find("MUSTER_TLS is \"" + std::string(text)), std::string::npos);
  }
  ::unsetenv("MUSTER_TLS");
}

}  // namespace
}  // namespace muster

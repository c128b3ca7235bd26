#include "core/security/handshake.h"

#include <algorithm>
#include <cstring>

#include "core/security/greeting.h"

namespace muster {
namespace {

constexpr std::size_t kProofBytes = sizeof(Secret::Proof);

}  // namespace

Handshake::Handshake(Side side, const Hello& hello, const Secret& secret)
    : side_(side), secret_(secret), also_(hello.also), mine_(greeting_of(hello, secret.kind())) {
  if (side == Side::connector) output_.append(as_text(mine_));
}

std::string Handshake::take_output() { return std::exchange(output_, {}); }

std::size_t Handshake::feed(ConstBytes input) {
  std::size_t eaten = 0;
  while (eaten < input.size() && !done() && !failed()) {
    const std::size_t n = std::min(need_ - have_, input.size() - eaten);
    std::memcpy(input_.data() + have_, input.data() + eaten, n);
    have_ += n;
    eaten += n;
    // A stranger is recognised by its first wrong byte, not only once it has sent a whole greeting.
    if (state_ == State::greeting && !may_be_greeting(input_, have_)) {
      fail(Verdict::bad_magic,
           "what came is not a muster greeting; something else uses this port, or the address is "
           "wrong");
      break;
    }
    if (have_ < need_) break;
    switch (state_) {
      case State::greeting: eat_greeting(); break;
      case State::proof: eat_proof(); break;
      case State::verdict: eat_verdict(); break;
      case State::done:
      case State::failed: break;
    }
  }
  return eaten;
}

void Handshake::eat_greeting() {
  theirs_ = input_;
  have_ = 0;
  peer_ = peer_of(theirs_);
  // The acceptor greets even where it refuses, so that the other side can say what differs; a
  // greeting gives nothing away.
  if (side_ == Side::acceptor) {
    take_role(mine_, theirs_, also_);
    output_.append(as_text(mine_));
  }
  if (auto found = difference(mine_, theirs_); found.verdict != Verdict::accepted)
    return fail(found.verdict, std::move(found.message));
  if (side_ == Side::acceptor) {
    state_ = State::proof;
    need_ = kProofBytes;
  } else {
    output_.append(as_text(proof_of(Side::connector)));
    state_ = State::verdict;
    need_ = 1;
  }
}

void Handshake::eat_proof() {
  have_ = 0;
  if (!equal_in_constant_time(ConstBytes(input_).first(kProofBytes), proof_of(Side::connector))) {
    return fail(Verdict::bad_proof,
                whom(peer_.rank) +
                    " did not prove this job's secret; set the same MUSTER_SECRET on all ranks "
                    "(without it all ranks must run on one host as one user)");
  }
  if (unwelcome_)
    return fail(Verdict::unwelcome,
                "this side does not want the connection of " + whom(peer_.rank) + " now");
  output_.push_back(static_cast<char>(Verdict::accepted));
  output_.append(as_text(proof_of(Side::acceptor)));
  state_ = State::done;
}

void Handshake::eat_verdict() {
  const auto verdict = static_cast<Verdict>(input_[0]);
  if (verdict != Verdict::accepted) return fail(verdict, refusal_text(verdict));
  if (need_ == 1) {
    need_ = 1 + kProofBytes;
    return;
  }
  if (!equal_in_constant_time(ConstBytes(input_).subspan(1, kProofBytes),
                              proof_of(Side::acceptor))) {
    return fail(Verdict::bad_proof, whom(peer_.rank) +
                                        " accepted this side but did not prove that it holds the "
                                        "job's secret itself; an impostor may listen there");
  }
  state_ = State::done;
}

void Handshake::fail(Verdict verdict, std::string message) {
  // Who did not even greet gets no answer at all.
  if (side_ == Side::acceptor && verdict != Verdict::bad_magic)
    output_.push_back(static_cast<char>(verdict));
  state_ = State::failed;
  verdict_ = verdict;
  failure_ = Status(Code::refused, std::move(message),
                    peer_.rank >= 0 ? std::vector<int>{peer_.rank} : std::vector<int>{});
}

Secret::Proof Handshake::proof_of(Side side) const {
  const bool connects = side_ == Side::connector;
  std::string message(side == Side::connector ? "muster proof of the connector"
                                              : "muster proof of the acceptor");
  message.append(as_text(connects ? mine_ : theirs_));
  message.append(as_text(connects ? theirs_ : mine_));
  return secret_of(secret_, mine_).prove(as_bytes(message));
}

}  // namespace muster

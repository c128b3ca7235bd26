// SPDX-License-Identifier: BSD-3-Clause
/// Plays a collective over links message by message, as a check of what the cost model predicts.
#pragma once

#include "lab/model/cost.h"

namespace muster::collective::plan {

/// Seconds, as `predict` counts them, for the same machine. Every message of every rank is an
/// event: it takes `overhead` of its sender's and of its receiver's time, and waits until its
/// host's network, in either direction, is free. So ranks that are ahead do not wait for others,
/// which the model takes for equally fast. The first round is played; each later one takes as long
/// as the busiest rank or network had to do in it. For some thousand ranks: the events are about
/// three times the messages. Deterministic.
double play(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew);

}  // namespace muster::collective::plan

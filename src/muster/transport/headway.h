/// A thread that waits by looking, and gets on with what it waits for, shall go on looking.
#pragma once

namespace muster::transport {

/// Says that what this thread waits for in `Fabric::wait` has got on, if not to its end: a call of
/// the group it waits in. It is not idle then, and does not sleep before it has been again for as
/// long as that takes. Not for a thread that only looks after others' work: it would take the cores
/// of those who compute.
void note_headway();

/// Whether that has been said since this thread last asked.
bool take_headway();

}  // namespace muster::transport

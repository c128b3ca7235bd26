/// A thread that has just woken others should not stand in their way.
#pragma once

namespace muster::transport {

/// Whether this thread has woken a mailbox's sleeper since it last took the answer. Who was asleep
/// may have been put on this thread's core, behind it: then it is better to give the core away at
/// once than to wait there for what the other is to do.
bool take_woken();

}  // namespace muster::transport

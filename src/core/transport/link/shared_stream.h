/// Byte streams between two local ranks, over the rings of a host region.
#pragma once

#include <cstdint>
#include <memory>

#include "core/shm/host_region.h"
#include "core/transport/byte_stream.h"

namespace muster::transport {

/// This rank's side of the pair of rings shared with another local rank, of a region that
/// open_region made. Both sides may be opened at any time; an end is final. Opening rings the
/// peer's doorbell and wakes its mailbox.
std::unique_ptr<ByteStream> open_shared_stream(shm::HostRegion& region, int peer_local_rank);
/// Grows with every stream that a peer opens towards this rank: one load tells whether to ask
/// `shared_stream_awaits`.
std::uint32_t shared_stream_doorbell(shm::HostRegion& region);
/// Whether the peer has opened its side (whether or not this rank has).
bool shared_stream_awaits(shm::HostRegion& region, int peer_local_rank);

}  // namespace muster::transport

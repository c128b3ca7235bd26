/// A group's channel alone: for communicators whose calls are carried by something else than
/// muster's engine, such as MPI.
#pragma once

#include <memory>
#include <vector>

#include "core/collective/communicator.h"
#include "core/transport/channel/channel.h"
#include "core/transport/fabric.h"

namespace muster::collective {

/// As `Communicator::create`, but returns only the channel that the members have agreed on.
/// `use_region` and `tuning` of the options do not matter.
Result<std::shared_ptr<transport::Channel>> create_channel(
    const std::shared_ptr<transport::Fabric>& fabric, std::vector<int> members,
    CommunicatorOptions options);

}  // namespace muster::collective

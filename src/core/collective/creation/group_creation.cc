// SPDX-License-Identifier: BSD-3-Clause
// Group creation: by an agreement of the members, from a piggybacked proposal, or by splitting an
// existing group; groups of one are local.
#include "core/collective/creation/group_creation.h"

#include <algorithm>
#include <optional>

#include "core/collective/communicator.h"
#include "core/collective/op.h"
#include "core/collective/region_group.h"
#include "core/collective/select/tuning.h"
#include "core/wait/topology.h"

namespace muster::collective {
namespace {

Status check_members(const transport::Fabric& fabric, const std::vector<int>& members) {
  if (std::find(members.begin(), members.end(), fabric.rank()) == members.end()) {
    return Status(Code::invalid_argument,
                  "rank " + std::to_string(fabric.rank()) +
                      " is not among the members of the group that it makes");
  }
  std::vector<int> sorted = members;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] < 0 || sorted[i] >= fabric.world_size()) {
      return Status(Code::invalid_argument, "a group's members are ranks from 0 to " +
                                                std::to_string(fabric.world_size() - 1) + "; " +
                                                std::to_string(sorted[i]) + " is none");
    }
    if (i > 0 && sorted[i] == sorted[i - 1])
      return Status(Code::invalid_argument,
                    "rank " + std::to_string(sorted[i]) + " is named twice in one group");
  }
  return {};
}

// For a group of one, which needs no agreement.
Result<Agreement> open_single_rank(transport::Fabric& fabric, const std::vector<int>& members) {
  auto channel = fabric.open(fabric.next_channel_id(), members);
  if (!channel.ok()) return channel.status();
  return Agreement{std::move(*channel), {kNoSegment, Selection(Medium::network, 1).bounds()}};
}

// The descriptor that the first member sends to all others. If the region is full, the group runs
// over links, on every member.
Result<GroupDescriptor> describe_group(transport::Fabric& fabric, const Tuning* given,
                                       std::span<const int> members, bool use_region) {
  Result<Tuning> tuning = given != nullptr ? *given : tuning_of_environment();
  if (!tuning.ok()) return tuning.status();
  GroupDescriptor descriptor{kNoSegment, {}};
  const int size = static_cast<int>(members.size());
  if (use_region) {
    auto segment = fabric.region()->claim(RegionGroup::segment_bytes(size));
    if (segment.ok()) descriptor.segment = *segment;
  }
  const Medium medium = descriptor.segment == kNoSegment ? Medium::network : Medium::shared_memory;
  descriptor.bounds = select(*tuning, medium, size, placement_of(fabric, members)).bounds();
  return descriptor;
}

// For a group without a tuning.
Selection::Bounds bounds_of(const transport::Fabric& fabric, const GroupProposal& proposal,
                            std::span<const int> members) {
  const Medium medium = proposal.segment == kNoSegment ? Medium::network : Medium::shared_memory;
  return Selection(medium, static_cast<int>(members.size()), placement_of(fabric, members),
                   default_tunables())
      .bounds();
}

void release_segment(transport::Fabric& fabric, const GroupProposal& proposal) {
  if (proposal.segment != kNoSegment && fabric.region() != nullptr)
    fabric.region()->release(proposal.segment);
}

std::string creation_text(const CommunicatorOptions& options) {
  return "making " +
         (options.name.empty() ? std::string("a group") : "group '" + options.name + "'");
}

// One member's contribution to a split.
struct SplitNote {
  std::uint64_t id = 0;             // from the first member of a part: its channel; or kGivenUp
  GroupDescriptor descriptor = {};  // from the others its strands alone
};
constexpr std::uint64_t kFailed = ~std::uint64_t{0};

class Split {
 public:
  Split(Communicator& parent, const std::vector<std::vector<int>>& parts, TimePoint deadline)
      : parent_(parent), fabric_(parent.channel().fabric()), parts_(parts), deadline_(deadline) {}

  Status check() const {
    std::vector<bool> seen(static_cast<std::size_t>(parent_.size()));
    for (const auto& part : parts_) {
      if (part.empty())
        return Status(Code::invalid_argument,
                      "one of the parts that a group is divided into is empty");
      for (const int position : part) {
        if (position < 0 || position >= parent_.size())
          return Status(Code::invalid_argument, "a group of " + std::to_string(parent_.size()) +
                                                    " has no rank " + std::to_string(position));
        if (seen[static_cast<std::size_t>(position)])
          return Status(Code::invalid_argument, "rank " + std::to_string(position) +
                                                    " is named twice in the parts of a group");
        seen[static_cast<std::size_t>(position)] = true;
      }
    }
    return {};
  }

  Result<std::optional<Agreement>> agree(bool use_region, const Tuning* tuning) {
    const auto part = std::find_if(parts_.begin(), parts_.end(), [this](const std::vector<int>& p) {
      return std::find(p.begin(), p.end(), parent_.rank()) != p.end();
    });
    std::vector<int> members;
    if (part != parts_.end()) {
      for (const int position : *part)
        members.push_back(parent_.members()[static_cast<std::size_t>(position)]);
    }
    Result<GroupDescriptor> mine = GroupDescriptor{kNoSegment, {}};
    SplitNote note;
    if (!members.empty() && members.front() == fabric_.rank()) {
      mine =
          describe_group(fabric_, tuning, members, use_region && share_a_region(fabric_, members));
      note = mine.ok() ? SplitNote{fabric_.next_channel_id(), *mine} : SplitNote{kFailed, {}};
    }
    const LinkReport links = report_links(fabric_, members);
    note.descriptor.strands = links.strands;
    if (Status heard = gather(note, notes_); !heard) return heard;
    if (const int failed_rank = failed_member(); failed_rank >= 0) {
      if (mine.ok() && mine->segment != kNoSegment) fabric_.region()->release(mine->segment);
      if (!mine.ok()) return mine.status();
      return Status(Code::aborted, "rank " + std::to_string(failed_rank) +
                                       " cancelled it; see the error on that rank");
    }
    static const std::vector<int> kNone;
    const auto& positions = members.empty() ? kNone : *part;
    GroupDescriptor descriptor;
    if (!members.empty())
      descriptor = notes_[static_cast<std::size_t>(positions.front())].descriptor;
    if (Status settled = settle_links(positions, links, descriptor); !settled) return settled;
    if (members.empty()) return std::optional<Agreement>();
    const std::uint64_t id = notes_[static_cast<std::size_t>(positions.front())].id;
    auto channel = fabric_.open(static_cast<std::uint32_t>(id), members);
    if (!channel.ok()) return channel.status();
    return std::optional<Agreement>(Agreement{std::move(*channel), descriptor});
  }

 private:
  // The job rank of a member that cannot continue, or -1.
  int failed_member() const {
    const auto found = std::find_if(notes_.begin(), notes_.end(),
                                    [](const SplitNote& note) { return note.id == kFailed; });
    return found == notes_.end()
               ? -1
               : parent_.members()[static_cast<std::size_t>(found - notes_.begin())];
  }

  // Sets what follows from the members' links, in the part of this member (none if `part` is
  // empty). Over a long way it takes two more rounds, of all members of the parent: the first
  // member of a part computes its order.
  Status settle_links(const std::vector<int>& part, const LinkReport& mine,
                      GroupDescriptor& descriptor) {
    if (std::ranges::all_of(notes_, [](const SplitNote& n) { return n.descriptor.strands <= 1; }))
      return {};
    std::vector<LinkReport> all;
    if (Status heard = gather(mine, all); !heard) return heard;
    std::vector<LinkReport> reports;
    for (const int position : part) reports.push_back(all[static_cast<std::size_t>(position)]);
    MemberOrder order{};
    if (!part.empty() && part.front() == parent_.rank()) order = order_by_rates(reports);
    std::vector<MemberOrder> orders;
    if (Status heard = gather(order, orders); !heard) return heard;
    if (part.empty()) return {};
    descriptor.strands = most_strands(reports);
    descriptor.order = orders[static_cast<std::size_t>(part.front())];
    return {};
  }

  // Each member of the parent gives a note.
  template <class Note>
  Status gather(const Note& mine, std::vector<Note>& all) {
    static_assert(sizeof(Note) % sizeof(std::int64_t) == 0);
    all.assign(static_cast<std::size_t>(parent_.size()), {});
    Args args;
    args.op = Op::all_gather;
    args.dtype = DType::int64;
    args.inputs = {std::as_bytes(std::span(&mine, 1))};
    for (auto& note : all) args.outputs.push_back(std::as_writable_bytes(std::span(&note, 1)));
    return parent_.run(args, deadline_);
  }

  Communicator& parent_;
  transport::Fabric& fabric_;
  const std::vector<std::vector<int>>& parts_;
  const TimePoint deadline_;
  std::vector<SplitNote> notes_;
};

}  // namespace

GroupPlacement placement_of(const transport::Fabric& fabric, std::span<const int> members,
                            const GroupDescriptor& agreed) {
  const auto hosts = fabric.hosts();
  std::vector<int> theirs;
  for (const int member : members) theirs.push_back(hosts[static_cast<std::size_t>(member)]);
  GroupPlacement placement{.first_ranks = first_ranks_of_hosts(theirs),
                           .strands = agreed.strands,
                           .order = places_of(agreed.order, static_cast<int>(members.size()))};
  if (placement.first_ranks.size() == 1)
    placement.per_core = ranks_per_core(members.size(), fabric.cores());
  return placement;
}

bool share_a_region(transport::Fabric& fabric, std::span<const int> members) {
  if (members.size() < 2 || fabric.region() == nullptr) return false;
  const auto local = fabric.region()->ranks();
  return std::ranges::all_of(
      members, [&](int member) { return std::ranges::find(local, member) != local.end(); });
}

std::uint64_t FabricState::next_use(std::vector<int> members, const std::string& name) {
  std::sort(members.begin(), members.end());
  const std::lock_guard guard(lock);
  return uses[{std::move(members), name}]++;
}

std::shared_ptr<FabricState> fabric_state_of(transport::Fabric& fabric) {
  return std::static_pointer_cast<FabricState>(
      fabric.companion([] { return std::make_shared<FabricState>(); }));
}

namespace {

Result<Agreement> agree_on_group(const std::shared_ptr<transport::Fabric>& fabric,
                                 const std::vector<int>& members,
                                 const CommunicatorOptions& options) {
  const std::string what = creation_text(options);
  if (Status valid = check_members(*fabric, members); !valid) return valid.with_context(what);
  const TimePoint deadline = deadline_after(fabric->clock(), options.timeout);
  const bool region = options.use_region && share_a_region(*fabric, members);
  const auto describe = [&] {
    return describe_group(*fabric, options.tuning.get(), members, region);
  };
  const auto release = [&](const GroupDescriptor& descriptor) {
    if (descriptor.segment != kNoSegment) fabric->region()->release(descriptor.segment);
  };
  const auto links = [&] { return report_links(*fabric, members); };
  const std::string key =
      options.terms.empty() ? options.name : options.name + "\n" + options.terms;
  auto agreed = members.size() == 1
                    ? open_single_rank(*fabric, members)
                    : agree(*fabric, members, key, fabric_state_of(*fabric)->next_use(members, key),
                            deadline, describe, release, options.give_up, links);
  if (agreed.ok()) return agreed;
  Status failure = agreed.status();
  if (failure.code() == Code::timed_out && options.peer_traces)
    failure = Status(failure.code(),
                     failure.message() + options.peer_traces->tell(options.name, failure.ranks()),
                     failure.ranks());
  return failure.with_context(what + " on rank " + std::to_string(fabric->rank()));
}

}  // namespace

Result<std::shared_ptr<Communicator>> Communicator::create(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    CommunicatorOptions options) {
  auto agreed = agree_on_group(fabric, members, options);
  if (!agreed.ok()) return agreed.status();
  return assemble(std::move(fabric), std::move(agreed).value(), std::move(options.name),
                  std::move(options.peer_traces));
}

Result<std::shared_ptr<transport::Channel>> create_channel(
    const std::shared_ptr<transport::Fabric>& fabric, std::vector<int> members,
    CommunicatorOptions options) {
  options.use_region = false;
  options.tuning = std::make_shared<const Tuning>();
  auto agreed = agree_on_group(fabric, members, options);
  if (!agreed.ok()) return agreed.status();
  return std::move(agreed->channel);
}

GroupProposal Communicator::propose(transport::Fabric& fabric, const std::vector<int>& members,
                                    const CommunicatorOptions& options) {
  if (!check_members(fabric, members) || members.size() < 2) return {};
  const GroupProposal none{.strands =
                               static_cast<std::uint32_t>(report_links(fabric, members).strands)};
  if (members.front() != fabric.rank()) return none;
  const auto descriptor = describe_group(fabric, options.tuning.get(), members,
                                         options.use_region && share_a_region(fabric, members));
  if (!descriptor.ok()) return none;  // `create` reports the failure on all members
  const GroupProposal made{fabric.next_channel_id(), none.strands, descriptor->segment};
  if (made.channel != 0 && descriptor->bounds == bounds_of(fabric, made, members)) return made;
  release_segment(fabric, made);
  return none;
}

GroupProposal Communicator::settle(transport::Fabric& fabric, const std::vector<int>& members,
                                   std::span<const GroupProposal> proposals) {
  GroupProposal settled = proposals.front();
  for (const GroupProposal& each : proposals)
    settled.strands = std::max(settled.strands, each.strands);
  if (settled.strands <= 1 || members.size() > kMostOrdered) return settled;
  const Selection usual(Medium::network, static_cast<int>(members.size()),
                        placement_of(fabric, members), default_tunables());
  if (usual.choose(Op::all_gather, Selection::kAlways - 1) != Algorithm::ring) return settled;
  if (members.front() == fabric.rank()) cancel(fabric, settled);
  return {};
}

void Communicator::cancel(transport::Fabric& fabric, const GroupProposal& proposal) {
  if (proposal.channel != 0) release_segment(fabric, proposal);
}

Result<std::shared_ptr<Communicator>> Communicator::commit(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    const GroupProposal& proposal, CommunicatorOptions options) {
  const std::string what = creation_text(options);
  if (Status valid = check_members(*fabric, members); !valid) return valid.with_context(what);
  const GroupDescriptor descriptor{
      proposal.segment, bounds_of(*fabric, proposal, members), proposal.strands, {}};
  auto channel = fabric->open(proposal.channel, std::move(members));
  if (!channel.ok())
    return channel.status().with_context(what + " on rank " + std::to_string(fabric->rank()));
  return assemble(std::move(fabric), Agreement{std::move(*channel), descriptor},
                  std::move(options.name), std::move(options.peer_traces));
}

Result<std::shared_ptr<Communicator>> Communicator::split(
    const std::shared_ptr<Communicator>& parent, const std::vector<std::vector<int>>& parts,
    CommunicatorOptions options) {
  const auto fabric = fabric_of(*parent);
  Split split(*parent, parts, deadline_after(fabric->clock(), options.timeout));
  Status valid = split.check();
  if (!valid) return valid.with_context(creation_text(options));
  auto agreed = split.agree(options.use_region, options.tuning.get());
  if (!agreed.ok()) return agreed.status().with_context(creation_text(options));
  if (!agreed->has_value()) return std::shared_ptr<Communicator>();
  return assemble(fabric, std::move(**agreed), std::move(options.name),
                  std::move(options.peer_traces));
}

}  // namespace muster::collective

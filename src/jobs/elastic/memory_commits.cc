// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/memory_commits.h"

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "checkpoint/modules/engine.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/errors.h"
#include "jobs/elastic/epoch_follower.h"
#include "muster/collectives.h"
#include "muster/init.h"
#include "muster/point_to_point.h"

namespace muster::elastic {
namespace {

using checkpoint::CheckpointItem;
using shards::Shard;

// The tag of messages between partners. Programs use small tags.
constexpr std::int64_t kPartnerTag = 0x6d757374;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

std::vector<Shard> shards_of(const std::vector<CheckpointItem>& items) {
  std::vector<Shard> shards;
  shards.reserve(items.size());
  for (const CheckpointItem& item : items) shards.push_back(checkpoint::shard_of(item));
  return shards;
}

std::string description_of(const std::vector<Shard>& shards, const std::string& values) {
  return ByteWriter().put_text(shards::text_of_shards(shards)).put_text(values).take();
}

struct PartDescription {
  std::vector<Shard> shards;
  std::string values;
};

PartDescription read_description(std::string_view text) {
  ByteReader reader(text);
  PartDescription read;
  read.shards = group::take(shards::read_shards(reader.get_text()));
  read.values = reader.get_text();
  if (!reader.at_end()) group::invalid("elastic::State: the description of a commit is broken");
  return read;
}

at::Tensor tensor_over(MutableBytes bytes) {
  return at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
}

/// Memory of the items that can be filled as it is, else memory for them on the CPU.
class ItemMemory {
 public:
  explicit ItemMemory(const std::vector<CheckpointItem>& items) {
    for (const CheckpointItem& item : items) {
      const bool direct = group::is_dense_cpu(item.tensor);
      tensors_.push_back(
          {item.tensor,
           direct ? item.tensor : at::empty(item.tensor.sizes(), item.tensor.scalar_type())});
    }
  }
  std::vector<MutableBytes> bytes() const {
    std::vector<MutableBytes> all;
    for (const auto& [tensor, memory] : tensors_) all.push_back(group::dense_mutable_bytes(memory));
    return all;
  }
  void finish() const {
    for (const auto& [tensor, memory] : tensors_) {
      if (memory.is_same(tensor))
        group::mark_written(tensor);
      else
        tensor.copy_(memory);
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
};

shards::Index index_of(const PieceMap& pieces) {
  shards::Index index;
  index.folder = "the last commit";
  for (auto& [name, tensor] : pieces.tensors())
    index.tensors[name] = {tensor.dtype, tensor.sizes, {}};
  return index;
}

template <class T>
std::string text_of(const std::vector<T>& all) {
  return std::string(as_text(std::as_bytes(std::span(all))));
}

template <class T>
void append_from(std::string_view text, std::vector<T>& all) {
  ByteReader reader(text);
  while (reader.ok() && reader.left() >= sizeof(T)) all.push_back(reader.get<T>());
}

}  // namespace

std::vector<CommitMemory> MemoryCommits::adopt(std::vector<Descriptor> files) {
  std::vector<CommitMemory> whole;
  for (Descriptor& file : files) {
    CommitMemory memory = group::take(CommitMemory::open(std::move(file)));
    if (const auto label = memory.label(); label && label->world_size == kWholeCommit)
      whole.push_back(std::move(memory));
    else
      reachable_.push_back(std::make_shared<CommitMemory>(std::move(memory)));
  }
  return whole;
}

bool MemoryCommits::has_any() const {
  return std::ranges::any_of(reachable_,
                             [](const Memory& each) { return each->label().has_value(); });
}

std::vector<ReachablePart> MemoryCommits::parts_here(int rank) const {
  std::vector<ReachablePart> parts;
  for (std::size_t i = 0; i < reachable_.size(); ++i)
    if (const auto label = reachable_[i]->label())
      parts.push_back({label->id, rank, static_cast<std::int32_t>(i), label->rank,
                       label->world_size, reachable_[i]->is_agreed() ? 1 : 0});
  return parts;
}

std::vector<PieceSource> MemoryCommits::sources_of(const CommitId& id,
                                                   const shards::SavingRanks& ranks,
                                                   std::string& values) const {
  std::string mine;
  {
    ByteWriter writer;
    for (std::size_t i = 0; i < reachable_.size(); ++i)
      if (const auto label = reachable_[i]->label(); label && label->id == id)
        writer.put(static_cast<std::int32_t>(i))
            .put_text(as_text(reachable_[i]->held_description()));
    mine = writer.take();
  }
  const auto all =
      group::take(shards::exchange_or_fail(ranks, {}, mine, shards::ExchangeLimit::group_timeout));
  std::vector<PieceSource> sources;
  for (std::size_t holder = 0; holder < all.size(); ++holder) {
    ByteReader reader(all[holder]);
    while (reader.ok() && reader.left() > 0) {
      const auto memory = reader.get<std::int32_t>();
      PartDescription part = read_description(reader.get_text());
      if (sources.empty()) values = part.values;
      sources.push_back({static_cast<int>(holder), memory, std::move(part.shards)});
    }
  }
  return sources;
}

std::optional<FoundCommit> MemoryCommits::find() {
  const Group group = default_group();
  const auto ranks = checkpoint::ranks_of(group);
  const auto texts = group::take(shards::exchange_or_fail(
      ranks, {}, text_of(parts_here(group->rank())), shards::ExchangeLimit::group_timeout));
  std::vector<ReachablePart> parts;
  for (const std::string& text : texts) append_from(text, parts);
  const auto newest = newest_whole(parts);
  if (!newest) {
    // The processes that are started next begin with what they load.
    for (const Memory& each : reachable_) each->clear();
    group::raise(newest.status());
  }
  if (!*newest) return std::nullopt;
  FoundCommit found;
  found.id = **newest;
  // Others may know that a commit was made of which this rank has heard no more.
  for (const Memory& each : own_)
    if (each && each->label() && each->label()->id == found.id) last_ = each;
  found.pieces = group::take(PieceMap::of(sources_of(found.id, ranks, found.values)));
  found.index = index_of(found.pieces);
  return found;
}

FoundCommit MemoryCommits::last() const {
  if (!has_last()) group::invalid("elastic::State::restore: there is no commit of this process");
  PartDescription part = read_description(as_text(last_->held_description()));
  FoundCommit found;
  found.id = last_->label()->id;
  found.values = std::move(part.values);
  const std::vector<PieceSource> sources{{0, 0, std::move(part.shards)}};
  found.pieces = group::take(PieceMap::of(sources));
  found.index = index_of(found.pieces);
  return found;
}

void MemoryCommits::fill_here(const FoundCommit& last,
                              const std::vector<CheckpointItem>& items) const {
  const at::NoGradGuard no_grad;
  const ItemMemory memory(items);
  const auto targets = memory.bytes();
  for (const PieceCopy& copy : group::take(last.pieces.copies(shards_of(items), 0)))
    std::memcpy(targets[copy.wanted].data() + copy.into, last_->held_data().data() + copy.from,
                copy.bytes);
  memory.finish();
}

void MemoryCommits::fill(const FoundCommit& commit,
                         const std::vector<CheckpointItem>& items) const {
  const at::NoGradGuard no_grad;
  const ItemMemory memory(items);
  exchange_pieces(commit.pieces, shards_of(items), memory.bytes());
  memory.finish();
}

void MemoryCommits::exchange_pieces(const PieceMap& pieces, const std::vector<Shard>& wanted,
                                    const std::vector<MutableBytes>& targets) const {
  const Group group = default_group();
  const int me = group->rank(), size = group->size();
  const auto copies = pieces.copies(wanted, me);
  // Each rank tells what it lacks; what it has it copies by itself.
  std::vector<std::size_t> lacking;
  std::vector<Shard> lacked;
  std::vector<bool> is_lacked(wanted.size());
  if (copies)
    for (const PieceCopy& copy : *copies)
      if (copy.holder != me) is_lacked[copy.wanted] = true;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (is_lacked[i]) {
      lacking.push_back(i);
      lacked.push_back(wanted[i]);
    }
  const auto texts = group::take(
      shards::exchange_or_fail(checkpoint::ranks_of(group), copies.status(),
                               lacked.empty() ? std::string() : shards::text_of_shards(lacked),
                               shards::ExchangeLimit::group_timeout));
  for (const PieceCopy& copy : *copies)
    if (!is_lacked[copy.wanted])
      std::memcpy(targets[copy.wanted].data() + copy.into,
                  reachable_[at(copy.memory)]->held_data().data() + copy.from, copy.bytes);
  if (std::ranges::all_of(texts, &std::string::empty)) return;

  TensorList out(at(size)), in(at(size));
  std::vector<PieceCopy> mine;  // what this rank gets of others
  std::vector<std::uint64_t> from_each(at(size));
  for (int receiver = 0; receiver < size; ++receiver) {
    std::vector<PieceCopy> all;
    if (!texts[at(receiver)].empty())
      all = group::take(
          pieces.copies(group::take(shards::read_shards(texts[at(receiver)])), receiver));
    if (receiver == me) {
      for (PieceCopy& copy : all) {
        copy.wanted = lacking[copy.wanted];
        from_each[at(copy.holder)] += copy.bytes;
      }
      mine = all;
    }
    std::uint64_t bytes = 0;
    for (const PieceCopy& copy : all) bytes += copy.holder == me ? copy.bytes : 0;
    out[at(receiver)] = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    auto* to = static_cast<std::byte*>(out[at(receiver)].mutable_data_ptr());
    for (const PieceCopy& copy : all) {
      if (copy.holder != me) continue;
      std::memcpy(to, reachable_[at(copy.memory)]->held_data().data() + copy.from, copy.bytes);
      to += copy.bytes;
    }
  }
  for (int holder = 0; holder < size; ++holder)
    in[at(holder)] = at::empty({static_cast<std::int64_t>(from_each[at(holder)])}, at::kByte);
  all_to_all(in, out);
  std::vector<std::uint64_t> read(at(size));
  for (const PieceCopy& copy : mine) {
    const auto* from = static_cast<const std::byte*>(in[at(copy.holder)].const_data_ptr());
    std::memcpy(targets[copy.wanted].data() + copy.into, from + read[at(copy.holder)], copy.bytes);
    read[at(copy.holder)] += copy.bytes;
  }
}

void MemoryCommits::begin_epoch(std::int64_t epoch, std::int64_t node,
                                const std::optional<CommitId>& restored) {
  const int rank = get_rank(), size = get_world_size();
  at::Tensor nodes = at::empty({size}, at::kLong);
  all_gather_into_tensor(nodes, at::full({1}, node, at::kLong));
  const auto partners =
      partners_of({nodes.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(size)});
  const auto make_pair = [&] {
    Pair pair;
    for (Memory& each : pair)
      each = std::make_shared<CommitMemory>(group::take(CommitMemory::make()));
    return pair;
  };
  std::erase_if(reachable_, [&](const Memory& each) {
    const auto label = each->label();
    return !label || label->id != restored;
  });
  has_earlier_ = !reachable_.empty();
  epoch_ = epoch;
  turn_ = 0;
  partner_ = partners[at(rank)];
  own_ = make_pair();
  guests_.clear();
  for (int guest = 0; guest < size; ++guest)
    if (partners[at(guest)] == rank) guests_.push_back({guest, make_pair()});
  reachable_.insert(reachable_.end(), own_.begin(), own_.end());
  for (const Guest& guest : guests_)
    reachable_.insert(reachable_.end(), guest.memories.begin(), guest.memories.end());
  EpochFollower::of_process().give_memories(files());
}

std::vector<int> MemoryCommits::files() const {
  std::vector<int> files;
  for (const Memory& each : reachable_) files.push_back(each->descriptor());
  return files;
}

void MemoryCommits::write(std::int64_t number, const CommitContents& contents) {
  const std::vector<Shard> shards = shards_of(contents.items);
  const std::string description = description_of(shards, contents.values);
  CommitMemory& memory = *own_[at(turn_)];
  group::check(memory.begin(
      {{epoch_, number}, get_rank(), get_world_size(), description.size(), data_bytes_of(shards)}));
  std::memcpy(memory.description().data(), description.data(), description.size());
  const auto offsets = offsets_of(shards);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const at::Tensor& tensor = contents.items[i].tensor;
    const auto place = memory.data().subspan(offsets[i], bytes_of(shards[i]));
    if (place.empty()) continue;
    at::from_blob(place.data(), tensor.sizes(), tensor.scalar_type()).copy_(tensor);
  }
  memory.finish();
  if (partner_ < 0 && guests_.empty()) return;
  const std::span own = std::span(shards).subspan(contents.alike);
  const std::uint64_t first = own.empty() ? 0 : offsets[contents.alike];
  CommitLabel label = *memory.label();
  std::string about = description_of({own.begin(), own.end()}, contents.values);
  label.description_bytes = about.size();
  label.data_bytes = data_bytes_of(own);
  send_to_partner(label, std::move(about), memory.data().subspan(first, label.data_bytes));
}

// First the labels, which tell how much follows.
void MemoryCommits::send_to_partner(CommitLabel label, std::string description, MutableBytes data) {
  const auto exchange = [&](const std::vector<MutableBytes>& sent, const auto& received) {
    std::vector<P2POp> messages;
    const auto add = [&](auto operation, MutableBytes bytes, int peer) {
      if (!bytes.empty())
        messages.emplace_back(operation, tensor_over(bytes), peer, nullptr, kPartnerTag);
    };
    if (partner_ >= 0)
      for (const MutableBytes bytes : sent) add(isend, bytes, partner_);
    for (std::size_t i = 0; i < guests_.size(); ++i)
      for (const MutableBytes bytes : received(i)) add(irecv, bytes, guests_[i].rank);
    for (const WorkRef& each : batch_isend_irecv(messages)) each->wait();
  };
  using Parts = std::vector<MutableBytes>;
  std::vector<CommitLabel> labels(guests_.size());
  exchange({std::as_writable_bytes(std::span(&label, 1))},
           [&](std::size_t i) { return Parts{std::as_writable_bytes(std::span(&labels[i], 1))}; });
  for (std::size_t i = 0; i < guests_.size(); ++i)
    group::check(guests_[i].memories[at(turn_)]->begin(labels[i]));
  exchange({std::as_writable_bytes(std::span(description)), data}, [&](std::size_t i) {
    CommitMemory& memory = *guests_[i].memories[at(turn_)];
    return Parts{memory.description(), memory.data()};
  });
  for (const Guest& guest : guests_) guest.memories[at(turn_)]->finish();
}

void MemoryCommits::agreed() {
  last_ = own_[at(turn_)];
  last_->set_agreed();
  for (const Guest& guest : guests_) guest.memories[at(turn_)]->set_agreed();
  turn_ = 1 - turn_;
  if (!std::exchange(has_earlier_, false)) return;
  reachable_.assign(own_.begin(), own_.end());
  for (const Guest& guest : guests_)
    reachable_.insert(reachable_.end(), guest.memories.begin(), guest.memories.end());
  EpochFollower::of_process().give_memories(files());
}

}  // namespace muster::elastic

// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/state_commits.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/bytes.h"
#include "core/group/errors.h"
#include "muster/collectives.h"
#include "muster/init.h"
#include "train/modules/packed_broadcast.h"

namespace muster::elastic {
namespace {

using checkpoint::CheckpointItem;
using nlohmann::json;

void copy_into(at::Tensor& memory, const at::Tensor& tensor) {
  const bool fits = memory.defined() && memory.sizes() == tensor.sizes() &&
                    memory.scalar_type() == tensor.scalar_type() &&
                    memory.device() == tensor.device();
  if (fits)
    memory.copy_(tensor);
  else
    memory = tensor.detach().clone(at::MemoryFormat::Contiguous);
}

std::vector<CommitId> gathered_ids(const CommitId& mine) {
  at::Tensor all = at::empty({2 * get_world_size()}, at::kLong);
  all_gather_into_tensor(all, at::tensor({mine.epoch, mine.number}, at::kLong));
  const auto* numbers = all.const_data_ptr<std::int64_t>();
  std::vector<CommitId> ids;
  for (std::int64_t i = 0; i < all.numel(); i += 2) ids.push_back({numbers[i], numbers[i + 1]});
  return ids;
}

/// Room for a tensor in a memory file.
std::size_t room_for(const at::Tensor& tensor) {
  constexpr std::size_t kAlignment = 64;
  return (tensor.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
}

/// Calls on it are queued.
bool is_on_accelerator(const at::Tensor& tensor) {
  return !tensor.is_cpu() && at::getAccelerator(false) == tensor.device().type();
}

/// One for each accelerator of the tensors, after the work that is queued on it.
std::vector<c10::Event> events_after(const std::vector<at::Tensor>& tensors) {
  std::set<std::pair<c10::DeviceType, c10::DeviceIndex>> devices;
  for (const at::Tensor& tensor : tensors)
    if (is_on_accelerator(tensor)) devices.emplace(tensor.device().type(), tensor.device().index());
  std::vector<c10::Event> events;
  for (const auto& [type, index] : devices) {
    const c10::impl::VirtualGuardImpl guards(type);
    events.emplace_back(type).record(guards.getStream({type, index}));
  }
  return events;
}

/// On a stream of its own: that of training may wait for a rank that is gone.
void copy_to_host(const at::Tensor& host, const at::Tensor& tensor) {
  if (!is_on_accelerator(tensor)) return void(host.copy_(tensor));
  const c10::impl::VirtualGuardImpl guards(tensor.device().type());
  const c10::StreamGuard beside(guards.getStreamFromGlobalPool(tensor.device()));
  host.copy_(tensor);
}

/// A tensor like `tensor`, on the CPU and dense, over memory.
at::Tensor cpu_tensor_at(const std::byte* memory, const at::Tensor& tensor) {
  return at::from_blob(const_cast<std::byte*>(memory), tensor.sizes(), tensor.scalar_type());
}

std::vector<std::int64_t> gathered(std::int64_t mine) {
  at::Tensor all = at::empty({get_world_size()}, at::kLong);
  all_gather_into_tensor(all, at::full({1}, mine, at::kLong));
  return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
}

/// A text of the source for all.
std::string shared_text(std::string text, int source) {
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  broadcast(length, {.src = source});
  text.resize(static_cast<std::size_t>(length.item<std::int64_t>()));
  if (text.empty()) return text;
  broadcast(at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, at::kByte),
            {.src = source});
  return text;
}

/// All but the elements of the tensors.
std::string description_of(const AlikeContents& contents) {
  json tensors = json::array();
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const at::Tensor& tensor = contents.tensors[i];
    tensors.push_back({contents.names[i], static_cast<int>(tensor.scalar_type()),
                       tensor.sizes().vec(), static_cast<int>(tensor.device().type())});
  }
  return ByteWriter().put_text(tensors.dump()).put_bytes(contents.rest).take();
}

/// With memory for the tensors. Each rank has an accelerator of its own, the current one.
AlikeContents contents_like(std::string_view description) {
  ByteReader reader(description);
  AlikeContents contents;
  for (const json& each : json::parse(reader.get_text())) {
    contents.names.push_back(each[0].get<std::string>());
    contents.tensors.push_back(
        at::empty(each[2].get<std::vector<std::int64_t>>(),
                  at::TensorOptions()
                      .dtype(static_cast<c10::ScalarType>(each[1].get<int>()))
                      .device(static_cast<c10::DeviceType>(each[3].get<int>()))));
  }
  contents.rest = description.substr(description.size() - reader.left());
  return contents;
}

std::vector<CheckpointItem> items_of(const AlikeContents& contents) {
  std::vector<CheckpointItem> items;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i)
    items.push_back(checkpoint::whole_item(contents.names[i], contents.tensors[i]));
  return items;
}

/// Collective: all ranks have made `number` commits and go on. True: some rank is to leave. Throws
/// DistError (Code::mismatch) on all ranks if their numbers differ.
bool agree_on_commit(std::int64_t number, bool leaving) {
  const at::Tensor vote = at::tensor({number, -number, std::int64_t{leaving}}, at::kLong);
  all_reduce(vote, {.op = ReduceOp::MAX});
  const auto* agreed = vote.const_data_ptr<std::int64_t>();
  if (agreed[0] == -agreed[1]) return agreed[2] != 0;
  throw DistError("commit: some rank makes commit " + std::to_string(-agreed[1]) +
                      " while another makes commit " + std::to_string(agreed[0]) +
                      "; every rank must commit after the same steps",
                  Code::mismatch);
}

bool agree_or_leave(std::int64_t number) {
  const EpochFollower& follower = EpochFollower::of_process();
  const bool own = follower.leaving();
  const bool any = agree_on_commit(number, own);
  return own || (any && follower.is_only_node());
}

}  // namespace

StateCommits::~StateCommits() {
  if (is_kept_) EpochFollower::of_process().forget_keeper(this);
}

std::optional<CommitMemory> StateCommits::hand_over() {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  handed_over_ = true;
  const Commit& commit = last();
  if (commit.id.number <= 1) return std::nullopt;
  const std::string description = ByteWriter()
                                      .put(EpochFollower::of_process().epoch())
                                      .put_bytes(description_of(commit.contents))
                                      .take();
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : commit.contents.tensors) bytes += room_for(tensor);
  CommitMemory memory = group::take(CommitMemory::make());
  group::check(memory.begin({commit.id, 0, kWholeCommit, description.size(), bytes}));
  std::ranges::copy(as_bytes(description), memory.description().begin());
  for (const c10::Event& event : commit.written) event.synchronize();
  std::byte* at = memory.data().data();
  for (const at::Tensor& tensor : commit.contents.tensors) {
    if (tensor.numel() > 0) copy_to_host(cpu_tensor_at(at, tensor), tensor);
    at += room_for(tensor);
  }
  memory.finish();
  memory.set_agreed();
  return memory;
}

void StateCommits::adopt(std::vector<Descriptor> files) {
  for (const CommitMemory& memory : memory_.adopt(std::move(files))) load(memory);
}

/// A commit of earlier workers of this node. It belongs to the history of an earlier epoch.
void StateCommits::load(const CommitMemory& memory) {
  const CommitId id = memory.label()->id;
  if (id <= last().id) return;
  Commit& into = spare();
  into = {};
  const std::string_view description = as_text(memory.held_description());
  into.left_in = ByteReader(description).get<std::int64_t>();
  into.contents = contents_like(description.substr(sizeof into.left_in));
  const ConstBytes data = memory.held_data();
  std::size_t at = 0;
  for (at::Tensor& tensor : into.contents.tensors) {
    if (room_for(tensor) > data.size() - at)
      group::invalid("elastic::State: a commit that the launcher holds is torn");
    if (tensor.numel() > 0) tensor.copy_(cpu_tensor_at(data.data() + at, tensor));
    at += room_for(tensor);
  }
  into.id = id;
  turn();
}

/// The spare commit is written, and is the last one from now on.
void StateCommits::turn() {
  spare().written = events_after(spare().contents.tensors);
  const std::lock_guard lock(mutex_);
  if (handed_over_)
    throw DistError("the job goes on without this node, which makes no commit any more",
                    Code::aborted);
  current_ = 1 - current_;
}

/// Whether the next commit has shards in it. Throws if they are missing, or not restored yet.
bool StateCommits::commits_in_memory() const {
  if (bound_ == Bound::unrestored) group::invalid(refusals_.not_restored);
  if (bound_ == Bound::nothing && in_memory_ > 0) group::invalid(refusals_.nothing_bound);
  return bound_ == Bound::restored;
}

bool StateCommits::commit() {
  const at::NoGradGuard no_grad;
  const std::int64_t next = number() + 1;
  const bool has_group = is_initialized();
  const bool in_memory = has_group && commits_in_memory();
  // A part that no other rank has must be safe before any rank takes the commit for made.
  if (in_memory) write(next);
  const bool leaves = has_group && agree_or_leave(next);
  if (in_memory)
    made_in_memory(next);
  else
    take(next);
  note_state();
  // The first one is made before the program's own (`from_survivors`).
  if (has_group && next > 1) EpochFollower::of_process().note_commit(next - 1);
  reseed();
  return leaves;
}

/// Into the older place; the last commit stays what it is until this one is whole.
void StateCommits::take(std::int64_t number) {
  AlikeContents now = objects_.contents();
  Commit& into = spare();
  into.id = {};
  into.contents.tensors.resize(now.tensors.size());
  for (std::size_t i = 0; i < now.tensors.size(); ++i)
    copy_into(into.contents.tensors[i], now.tensors[i]);
  into.contents.names = std::move(now.names);
  into.contents.rest = std::move(now.rest);
  into.id = {is_initialized() ? EpochFollower::of_process().epoch() : 0, number};
  turn();
  in_memory_ = 0;
}

void StateCommits::write(std::int64_t number) {
  const AlikeContents alike = objects_.contents();
  ShardedContents sharded = objects_.sharded_contents();
  CommitContents contents{items_of(alike), {}, alike.tensors.size()};
  contents.values = ByteWriter().put_text(sharded.values).put_bytes(description_of(alike)).take();
  for (CheckpointItem& item : sharded.items) contents.items.push_back(std::move(item));
  std::set<std::string_view> names;
  for (const CheckpointItem& item : contents.items)
    if (!names.insert(item.name).second)
      group::invalid("elastic::ShardedState: '" + item.name +
                     "' is added twice; add what is sharded to the ShardedState only, and under a "
                     "name of its own");
  memory_.write(number, contents);
}

void StateCommits::made_in_memory(std::int64_t number) {
  memory_.agreed();
  in_memory_ = number;
  const std::lock_guard lock(mutex_);
  for (Commit& each : commits_) each = {};  // they are not needed any more
}

void StateCommits::restore() {
  if (number() == 0) group::invalid(refusals_.no_commit);
  const at::NoGradGuard no_grad;
  if (in_memory_ > 0)
    fill_from(memory_.last(), bound_ == Bound::restored, FilledFrom::here);
  else
    objects_.put_back(last().contents);
  reseed();
}

void StateCommits::before_leaving() {
  if (in_memory_ > 0 ? memory_.has_last() : number() > 0) restore();
}

/// Collective unless it is filled from what is here.
void StateCommits::fill_from(const FoundCommit& commit, bool with_shards, FilledFrom from) {
  ByteReader reader(commit.values);
  shards::Index index = commit.index;
  index.values = reader.get_text();
  index.commit.number = 1;  // the values are those of new checkpoints, whose numbers begin with 1
  const AlikeContents alike =
      contents_like(std::string_view(commit.values).substr(commit.values.size() - reader.left()));
  auto items = items_of(alike);
  if (with_shards)
    for (CheckpointItem& item : objects_.wanted_shards(index)) items.push_back(std::move(item));
  if (from == FilledFrom::here)
    memory_.fill_here(commit, items);
  else
    memory_.fill(commit, items);
  objects_.put_back(alike);
  if (with_shards) objects_.put_back_sharded();
}

/// The newest epoch of which this rank has all commits; 0: it has none. One that made its last
/// commit itself, or got it, has been in every epoch since: one without it would have ended it.
std::int64_t StateCommits::complete_until() const {
  if (last().id.number == 0) return 0;
  if (last().left_in > 0) return last().left_in;
  return std::max<std::int64_t>(0, EpochFollower::of_process().epoch() - 1);
}

/// The ranks have `newest`, and all commits of the epochs up to the latest `complete` of theirs. A
/// rank that has gone may have told of one more: it had agreed on a commit of which they have not
/// heard.
void StateCommits::note_lost(std::int64_t newest, std::int64_t complete) const {
  const EpochFollower& follower = EpochFollower::of_process();
  const std::int64_t told = std::ranges::max(gathered(follower.committed_before()));
  const bool is_whole =
      std::ranges::max(gathered(follower.state_before())) <= std::ranges::max(gathered(complete));
  // The first commit is what the program loaded.
  const std::int64_t kept = std::max<std::int64_t>(0, newest - 1);
  if (told > (newest > 0 ? kept + 1 : 0) || (kept > 0 && !is_whole))
    follower.note_lost_state(std::max(told, kept), kept);
}

void StateCommits::from_survivors() {
  const at::NoGradGuard no_grad;
  EpochFollower& follower = EpochFollower::of_process();
  adopt(follower.take_memories());
  follower.set_keeper(this);
  is_kept_ = true;
  const auto any = gathered(memory_.has_any() ? 1 : 0);
  if (std::ranges::max(any) > 0) {
    if (const auto found = memory_.find()) {
      fill_from(*found, /*with_shards=*/false, FilledFrom::all_ranks);
      in_memory_ = found->id.number;
      note_lost(found->id.number, found->id.epoch);
      return reseed();
    }
  }
  in_memory_ = 0;
  auto ids = gathered_ids(last().id);
  note_lost(std::ranges::max(ids).number, complete_until());
  if (std::ranges::max(ids).number == 0) {
    ids[0] = {follower.epoch(), 1};
    if (get_rank() == 0) take(1);
  }
  const auto newest = std::ranges::max_element(ids);
  if (std::ranges::count(ids, *newest) < std::ssize(ids))
    share_from(static_cast<int>(newest - ids.begin()));
  last().left_in = 0;  // from here on it is in every epoch
  restore();
  note_state();
}

/// The launcher hears that the state is here, once more has been committed than the program loaded.
void StateCommits::note_state() const {
  if (number() > 1 && is_initialized())
    EpochFollower::of_process().note_state(number() - 1, /*divided=*/in_memory_ > 0);
}

/// A rank that has that commit already gets it once more, into the other place.
void StateCommits::share_from(int source) {
  const bool mine = source == get_rank();
  const Commit& newest = last();
  const std::string text = shared_text(
      mine ? ByteWriter().put(newest.id).put_bytes(description_of(newest.contents)).take()
           : std::string(),
      source);
  Commit& commit = mine ? last() : spare();
  CommitId id = commit.id;
  if (!mine) {
    id = ByteReader(text).get<CommitId>();
    commit = {};  // its memory goes before there is any for the next
    commit.contents = contents_like(std::string_view(text).substr(sizeof id));
  }
  parallel::PackedBroadcast().send_from(default_group(), source, commit.contents.tensors);
  if (mine) return;
  commit.id = id;
  turn();
}

void StateCommits::agree_on_end() { agree_on_commit(number(), /*leaving=*/false); }

void StateCommits::bind() {
  if (bound_ != Bound::nothing) group::invalid(refusals_.bound_already);
  bound_ = Bound::unrestored;
}

void StateCommits::restore_sharded() {
  const at::NoGradGuard no_grad;
  const EpochFollower& follower = EpochFollower::of_process();
  std::optional<CommitId> restored;
  if (const auto found = memory_.find()) {
    fill_from(*found, /*with_shards=*/true, FilledFrom::all_ranks);
    restored = found->id;
  }
  // From here on this epoch's ranks have this commit, whatever the ranks of earlier ones had.
  const std::int64_t next = restored ? restored->number : std::max<std::int64_t>(1, number());
  memory_.begin_epoch(follower.epoch(), follower.node(), restored);
  write(next);
  agree_on_commit(next, /*leaving=*/false);
  made_in_memory(next);
  bound_ = Bound::restored;
  note_state();
  reseed();
}

void StateCommits::reseed() { objects_.reseed(number(), is_initialized() ? get_rank() : 0); }

}  // namespace muster::elastic

// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/modules/engine.h"

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "checkpoint/format/files/safetensors.h"
#include "checkpoint/format/load.h"
#include "checkpoint/modules/saver_identity.h"
#include "core/base/threads/thread_start.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/call/exchange.h"
#include "core/group/errors.h"
#include "train/modules/group_pool.h"

namespace muster::checkpoint {
namespace {

/// Between two pieces of a copy.
constexpr std::int64_t kAlignment = 64;

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
}

std::byte* memory_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

/// The memory that this rank writes: that of the items if it can be written as it is, else copies.
struct PieceData {
  std::vector<const std::byte*> pointers;
  std::vector<at::Tensor> keeps_alive;
};

/// For each of the plan's pieces: the item that it is a part of.
std::vector<const CheckpointItem*> items_of(const std::vector<const shards::WrittenPiece*>& pieces,
                                            const std::vector<CheckpointItem>& items) {
  std::map<std::string_view, const CheckpointItem*> by_name;
  for (const CheckpointItem& item : items) by_name[item.name] = &item;
  std::vector<const CheckpointItem*> found;
  found.reserve(pieces.size());
  for (const auto* piece : pieces) found.push_back(by_name.at(piece->name));
  return found;
}

std::int64_t first_byte(const shards::WrittenPiece& piece) {
  return piece.first_element * shards::element_bytes(piece.dtype);
}

PieceData in_place(const shards::PlannedSave& plan, int rank,
                   const std::vector<CheckpointItem>& items) {
  PieceData data;
  const auto pieces = plan.pieces_of(rank);
  const auto of = items_of(pieces, items);
  std::map<const CheckpointItem*, at::Tensor> flat;  // an item of several boxes is several pieces
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    auto& tensor = flat[of[i]];
    if (!tensor.defined()) {
      tensor = group::is_dense_cpu(of[i]->tensor) ? of[i]->tensor : on_cpu(of[i]->tensor);
      data.keeps_alive.push_back(tensor);
    }
    data.pointers.push_back(static_cast<const std::byte*>(tensor.const_data_ptr()) +
                            first_byte(*pieces[i]));
  }
  return data;
}

/// Copied into `memory`, which grows where it is too small.
PieceData copied(const shards::PlannedSave& plan, int rank,
                 const std::vector<CheckpointItem>& items, at::Tensor& memory) {
  const PieceData from = in_place(plan, rank, items);
  const auto pieces = plan.pieces_of(rank);
  std::vector<std::int64_t> places;
  std::int64_t bytes = 0;
  for (const auto* piece : pieces) {
    places.push_back(bytes);
    bytes += (shards::PlannedSave::bytes_of(*piece) + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (!memory.defined() || memory.numel() < bytes) {
    memory.reset();  // before there is another one
    memory = at::empty({bytes}, at::kByte);
  }
  PieceData data;
  data.keeps_alive.push_back(memory);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::byte* to = memory_of(memory) + places[i];
    const auto size = static_cast<std::size_t>(shards::PlannedSave::bytes_of(*pieces[i]));
    if (size > 0) std::memcpy(to, from.pointers[i], size);
    data.pointers.push_back(to);
  }
  return data;
}

std::vector<std::string> exchange_part(const Group& group, const std::string& part,
                                       std::optional<TimePoint> deadline) {
  try {
    return group::exchange_text(group, part, deadline);
  } catch (const DistError& error) {
    if (error.code() != Code::mismatch) throw;
    group::raise(Status(error.code(), error.what(), error.ranks())
                     .with_context("checkpoint: all ranks of the group must call save, async_save "
                                   "or load, not only some"));
  }
}

/// In parts, as a text of the group is limited. A part that is full is followed by another one.
std::vector<std::string> exchange_in_parts(const Group& group, const std::string& mine,
                                           std::optional<TimePoint> deadline) {
  constexpr std::size_t part_bytes = group::kMaxTextBytes;
  std::vector<std::string> all(static_cast<std::size_t>(group->size()));
  bool is_last = false;
  for (std::size_t at = 0; !is_last; at = std::min(at + part_bytes, mine.size())) {
    const auto parts = exchange_part(group, mine.substr(at, part_bytes), deadline);
    is_last = true;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      all[rank] += parts[rank];
      is_last = is_last && parts[rank].size() < part_bytes;
    }
  }
  return all;
}

}  // namespace

Status status_of(const std::exception& error) {
  if (const auto* known = dynamic_cast<const DistError*>(&error))
    return {known->code(), known->what(), known->ranks()};
  if (const auto* of_torch = dynamic_cast<const c10::Error*>(&error))
    return {Code::internal, std::string("checkpoint: ") + of_torch->what_without_backtrace()};
  return {Code::internal, std::string("checkpoint: ") + error.what()};
}

namespace {

/// A save or load that is refused is no failure of the network: it is a DistError on all ranks.
void check(const Status& status) {
  if (status.code() == Code::refused) throw DistError(status);
  group::check(status);
}
template <class T>
T take(Result<T> result) {
  check(result.status());
  return std::move(result).value();
}

/// Turns an exception of `body` into a Status, for the other ranks, which wait for this one without
/// a limit.
template <class Body>
Status caught(Body body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    return status_of(error);
  }
}

}  // namespace

shards::SavingRanks ranks_of(const Group& group) {
  if (!group) return {};
  if (!group->is_member())
    group::invalid("checkpoint: this rank is no member of the group that was given");
  return {group->rank(), group->size(),
          [group](const std::string& mine,
                  shards::ExchangeLimit limit) -> Result<std::vector<std::string>> {
            std::optional<TimePoint> deadline;  // the group's timeout from now
            if (limit == shards::ExchangeLimit::none) deadline = TimePoint::max();
            try {
              return exchange_in_parts(group, mine, deadline);
            } catch (const std::exception& error) {
              return status_of(error);
            }
          }};
}

// ---- saving

/// Shared by the handles of a save, the saver, and the saver's thread, which sets `result` once.
struct Saving::State {
  mutable std::mutex mutex;  // guards the following
  mutable std::condition_variable changed;
  std::optional<Status> result;
  bool was_shown = false;
};

/// Used by one thread at a time, without a lock. The saver's thread has its own copies of the plan
/// and the exchange; it reads `memory`, which the next save writes only after it has joined it.
struct Saver::State {
  // Not kept alive: where they are destroyed, nothing of the job shall be left.
  std::weak_ptr<ProcessGroup> given;
  std::weak_ptr<ProcessGroup> own;  // where the saver's thread meets the others'
  std::optional<shards::SavingRanks> foreign, foreign_behind;  // of a process alone too
  at::Tensor memory;
  std::shared_ptr<Saving::State> last;
  std::thread thread;

  Group alive() const {
    Group locked = given.lock();
    if (!locked) group::invalid("checkpoint: the group of this save has been destroyed");
    return locked;
  }
  shards::SavingRanks here() const { return foreign ? *foreign : ranks_of(alive()); }
  shards::SavingRanks behind() {
    if (foreign) return *foreign_behind;
    Group meets = own.lock();
    if (!meets || !meets->failure().ok()) own = meets = parallel::acquire_group(alive());
    return ranks_of(meets);
  }
  /// `mine`: why this rank cannot save; then all ranks throw it.
  shards::PlannedSave plan(const std::vector<CheckpointItem>& items,
                           const shards::CommitOptions& options, const shards::SavingRanks& ranks,
                           Status mine) const {
    std::vector<shards::Shard> shards;
    if (mine.ok())
      mine = caught([&] {
        for (const CheckpointItem& item : items) shards.push_back(shard_of(item));
      });
    shards::CommitOptions with_saver = options;
    with_saver.saver = saver_identity();
    return take(shards::plan_save(shards, with_saver, ranks, mine));
  }
  /// Waits for the last save. Returns its failure, if it has not been reported yet, once.
  Status finish_last() {
    if (thread.joinable()) thread.join();
    if (!last) return {};
    const auto ended = std::exchange(last, nullptr);
    const std::lock_guard lock(ended->mutex);
    if (ended->was_shown || ended->result->ok()) return {};
    return ended->result->with_context("the save before this one");
  }
};

Saver::Saver(const Group& group) : state_(std::make_unique<State>()) {
  state_->given = group;
  if (group) return;
  state_->foreign.emplace();
  state_->foreign_behind.emplace();
}
Saver::Saver(shards::SavingRanks here, shards::SavingRanks behind)
    : state_(std::make_unique<State>()) {
  state_->foreign = std::move(here);
  state_->foreign_behind = std::move(behind);
}

void Saver::fail(const std::exception& why) noexcept {
  try {
    static_cast<void>(shards::exchange_or_fail(state_->here(), status_of(why), {},
                                               shards::ExchangeLimit::group_timeout));
  } catch (const std::exception&) {
    // The group has been destroyed, and no rank waits on it.
  }
}

Saver::~Saver() {
  if (state_->thread.joinable()) state_->thread.join();
}

void Saving::wait() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->result.has_value(); });
  state_->was_shown = true;
  check(*state_->result);
}

void Saver::wait_unreported(const Saving& saving) {
  Saving::State& state = *saving.state_;
  std::unique_lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.result.has_value(); });
  check(*state.result);
}

bool Saving::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->result.has_value();
}

void Saver::save(const std::vector<CheckpointItem>& items, const std::string& values,
                 const shards::CommitOptions& options) {
  const Status before = state_->finish_last();
  const shards::SavingRanks ranks = state_->here();
  const auto plan = state_->plan(items, options, ranks, before);
  PieceData data;
  const Status ready = caught([&] { data = in_place(plan, ranks.rank, items); });
  check(shards::finish_save(plan, data.pointers, values, ranks, ready));
}

Saving Saver::async_save(const std::vector<CheckpointItem>& items, const std::string& values,
                         const shards::CommitOptions& options) {
  const Status before = state_->finish_last();
  const shards::SavingRanks ranks = state_->here();
  auto plan = state_->plan(items, options, ranks, before);
  const shards::SavingRanks behind = state_->behind();  // collective: when all are known to go on
  PieceData data;
  const Status ready = caught([&] { data = copied(plan, ranks.rank, items, state_->memory); });
  Saving saving;
  saving.state_ = state_->last = std::make_shared<Saving::State>();
  const auto finish = [plan = std::move(plan), data = std::move(data), values, behind,
                       ended = saving.state_](const Status& before) {
    Status result;
    const Status thrown =
        caught([&] { result = shards::finish_save(plan, data.pointers, values, behind, before); });
    if (!thrown) result = thrown;
    const std::lock_guard lock(ended->mutex);
    ended->result = result;
    ended->changed.notify_all();
  };
  auto started =
      start_thread("the thread that writes a checkpoint", [finish, ready] { finish(ready); });
  if (started)
    state_->thread = std::move(*started);
  else
    finish(started.status());  // the other ranks' threads wait for this rank, and are told why
  return saving;
}

std::shared_ptr<Saver> saver_of(const Group& group) {
  struct SaverEntry {
    std::weak_ptr<ProcessGroup> group;
    std::shared_ptr<Saver> saver;
  };
  static std::mutex mutex;
  static std::map<const void*, SaverEntry> all;
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& each) { return each.first && each.second.group.expired(); });
  SaverEntry& known = all[group.get()];
  if (!known.saver || (group && known.group.lock() != group))
    known = {group, std::make_shared<Saver>(group)};
  return known.saver;
}

// ---- loading

namespace {

/// The shard to read for an item, and the type of its elements: another type than the tensor's if
/// the values are cast.
struct ItemSource {
  shards::Shard wanted;
  at::ScalarType type;
};

ItemSource source_of(const shards::Index& index, const CheckpointItem& item) {
  const at::ScalarType type = item.tensor.scalar_type();
  shards::Shard wanted = shard_of(item);
  const auto stored = index.tensors.find(item.name);
  if (stored == index.tensors.end() || stored->second.dtype == wanted.dtype) return {wanted, type};
  const at::ScalarType other = scalar_type_of(stored->second.dtype);
  if (stored->second.sizes == item.sizes && other != at::ScalarType::Undefined &&
      at::canCast(other, type))
    return {{item.name, stored->second.dtype, item.sizes, item.boxes}, other};
  if (shards::Shard bytes = as_bytes(item); stored->second.dtype == bytes.dtype &&
                                            stored->second.sizes == bytes.sizes &&
                                            !shards::element_row(wanted.dtype).in_files.empty())
    return {std::move(bytes), type};
  return {wanted, type};
}

/// Through memory of the stored type where the tensor's own cannot take the bytes.
Status load_item(shards::Reader& reader, const shards::Index& index, const CheckpointItem& item) {
  at::Tensor target = item.tensor.detach();
  const ItemSource source = source_of(index, item);
  const bool direct = group::is_dense_cpu(target) && source.type == target.scalar_type();
  const at::Tensor memory =
      direct ? target : at::empty(target.sizes(), at::TensorOptions(source.type).device(at::kCPU));
  const std::span bytes(memory_of(memory), static_cast<std::size_t>(memory.nbytes()));
  if (Status read = reader.read(source.wanted, bytes); !read) return read;
  if (!direct) target.copy_(memory);
  return {};
}

/// Files are verified while they are read: to read them twice, or to put aside what was read, would
/// slow down every load. So a load that fails says what it leaves.
Status with_what_is_filled(const Status& failed, std::size_t filled, std::size_t begun,
                           std::size_t all) {
  if (begun == 0) return failed;
  const std::string of_all = " of the " + std::to_string(all) + " tensors of this rank";
  return {failed.code(),
          failed.message() + "; this load has filled " + std::to_string(filled) + of_all +
              (begun > filled ? ", and one of them in part" : "") +
              ": load another checkpoint before they are used",
          failed.ranks()};
}

}  // namespace

Status check_items(const shards::Index& index, const std::vector<CheckpointItem>& items) {
  Status mine;
  const Status thrown = caught([&] {
    shards::Reader reader(index);
    for (std::size_t i = 0; i < items.size() && mine.ok(); ++i)
      mine = reader.check(source_of(index, items[i]).wanted);
  });
  return thrown ? mine : thrown;
}

void load_items(const shards::Index& index, const std::vector<CheckpointItem>& items,
                const shards::SavingRanks& ranks) {
  const at::NoGradGuard no_grad;
  shards::Reader reader(index);
  Status mine;
  std::size_t begun = 0;
  const Status thrown = caught([&] {
    while (begun < items.size() && mine.ok()) mine = load_item(reader, index, items[begun++]);
  });
  if (!thrown) mine = thrown;
  const Status all =
      shards::exchange_or_fail(ranks, mine, {}, shards::ExchangeLimit::none).status();
  if (!all) check(with_what_is_filled(all, begun - (mine.ok() ? 0 : 1), begun, items.size()));
  note_loaded(index.commit);
}

}  // namespace muster::checkpoint

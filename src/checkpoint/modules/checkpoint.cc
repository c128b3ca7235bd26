#include "muster/checkpoint.h"

#include <utility>

#include "checkpoint/format/files/index.h"
#include "checkpoint/format/files/local_path.h"
#include "checkpoint/format/history.h"
#include "checkpoint/format/load.h"
#include "checkpoint/format/save.h"
#include "checkpoint/modules/engine.h"
#include "checkpoint/modules/state_access.h"
#include "core/group/errors.h"
#include "muster/init.h"

namespace muster::checkpoint {
namespace {

Group group_of(const Group& given) {
  if (given) return given;
  return is_initialized() ? default_group() : nullptr;
}

int rank_in(const Group& group) { return group ? group->rank() : 0; }

shards::CommitOptions options_of(const std::string& path, const SaveOptions& options) {
  return {.path = path,
          .step = options.step,
          .overwrite = options.overwrite,
          .keep_last = options.keep_last};
}

/// What is to be saved; where that throws on one rank, the others are told.
struct Contents {
  std::vector<CheckpointItem> items;
  std::string values;

  Contents(const State& state, int rank, Saver& saver) try
      : items(StateAccess::items(state, rank)), values(StateAccess::values(state)) {
  } catch (const std::exception& error) {
    saver.fail(error);
    throw;
  }
};

}  // namespace

void save(const State& state, const std::string& path, const SaveOptions& options) {
  const Group group = group_of(options.process_group);
  const auto saver = saver_of(group);
  const Contents contents(state, rank_in(group), *saver);
  saver->save(contents.items, contents.values, options_of(path, options));
}

Saving async_save(const State& state, const std::string& path, const SaveOptions& options) {
  const Group group = group_of(options.process_group);
  const auto saver = saver_of(group);
  const Contents contents(state, rank_in(group), *saver);
  return saver->async_save(contents.items, contents.values, options_of(path, options));
}

std::optional<std::string> latest(const std::string& folder) {
  auto all = shards::checkpoints_in(group::take(shards::local_path(folder)));
  if (all.empty()) return {};
  return std::move(all.back());
}

void load(State& state, const std::string& path, const LoadOptions& options) {
  const shards::SavingRanks ranks = ranks_of(group_of(options.process_group));
  const auto index =
      options.safetensors ? shards::open_safetensors(path) : shards::open_index(path);
  Status mine = index.status();
  std::vector<CheckpointItem> items;
  try {
    if (mine.ok()) {
      items = StateAccess::wanted(state, *index, ranks.rank, /*with_values=*/!options.safetensors);
      mine = check_items(*index, items);
    }
  } catch (const std::exception& error) {  // the other ranks wait for this one's word
    mine = status_of(error);
  }
  group::check(shards::agree_on_index(ranks, mine, index.ok() ? index->digest : std::string()));
  load_items(*index, items, ranks);
  StateAccess::finish(state);
}

}  // namespace muster::checkpoint

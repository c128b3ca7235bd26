#include "muster/shards/save.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <map>
#include <span>
#include <string_view>
#include <system_error>

#include "muster/shards/files/digest.h"
#include "muster/shards/files/disk.h"
#include "muster/shards/files/safetensors.h"
#include "muster/shards/plan/element_type.h"

namespace muster::shards {
namespace {

constexpr const char* kSaving = ".saving";

Status refuse_save(const std::string& why) {
  return {Code::invalid_argument, "checkpoint: " + why};
}

std::string staging_of(const CommitOptions& options) { return options.path + kSaving; }

bool is_link(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_symlink(path, error);
}

Status refuse_link(const std::string& path) {
  return refuse_save(path +
                     " is a symbolic link, and what it leads to is not replaced or removed: give "
                     "the name of a folder");
}

Status refuse_foreign(const std::string& path, const std::string& name) {
  return refuse_save(path + " has '" + name +
                     "', which is no part of the checkpoint and would be removed with it: move it "
                     "or save under another name");
}

/// Refuses a checkpoint whose folder has more than its index names: overwriting it removes all.
Status check_only_own_files(const std::string& path) {
  const auto index = open_index(path);
  if (!index)
    return index.status().with_context("checkpoint: " + path +
                                       " is not replaced, because its index does not tell which "
                                       "files are its own; remove it or save under another name");
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(path, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name != kIndexName && !index->files.contains(name)) return refuse_foreign(path, name);
  }
  return {};
}

/// Rank 0's part of the beginning.
Status make_staging(const CommitOptions& options) {
  const std::string index = options.path + "/" + kIndexName;
  for (const std::string& path : {options.path, staging_of(options)})
    if (is_link(path)) return refuse_link(path);
  if (exists(options.path)) {
    if (exists(index) && !options.overwrite)
      return refuse_save(options.path + " is a checkpoint already, and overwrite is off");
    if (exists(index))
      if (Status own = check_only_own_files(options.path); !own) return own;
    std::error_code error;
    if (!exists(index) && !std::filesystem::is_empty(options.path, error))
      return refuse_save(options.path +
                         " is there and is no checkpoint; its files are not replaced: save under "
                         "another name");
  }
  const std::string staging = staging_of(options);
  if (Status removed = remove_folder(staging); !removed) return removed;
  return make_folder(staging);
}

/// Writes one file; adds it to this rank's part of the index.
Status write_file(const PlannedSave& plan, const WrittenFile& file,
                  std::span<const std::byte* const> data, Index& part) {
  std::vector<HeaderEntry> entries;
  for (const WrittenPiece& piece : file.pieces)
    entries.push_back({piece.name, piece.dtype, piece.box, 0, 0});
  const std::string header = write_header(entries);
  if (header.size() > kHeaderLimit)
    return refuse_save(file.file + " would have a header of " + std::to_string(header.size()) +
                       " bytes, more than readers of safetensors take: divide the state");
  auto writer = FileWriter::create(staging_of(plan.options) + "/" + file.file);
  if (!writer) return writer.status();
  if (Status done = writer->write(std::as_bytes(std::span(header))); !done) return done;
  for (std::size_t i = 0; i < file.pieces.size(); ++i) {
    const WrittenPiece& piece = file.pieces[i];
    const std::span bytes(data[i], static_cast<std::size_t>(PlannedSave::bytes_of(piece)));
    Digest digest;
    for (std::size_t at = 0; at < bytes.size(); at += kDigestBlock) {
      const auto block = bytes.subspan(at, std::min(kDigestBlock, bytes.size() - at));
      digest.add(block);  // and is written from the cache
      if (Status done = writer->write(block); !done)
        return done.with_context("tensor '" + piece.name + "'");
    }
    StoredTensor& tensor = part.tensors[piece.name];
    tensor.dtype = piece.dtype;
    tensor.sizes = piece.sizes;
    tensor.pieces.push_back(
        {file.file, piece.box, header.size() + entries[i].begin, digest.text()});
  }
  if (Status done = writer->close(plan.options.durable); !done) return done;
  part.files[file.file] = {header.size() + (entries.empty() ? 0 : entries.back().end),
                           header.size(), digest_of(header)};
  return {};
}

Status write_files(const PlannedSave& plan, int rank, const std::vector<const std::byte*>& data,
                   Index& part) {
  std::size_t next = 0;
  for (const WrittenFile& file : plan.files) {
    if (file.rank != rank) continue;
    const auto of_file = std::span(data).subspan(next, file.pieces.size());
    if (Status done = write_file(plan, file, of_file, part); !done) return done;
    next += file.pieces.size();
  }
  return {};
}

std::string now_text() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// Looks whether rank 0 sees what all ranks wrote.
Status check_files(const std::string& staging, const Index& index) {
  for (const auto& [name, file] : index.files) {
    std::string path = staging;
    path.append("/").append(name);
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    if (error)
      return refuse_save("rank 0 cannot see " + path + ", which a rank has written: " +
                         error.message() + "; save to a folder that all ranks share");
    if (bytes != file.bytes)
      return refuse_save(path + " has " + std::to_string(bytes) + " bytes for rank 0 and not the " +
                         std::to_string(file.bytes) +
                         " that a rank has written; save to a folder that all ranks share");
  }
  return {};
}

/// Rank 0's part of the end, up to the commit.
Status commit(const PlannedSave& plan, const std::vector<std::string>& parts,
              const std::string& values) {
  const CommitOptions& options = plan.options;
  const std::string staging = staging_of(options);
  Index index;
  index.step = options.step;
  index.world_size = static_cast<int>(parts.size());
  index.saved_at = now_text();
  index.committed_ns = now_ns();
  index.values = values;
  for (const std::string& part : parts)
    if (Status added = add_files(index, part); !added) return added;
  if (Status there = check_files(staging, index); !there) return there;
  const std::string text = text_of_index(index);
  if (const auto read = read_index(text); !read)  // nothing is committed that could not be loaded
    return read.status().with_context("checkpoint: the index that was to be written");
  if (Status done = write_text(staging + "/" + kIndexName, text, options.durable); !done)
    return done;
  return put_in_place(staging, options.path);
}

/// The last change of anything in a folder, in nanoseconds since 1970.
std::int64_t last_change_ns(const std::string& folder) {
  std::int64_t last = changed_ns(folder);
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(folder, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error))
    last = std::max(last, changed_ns(at->path().string()));
  return last;
}

/// Rank 0's part after the commit: removes what was replaced and what is more than `keep_last`.
Status clean_up(const CommitOptions& options) {
  const std::string folder = folder_of(options.path);
  if (options.durable)
    if (Status done = sync_folder(folder); !done) return done;
  if (Status done = remove_checkpoint(staging_of(options)); !done) return done;
  if (options.keep_last <= 0) return {};
  auto kept = checkpoints_in(folder);
  const std::string mine = std::filesystem::path(options.path).filename().string();
  std::erase_if(kept, [&](const std::string& each) {
    return is_link(each) || std::filesystem::path(each).filename().string() == mine;
  });
  if (kept.empty()) return {};
  // A save that goes on beside this one has written since the checkpoint before this one.
  const std::int64_t before = committed_ns_of(kept.back());
  for (const std::string& each : unfinished_in(folder))
    if (!is_link(each) && last_change_ns(each) < before)
      if (Status done = remove_checkpoint(each); !done) return done;
  const auto others = static_cast<std::size_t>(options.keep_last - 1);
  for (std::size_t i = 0; i + others < kept.size(); ++i)
    if (Status done = remove_checkpoint(kept[i]); !done) return done;
  return {};
}

/// An exchange that tells whether all ranks took part in the last one: then none of them writes.
class NotedExchange {
 public:
  explicit NotedExchange(const SavingRanks& ranks) : all_took_part_(ranks.size == 1) {
    ranks_ = {ranks.rank, ranks.size, [this, &ranks](const std::string& mine, ExchangeLimit limit) {
                auto all = ranks.exchange(mine, limit);
                all_took_part_ = all.ok();
                return all;
              }};
  }
  NotedExchange(const NotedExchange&) = delete;
  NotedExchange& operator=(const NotedExchange&) = delete;

  const SavingRanks& ranks() const { return ranks_; }
  /// Rank 0 removes the staging folder of a save that failed, unless a rank may still write there.
  void remove_staging(const CommitOptions& options) const {
    if (ranks_.rank == 0 && all_took_part_)
      static_cast<void>(remove_checkpoint(staging_of(options)));
  }

 private:
  bool all_took_part_;
  SavingRanks ranks_;
};

std::vector<std::string> folders_in(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(folder, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error))
    if (at->is_directory(error)) found.push_back(folder + "/" + at->path().filename().string());
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

Result<std::vector<std::string>> exchange_or_fail(const SavingRanks& ranks, const Status& mine,
                                                  const std::string& text, ExchangeLimit limit) {
  if (ranks.size == 1) {
    if (!mine) return mine;
    return std::vector<std::string>{text};
  }
  auto all = ranks.exchange(mine.ok() ? "+" + text : "-" + mine.message(), limit);
  if (!all) return all.status();
  if (!mine) return mine;
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    std::string& each = (*all)[rank];
    if (each.empty() || each.front() != '+')
      return Status(Code::peer_failed,
                    "rank " + std::to_string(rank) + ": " + each.substr(each.empty() ? 0 : 1));
    each.erase(0, 1);
  }
  return all;
}

std::vector<const WrittenPiece*> PlannedSave::pieces_of(int rank) const {
  std::vector<const WrittenPiece*> pieces;
  for (const WrittenFile& file : files)
    if (file.rank == rank)
      for (const WrittenPiece& piece : file.pieces) pieces.push_back(&piece);
  return pieces;
}

std::int64_t PlannedSave::bytes_of(const WrittenPiece& piece) {
  return piece.box.elements() * element_bytes(piece.dtype);
}

Result<PlannedSave> plan_save(const std::vector<Shard>& shards, const CommitOptions& options,
                              const SavingRanks& ranks, const Status& before) {
  PlannedSave plan{.options = options, .files = {}};
  plan.options.path = without_slash(options.path);
  Status mine = before;
  if (mine.ok() && options.path.empty()) mine = refuse_save("a path is needed to save to");
  if (mine.ok() && ranks.rank == 0) mine = make_staging(plan.options);
  const NotedExchange noted(ranks);
  const auto texts =
      exchange_or_fail(noted.ranks(), mine, text_of_shards(shards), ExchangeLimit::group_timeout);
  if (!texts) {
    if (mine.ok()) noted.remove_staging(plan.options);
    return texts.status();
  }
  std::vector<std::vector<Shard>> all;
  for (const std::string& text : *texts) {
    auto read = read_shards(text);
    if (!read) return read.status();
    all.push_back(std::move(*read));
  }
  auto files = plan_files(all);  // the same on all ranks, and so is its failure
  if (!files) {
    noted.remove_staging(plan.options);
    return files.status();
  }
  plan.files = std::move(*files);
  return plan;
}

Status finish_save(const PlannedSave& plan, const std::vector<const std::byte*>& data,
                   const std::string& values, const SavingRanks& ranks, const Status& before) {
  Index part;
  const Status written = before.ok() ? write_files(plan, ranks.rank, data, part) : before;
  // The names of the files are in the folder's own memory, which rank 0 brings to the disk with the
  // index; on a network's file system each host's must be.
  const Status mine =
      written.ok() && plan.options.durable ? sync_folder(staging_of(plan.options)) : written;
  const NotedExchange noted(ranks);
  const auto parts =
      exchange_or_fail(noted.ranks(), mine, text_of_files(part), ExchangeLimit::none);
  if (!parts) {
    noted.remove_staging(plan.options);
    return parts.status();
  }
  Status committed;
  if (ranks.rank == 0) {
    committed = commit(plan, *parts, values);
    if (committed.ok())
      committed = clean_up(plan.options);
    else
      noted.remove_staging(plan.options);
  }
  return exchange_or_fail(ranks, committed, {}, ExchangeLimit::none).status();
}

Status save(const std::vector<Shard>& shards, const std::vector<const std::byte*>& data,
            const std::string& values, const CommitOptions& options, const SavingRanks& ranks) {
  const auto plan = plan_save(shards, options, ranks);
  if (!plan) return plan.status();
  std::map<std::string_view, const std::byte*> memory;
  for (std::size_t i = 0; i < shards.size(); ++i) memory[shards[i].name] = data[i];
  std::vector<const std::byte*> of_pieces;
  for (const WrittenPiece* piece : plan->pieces_of(ranks.rank))
    of_pieces.push_back(memory.at(piece->name) +
                        piece->first_element * element_bytes(piece->dtype));
  return finish_save(*plan, of_pieces, values, ranks);
}

std::vector<std::string> checkpoints_in(const std::string& folder) {
  std::vector<std::pair<std::int64_t, std::string>> found;
  for (const std::string& each : folders_in(folder))
    if (!each.ends_with(kSaving) && exists(each + "/" + kIndexName))
      found.emplace_back(committed_ns_of(each), each);
  std::sort(found.begin(), found.end());
  std::vector<std::string> names;
  names.reserve(found.size());
  for (auto& [time, name] : found) names.push_back(std::move(name));
  return names;
}

std::vector<std::string> unfinished_in(const std::string& folder) {
  auto found = folders_in(folder);
  std::erase_if(found, [](const std::string& each) { return !each.ends_with(kSaving); });
  return found;
}

Status remove_checkpoint(const std::string& path) {
  if (is_link(path)) return refuse_link(path);
  ::unlink((path + "/" + kIndexName).c_str());
  return remove_folder(path);
}

}  // namespace muster::shards

// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/save.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <map>
#include <span>
#include <string_view>
#include <system_error>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/safetensors.h"
#include "checkpoint/format/history.h"

namespace muster::shards {
namespace {

Status refuse_save(const std::string& why) {
  return {Code::invalid_argument, "checkpoint: " + why};
}

/// The bytes of the pieces of one file: of piece `number`, `size` from the byte `at` on.
using BytesOfPiece = std::function<Result<std::span<const std::byte>>(
    std::size_t number, std::size_t at, std::size_t size)>;

/// Writes one file; adds it to this rank's part of the index.
Status write_file(const PlannedSave& plan, const WrittenFile& file, const BytesOfPiece& bytes_of,
                  Index& part) {
  std::vector<HeaderEntry> entries;
  for (const WrittenPiece& piece : file.pieces) {
    entries.push_back({piece.name, piece.dtype, piece.box, 0, 0});
    give_type_of_files(entries.back());
  }
  const std::string header = write_header(entries);
  if (header.size() > kHeaderLimit)
    return refuse_save(file.file + " would have a header of " + std::to_string(header.size()) +
                       " bytes, more than readers of safetensors take: divide the state");
  auto writer = FileWriter::create(plan.folder() + "/" + file.file);
  if (!writer) return writer.status();
  if (Status done = writer->write(std::as_bytes(std::span(header))); !done) return done;
  for (std::size_t i = 0; i < file.pieces.size(); ++i) {
    const WrittenPiece& piece = file.pieces[i];
    const auto size = static_cast<std::size_t>(PlannedSave::bytes_of(piece));
    BlockDigests digests;
    for (std::size_t at = 0; at < size; at += kHashedTogether) {
      const auto bytes = bytes_of(i, at, std::min(kHashedTogether, size - at));
      if (!bytes) return bytes.status().with_context("tensor '" + piece.name + "'");
      digests.add(*bytes);  // and is written from the cache
      if (Status done = writer->write(*bytes); !done)
        return done.with_context("tensor '" + piece.name + "'");
    }
    StoredTensor& tensor = part.tensors[piece.name];
    tensor.dtype = piece.dtype;
    tensor.sizes = piece.sizes;
    tensor.pieces.push_back(
        {file.file, piece.box, header.size() + entries[i].begin, {}, digests.text()});
  }
  if (Status done = writer->close(plan.options.durable); !done) return done;
  part.files[file.file] = {header.size() + (entries.empty() ? 0 : entries.back().end),
                           header.size(), digest_of(header)};
  return {};
}

/// Why a rank cannot write: the folder of the save is not there.
Status without_folder(const PlannedSave& plan, const Status& failed) {
  Status why = superseded(plan.options.path);
  if (plan.staging) return why;
  return {why.code(), failed.message() + "; " + why.message() +
                          ". If there is no such job, this rank does not see rank 0's folder"};
}

Status write_files(const PlannedSave& plan, int rank, const std::vector<const std::byte*>& data,
                   Index& part) {
  std::size_t next = 0;
  for (const WrittenFile& file : plan.files) {
    if (file.rank != rank) continue;
    const auto of_file = std::span(data).subspan(next, file.pieces.size());
    const auto bytes_of = [&](std::size_t number, std::size_t at, std::size_t size) {
      return Result(std::span(of_file[number] + at, size));
    };
    if (Status done = write_file(plan, file, bytes_of, part); !done) return done;
    next += file.pieces.size();
  }
  return {};
}

Status write_files(const PlannedSave& plan, int rank, const ReadPiece& read, Index& part) {
  std::vector<std::byte> buffer(kHashedTogether);
  for (const WrittenFile& file : plan.files) {
    if (file.rank != rank) continue;
    const auto bytes_of = [&](std::size_t number, std::size_t at,
                              std::size_t size) -> Result<std::span<const std::byte>> {
      const auto bytes = std::span(buffer).first(size);
      if (Status done = read(file.pieces[number], at, bytes); !done) return done;
      return std::span<const std::byte>(bytes);
    };
    if (Status done = write_file(plan, file, bytes_of, part); !done) return done;
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

/// Rank 0's part of the end: the commit, and what it lets be removed.
Status commit(const PlannedSave& plan, const std::vector<std::string>& parts,
              const std::string& values) {
  const CommitOptions& options = plan.options;
  Index index;
  index.commit = plan.staging->record();
  index.step = options.step;
  index.world_size = static_cast<int>(parts.size());
  index.saved_at = now_text();
  index.values = values;
  for (const std::string& part : parts)
    if (Status added = add_files(index, part); !added) return added;
  if (Status there = check_files(plan.folder(), index); !there)
    return exists(plan.folder()) ? there : superseded(options.path);
  const std::string text = text_of_index(index);
  if (const auto read = read_index(text); !read)  // nothing is committed that could not be loaded
    return read.status().with_context("checkpoint: the index that was to be written");
  if (Status done = plan.staging->commit(text, options.durable); !done) return done;
  return keep_last(options.path, options.keep_last);
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
  void remove_staging(const PlannedSave& plan) const {
    if (plan.staging && all_took_part_) plan.staging->discard();
  }

 private:
  bool all_took_part_;
  SavingRanks ranks_;
};

/// Rank 0's part of the beginning.
Status begin_staging(PlannedSave& plan) {
  auto begun = StagingFolder::begin(plan.options.path, plan.options.saver, plan.options.overwrite);
  if (!begun) return begun.status();
  plan.staging = std::make_shared<StagingFolder>(std::move(*begun));
  plan.stamp = plan.staging->stamp();
  return {};
}

/// "<stamp>\n<shards>": only rank 0 has a stamp.
std::string plan_text(const PlannedSave& plan, const std::vector<Shard>& shards) {
  return plan.stamp + "\n" + text_of_shards(shards);
}

/// "-<code> <message>": the other ranks fail with the same code.
std::string text_of_failure(const Status& failure) {
  return "-" + std::to_string(static_cast<int>(failure.code())) + " " + failure.message();
}
Status failure_in(std::string_view text) {
  int code = 0;
  if (!text.empty()) text.remove_prefix(1);
  const auto read = std::from_chars(text.data(), text.data() + text.size(), code);
  const bool known = read.ec == std::errc() && code > static_cast<int>(Code::ok) &&
                     code <= static_cast<int>(Code::internal);
  text.remove_prefix(std::min(text.size(), text.find(' ') + 1));
  return {known ? static_cast<Code>(code) : Code::peer_failed, std::string(text)};
}

}  // namespace

Result<std::vector<std::string>> exchange_or_fail(const SavingRanks& ranks, const Status& mine,
                                                  const std::string& text, ExchangeLimit limit) {
  if (ranks.size == 1) {
    if (!mine) return mine;
    return std::vector<std::string>{text};
  }
  auto all = ranks.exchange(mine.ok() ? "+" + text : text_of_failure(mine), limit);
  if (!all) return all.status();
  if (!mine) return mine;
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    std::string& each = (*all)[rank];
    if (each.empty() || each.front() != '+')
      return failure_in(each).with_context("rank " + std::to_string(rank));
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
  Status mine = before;
  if (auto path = local_path(options.path); path.ok())
    plan.options.path = std::move(*path);
  else if (mine.ok())
    mine = path.status();
  if (mine.ok() && options.keep_last < 0)
    mine = refuse_save("keep_last is " + std::to_string(options.keep_last) +
                       ": give how many checkpoints stay, or 0 for all");
  if (mine.ok() && ranks.rank == 0) mine = begin_staging(plan);
  const NotedExchange noted(ranks);
  const auto texts =
      exchange_or_fail(noted.ranks(), mine, plan_text(plan, shards), ExchangeLimit::group_timeout);
  if (!texts) {
    noted.remove_staging(plan);
    return texts.status();
  }
  std::vector<std::vector<Shard>> all;
  for (std::size_t rank = 0; rank < texts->size(); ++rank) {
    const std::string_view text = (*texts)[rank];
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (rank == 0) plan.stamp = text.substr(0, end);
    auto read = read_shards(text.substr(std::min(end + 1, text.size())));
    if (!read) {
      noted.remove_staging(plan);
      return read.status();
    }
    all.push_back(std::move(*read));
  }
  auto files = plan_files(all);  // the same on all ranks, and so is its failure
  if (!files) {
    noted.remove_staging(plan);
    return files.status();
  }
  plan.files = std::move(*files);
  return plan;
}

namespace {

/// The exchanges and the commit, after this rank has written `part`; or why it has not.
Status finish_written(const PlannedSave& plan, const Index& part, const std::string& values,
                      const SavingRanks& ranks, Status mine, bool has_begun) {
  // The names of the files are in the folder's own memory, which rank 0 brings to the disk with the
  // index; on a network's file system each host's must be.
  if (mine.ok() && plan.options.durable) mine = sync_folder(plan.folder());
  if (!mine && has_begun && !exists(plan.folder())) mine = without_folder(plan, mine);
  const NotedExchange noted(ranks);
  const auto parts =
      exchange_or_fail(noted.ranks(), mine, text_of_files(part), ExchangeLimit::none);
  if (!parts) {
    noted.remove_staging(plan);
    return parts.status();
  }
  Status committed;
  if (ranks.rank == 0) {
    committed = commit(plan, *parts, values);
    noted.remove_staging(plan);  // nothing is left of it where it has been committed
  }
  return exchange_or_fail(ranks, committed, {}, ExchangeLimit::none).status();
}

}  // namespace

Status finish_save(const PlannedSave& plan, const std::vector<const std::byte*>& data,
                   const std::string& values, const SavingRanks& ranks, const Status& before) {
  Index part;
  Status mine = before.ok() ? write_files(plan, ranks.rank, data, part) : before;
  return finish_written(plan, part, values, ranks, std::move(mine), before.ok());
}

Status finish_save(const PlannedSave& plan, const ReadPiece& read, const std::string& values,
                   const SavingRanks& ranks) {
  Index part;
  Status mine = write_files(plan, ranks.rank, read, part);
  return finish_written(plan, part, values, ranks, std::move(mine), true);
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

}  // namespace muster::shards

// SPDX-License-Identifier: BSD-3-Clause
/// Loading: each rank reads from the checkpoint's files the bytes that it needs, however they were
/// divided when they were saved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/index.h"
#include "checkpoint/format/plan/division.h"
#include "checkpoint/format/save.h"
#include "muster/status.h"

namespace muster::shards {

/// One thread at a time; the index must outlive it.
class Reader {
 public:
  explicit Reader(const Index& index) : index_(index) {}

  /// Whether `read` will find what it needs: the tensor, of this type and these sizes, and files of
  /// the lengths and with the headers that were saved.
  Status check(const Shard& wanted);

  /// Fills `to`, the memory of `wanted`. Fails naming tensor and file: where `check` does, and
  /// where bytes do not fit their digest. Whole blocks of 1 MiB are read, so that all are verified.
  /// In checkpoints of versions without digests of blocks, only a piece that is read whole is.
  Status read(const Shard& wanted, std::span<std::byte> to);

  /// Fills `to` with the bytes of a piece of tensor `name` from the byte `at` of it on; verified as
  /// `read` does.
  Status read_piece(const std::string& name, const StoredPiece& piece, std::uint64_t at,
                    std::span<std::byte> to);

  /// Bytes of tensors that have been read so far.
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  Result<const FileReader*> file(const std::string& name);
  Status read_box(const StoredTensor& tensor, const Box& wanted, std::byte* to);
  Status read_common(const StoredTensor& tensor, const StoredPiece& piece, const Box& common,
                     const Box& wanted, std::byte* to);

  const Index& index_;
  std::map<std::string, FileReader> files_;
  std::uint64_t bytes_read_ = 0;
};

/// Collective: whether all ranks have opened the same checkpoint. `mine`: why this rank has none;
/// `digest`: its index's. Fails on all ranks where one has none or another one.
Status agree_on_index(const SavingRanks& ranks, const Status& mine, const std::string& digest);

/// Everything that is wrong with a checkpoint's files, a sentence each that names file and tensor;
/// empty where every byte is as it was saved.
std::vector<std::string> verify(const Index& index);

}  // namespace muster::shards

// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/load.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/files/safetensors.h"

namespace muster::shards {
namespace {

/// Runs shorter than this are read together with what lies between them, in pieces of `kBuffer`.
constexpr std::size_t kShortRun = 4096;
constexpr std::size_t kBuffer = std::size_t{1} << 18;
/// A reader keeps so many descriptors at most.
constexpr std::size_t kMostOpenFiles = 256;  // limit: descriptors

Status refuse_load(const std::string& why) {
  return {Code::invalid_argument, "checkpoint: " + why};
}

/// Bytes of one piece, of which runs are wanted in ascending order.
class RunReader {
 public:
  RunReader(const FileReader& file, const StoredPiece& piece, std::uint64_t bytes)
      : file_(file), piece_(piece), bytes_(bytes) {}

  /// From the byte `at` of the piece on. Every byte is verified where the piece has digests of its
  /// blocks, and a run that is the whole piece where it has one digest.
  Status read(std::uint64_t at, std::span<std::byte> to) {
    if (!piece_.blocks.empty()) return read_blocks(at, to);
    if (!piece_.digest.empty() && to.size() == bytes_) return read_whole(to);
    if (to.size() >= kShortRun) return read_bytes(at, to);
    if (at < begin_ || at + to.size() > begin_ + buffer_.size()) {
      buffer_.resize(std::min<std::uint64_t>(kBuffer, bytes_ - at));
      begin_ = at;
      if (Status read = read_bytes(at, buffer_); !read) return read;
    }
    std::memcpy(to.data(), buffer_.data() + (at - begin_), to.size());
    return {};
  }
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  Status read_bytes(std::uint64_t at, std::span<std::byte> to) {
    bytes_read_ += to.size();
    return file_.read_at(piece_.at + at, to);
  }
  /// Hashed part by part while it is in the cache.
  Status read_hashed(std::uint64_t at, std::span<std::byte> to, Digest& digest) {
    while (!to.empty()) {
      const auto part = to.first(std::min(kHashedTogether, to.size()));
      if (Status read = read_bytes(at, part); !read) return read;
      digest.add(part);
      at += part.size();
      to = to.subspan(part.size());
    }
    return {};
  }
  Status read_whole(std::span<std::byte> to) {
    Digest digest;
    if (Status read = read_hashed(0, to, digest); !read) return read;
    return digest.text() == piece_.digest ? Status() : altered();
  }
  /// Whole blocks go to their place at once, of others the part through a buffer.
  Status read_blocks(std::uint64_t at, std::span<std::byte> to) {
    while (!to.empty()) {
      const std::uint64_t number = at / kDigestBlock, begin = number * kDigestBlock;
      const auto size =
          static_cast<std::size_t>(std::min<std::uint64_t>(kDigestBlock, bytes_ - begin));
      const auto skipped = static_cast<std::size_t>(at - begin);
      const auto part = to.first(std::min(size - skipped, to.size()));
      if (part.size() == size) {
        if (Status read = read_block(number, part); !read) return read;
      } else {
        if (buffer_.empty() || begin_ != begin) {
          buffer_.resize(size);
          begin_ = begin;
          if (Status read = read_block(number, buffer_); !read) return read;
        }
        std::memcpy(part.data(), buffer_.data() + skipped, part.size());
      }
      at += part.size();
      to = to.subspan(part.size());
    }
    return {};
  }
  Status read_block(std::uint64_t number, std::span<std::byte> to) {
    Digest digest;
    if (Status read = read_hashed(number * kDigestBlock, to, digest); !read) return read;
    return digest.text() == BlockDigests::of_block(piece_.blocks, number) ? Status() : altered();
  }
  Status altered() const {
    return refuse_load("the piece at " + text_of(piece_.box.offsets) + " in " + piece_.file +
                       " does not fit its digest: it is altered");
  }

  const FileReader& file_;
  const StoredPiece& piece_;
  const std::uint64_t bytes_;
  std::uint64_t begin_ = 0, bytes_read_ = 0;  // of the buffer, in the piece
  std::vector<std::byte> buffer_;
};

Status check_header(const FileReader& file, const StoredFile& stored) {
  if (file.bytes() != stored.bytes)
    return refuse_load("it has " + std::to_string(file.bytes()) + " bytes and not the " +
                       std::to_string(stored.bytes) +
                       " that were saved: it is cut off or another one");
  std::string header(std::min(stored.header_bytes, kHeaderLimit + kLengthBytes), '\0');
  if (Status read = file.read_at(0, std::as_writable_bytes(std::span(header))); !read) return read;
  // An index names files that its author may never have seen: only those of this form are read.
  if (digest_of(header) != stored.header_digest ||
      length_in(header) != header.size() - kLengthBytes)
    return refuse_load("its header does not fit the index: it is altered");
  return {};
}

}  // namespace

Result<const FileReader*> Reader::file(const std::string& name) {
  if (const auto found = files_.find(name); found != files_.end()) return &found->second;
  if (files_.size() >= kMostOpenFiles) files_.clear();
  const std::string path = index_.folder + "/" + name;
  auto opened = FileReader::open(path);
  if (!opened) return opened.status();
  if (Status good = check_header(*opened, index_.files.at(name)); !good)
    return good.with_context(path);
  return &files_.emplace(name, std::move(*opened)).first->second;
}

Status Reader::check(const Shard& wanted) {
  const auto found = index_.tensors.find(wanted.name);
  if (found == index_.tensors.end())
    return refuse_load(index_.folder + " has no tensor '" + wanted.name + "'");
  const StoredTensor& tensor = found->second;
  if (tensor.dtype != wanted.dtype || tensor.sizes != wanted.sizes)
    return refuse_load("tensor '" + wanted.name + "' is " + tensor.dtype + " " +
                       text_of(tensor.sizes) + " in " + index_.folder + ", and " + wanted.dtype +
                       " " + text_of(wanted.sizes) + " is to be loaded");
  for (const Box& box : wanted.boxes) {
    if (!box.is_within(wanted.sizes))
      return refuse_load("tensor '" + wanted.name +
                         "': the part that is to be loaded is not one of it");
    for (const StoredPiece& piece : tensor.pieces)
      if (box.elements() > 0 && intersection(piece.box, box))
        if (const auto opened = file(piece.file); !opened)
          return opened.status().with_context("tensor '" + wanted.name + "'");
  }
  return {};
}

Status Reader::read(const Shard& wanted, std::span<std::byte> to) {
  if (Status good = check(wanted); !good) return good;
  const StoredTensor& tensor = index_.tensors.find(wanted.name)->second;
  const auto width = static_cast<std::size_t>(element_bytes(tensor.dtype));
  std::size_t at = 0;
  for (const Box& box : wanted.boxes) {
    const std::size_t bytes = static_cast<std::size_t>(box.elements()) * width;
    if (to.size() - at < bytes)
      return refuse_load("tensor '" + wanted.name +
                         "': the memory is smaller than the part that is to be loaded");
    if (Status done = read_box(tensor, box, to.data() + at); !done)
      return done.with_context("tensor '" + wanted.name + "'");
    at += bytes;
  }
  return {};
}

Status Reader::read_box(const StoredTensor& tensor, const Box& wanted, std::byte* to) {
  if (wanted.elements() == 0) return {};
  for (const StoredPiece& piece : tensor.pieces)  // a division of the tensor, so all is found
    if (const auto common = intersection(piece.box, wanted))
      if (Status done = read_common(tensor, piece, *common, wanted, to); !done) return done;
  return {};
}

Status Reader::read_piece(const std::string& name, const StoredPiece& piece, std::uint64_t at,
                          std::span<std::byte> to) {
  const auto found = index_.tensors.find(name);
  const auto opened = file(piece.file);
  if (!opened || found == index_.tensors.end()) return opened.status();
  const std::int64_t bytes = piece.box.elements() * element_bytes(found->second.dtype);
  RunReader runs(**opened, piece, static_cast<std::uint64_t>(bytes));
  return runs.read(at, to).with_context(index_.folder);
}

Status Reader::read_common(const StoredTensor& tensor, const StoredPiece& piece, const Box& common,
                           const Box& wanted, std::byte* to) {
  const auto opened = file(piece.file);
  if (!opened) return opened.status();
  const auto width = static_cast<std::uint64_t>(element_bytes(tensor.dtype));
  const std::uint64_t bytes = static_cast<std::uint64_t>(piece.box.elements()) * width;
  RunReader runs(**opened, piece, bytes);
  Status done;
  for_each_run(common, piece.box, wanted,
               [&](std::int64_t from, std::int64_t into, std::int64_t elements) {
                 if (!done) return;
                 const std::span part(to + static_cast<std::uint64_t>(into) * width,
                                      static_cast<std::uint64_t>(elements) * width);
                 done = runs.read(static_cast<std::uint64_t>(from) * width, part);
               });
  bytes_read_ += runs.bytes_read();
  return done.with_context(index_.folder);
}

Status agree_on_index(const SavingRanks& ranks, const Status& mine, const std::string& digest) {
  const auto digests = exchange_or_fail(ranks, mine, digest, ExchangeLimit::group_timeout);
  if (!digests) return digests.status();
  for (std::size_t rank = 1; rank < digests->size(); ++rank)
    if ((*digests)[rank] != digests->front())
      return refuse_load("rank " + std::to_string(rank) +
                         " has opened another checkpoint than rank 0: their indexes differ; let "
                         "rank 0 choose one, and load it from a folder that all ranks share");
  return {};
}

namespace {

/// Reads all of a piece, a block at a time.
Status verify_piece(const FileReader& file, const StoredPiece& piece, std::uint64_t size,
                    std::vector<std::byte>& memory) {
  Digest digest;
  BlockDigests blocks;
  for (std::uint64_t at = 0; at < size; at += kDigestBlock) {
    const auto part = std::span(memory).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(kDigestBlock, size - at)));
    if (Status read = file.read_at(piece.at + at, part); !read) return read;
    if (piece.blocks.empty())
      digest.add(part);
    else
      blocks.add(part);
  }
  const bool good = !piece.blocks.empty() ? blocks.text() == piece.blocks
                                          : piece.digest.empty() || digest.text() == piece.digest;
  if (good) return {};
  return refuse_load("the piece at " + text_of(piece.box.offsets) + " in " + piece.file +
                     " does not fit its digest: it is altered");
}

}  // namespace

std::vector<std::string> verify(const Index& index) {
  std::vector<std::string> wrong;
  std::map<std::string, FileReader> files;
  for (const auto& [name, stored] : index.files) {
    const std::string path = index.folder + "/" + name;
    auto file = FileReader::open(path);
    Status good = file.status();
    if (good.ok()) good = check_header(*file, stored).with_context(path);
    if (good.ok())
      files.emplace(name, std::move(*file));
    else
      wrong.push_back(good.message());
  }
  std::vector<std::byte> bytes(kDigestBlock);
  for (const auto& [name, tensor] : index.tensors)
    for (const StoredPiece& piece : tensor.pieces) {
      const auto file = files.find(piece.file);
      if (file == files.end()) {
        wrong.push_back("tensor '" + name + "': the piece at " + text_of(piece.box.offsets) +
                        " is lost with " + piece.file);
        continue;
      }
      const auto width = static_cast<std::uint64_t>(element_bytes(tensor.dtype));
      const auto size = static_cast<std::uint64_t>(piece.box.elements()) * width;
      if (Status good = verify_piece(file->second, piece, size, bytes); !good)
        wrong.push_back(good.with_context("tensor '" + name + "'").message());
    }
  return wrong;
}

}  // namespace muster::shards

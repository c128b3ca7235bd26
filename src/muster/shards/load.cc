#include "muster/shards/load.h"

#include <cstring>
#include <optional>

#include "muster/shards/files/digest.h"
#include "muster/shards/files/safetensors.h"
#include "muster/shards/plan/element_type.h"

namespace muster::shards {
namespace {

/// Runs shorter than this are read together with what lies between them, in pieces of `kBuffer`.
constexpr std::int64_t kShortRun = 4096;
constexpr std::size_t kBuffer = std::size_t{1} << 18;

Status refuse_load(const std::string& why) {
  return {Code::invalid_argument, "checkpoint: " + why};
}

/// Bytes of one piece, of which many short runs are wanted in ascending order.
class RunReader {
 public:
  RunReader(const FileReader& file, std::uint64_t end) : file_(file), end_(end) {}

  Status read(std::uint64_t at, std::span<std::byte> to) {
    if (to.size() >= static_cast<std::size_t>(kShortRun)) {
      bytes_read_ += to.size();
      return file_.read_at(at, to);
    }
    if (at < begin_ || at + to.size() > begin_ + buffer_.size()) {
      buffer_.resize(std::min<std::uint64_t>(kBuffer, end_ - at));
      begin_ = at;
      bytes_read_ += buffer_.size();
      if (Status read = file_.read_at(at, buffer_); !read) return read;
    }
    std::memcpy(to.data(), buffer_.data() + (at - begin_), to.size());
    return {};
  }
  /// One run that is a whole piece, hashed block by block while it is in the cache.
  Status read_whole(std::uint64_t at, std::span<std::byte> to, Digest& digest) {
    bytes_read_ += to.size();
    for (; !to.empty(); to = to.subspan(std::min(kDigestBlock, to.size()))) {
      const auto block = to.first(std::min(kDigestBlock, to.size()));
      if (Status read = file_.read_at(at, block); !read) return read;
      digest.add(block);
      at += block.size();
    }
    return {};
  }
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  const FileReader& file_;
  const std::uint64_t end_;
  std::uint64_t begin_ = 0, bytes_read_ = 0;
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
  const std::string path = index_.folder + "/" + name;
  auto opened = FileReader::open(path);
  if (!opened) return opened.status();
  if (Status good = check_header(*opened, index_.files.at(name)); !good)
    return good.with_context(path);
  return &files_.emplace(name, std::move(*opened)).first->second;
}

Status Reader::read(const Shard& wanted, std::span<std::byte> to) {
  const auto found = index_.tensors.find(wanted.name);
  if (found == index_.tensors.end())
    return refuse_load(index_.folder + " has no tensor '" + wanted.name + "'");
  const StoredTensor& tensor = found->second;
  if (tensor.dtype != wanted.dtype || tensor.sizes != wanted.sizes)
    return refuse_load("tensor '" + wanted.name + "' is " + tensor.dtype + " " +
                       text_of(tensor.sizes) + " in " + index_.folder + ", and " + wanted.dtype +
                       " " + text_of(wanted.sizes) + " is to be loaded");
  const auto width = static_cast<std::size_t>(element_bytes(tensor.dtype));
  std::size_t at = 0;
  for (const Box& box : wanted.boxes) {
    const std::size_t bytes = static_cast<std::size_t>(box.elements()) * width;
    if (!box.is_within(wanted.sizes) || to.size() - at < bytes)
      return refuse_load("tensor '" + wanted.name +
                         "': the part that is to be loaded is not one of it");
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
      if (Status done = read_piece(tensor, piece, *common, wanted, to); !done) return done;
  return {};
}

Status Reader::read_piece(const StoredTensor& tensor, const StoredPiece& piece, const Box& common,
                          const Box& wanted, std::byte* to) {
  const auto opened = file(piece.file);
  if (!opened) return opened.status();
  const auto width = static_cast<std::uint64_t>(element_bytes(tensor.dtype));
  const std::uint64_t bytes = static_cast<std::uint64_t>(piece.box.elements()) * width;
  RunReader runs(**opened, piece.at + bytes);
  Status done;
  std::optional<Digest> digest;
  for_each_run(common, piece.box, wanted,
               [&](std::int64_t from, std::int64_t into, std::int64_t elements) {
                 if (!done) return;
                 const std::span part(to + static_cast<std::uint64_t>(into) * width,
                                      static_cast<std::uint64_t>(elements) * width);
                 if (part.size() == bytes && !piece.digest.empty())
                   done = runs.read_whole(piece.at, part, digest.emplace());
                 else
                   done = runs.read(piece.at + static_cast<std::uint64_t>(from) * width, part);
               });
  bytes_read_ += runs.bytes_read();
  if (!done) return done;
  if (digest && digest->text() != piece.digest)
    return refuse_load("the piece at " + text_of(piece.box.offsets) + " in " + index_.folder + "/" +
                       piece.file + " does not fit its digest: it is altered");
  return {};
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
  std::vector<std::byte> bytes;
  for (const auto& [name, tensor] : index.tensors)
    for (const StoredPiece& piece : tensor.pieces) {
      const auto file = files.find(piece.file);
      if (file == files.end()) {
        wrong.push_back("tensor '" + name + "': the piece at " + text_of(piece.box.offsets) +
                        " is lost with " + piece.file);
        continue;
      }
      bytes.resize(static_cast<std::size_t>(piece.box.elements() * element_bytes(tensor.dtype)));
      const Status read = file->second.read_at(piece.at, bytes);
      if (!read)
        wrong.push_back(read.with_context("tensor '" + name + "'").message());
      else if (!piece.digest.empty() && digest_of(bytes) != piece.digest)
        wrong.push_back("tensor '" + name + "': the piece at " + text_of(piece.box.offsets) +
                        " in " + piece.file + " does not fit its digest: it is altered");
    }
  return wrong;
}

}  // namespace muster::shards

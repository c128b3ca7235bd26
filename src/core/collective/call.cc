// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/call.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/collective/call_record.h"
#include "core/collective/control.h"
#include "core/collective/kernels/kernels.h"

namespace muster::collective {
namespace {

constexpr std::uint64_t kLabelFactor = 0x9e3779b97f4a7c15;  // spreads tags over a digest's bits

class Check {
 public:
  Check(const Args& args, int rank, int size)
      : args_(args),
        row_(info(args.op)),
        rank_(rank),
        size_(size),
        root_(!row_.rooted || args.root == rank) {}

  Status run() {
    if (is_message(args_.op)) return message();
    if (args_.op == Op::barrier) return {};
    if (row_.rooted && (args_.root < 0 || args_.root >= size_)) {
      return invalid("needs a root from 0 to " + std::to_string(size_ - 1) +
                     ", the positions in the group, and got " + std::to_string(args_.root));
    }
    std::string why;
    if (row_.reduces && !reduce_supports(args_.reduce, args_.dtype, &why))
      return Status(Code::unsupported, std::string(row_.name) + ": " + why);
    if (Status counts = slices(); !counts) return counts;
    if (Status whole = elements(); !whole) return whole;
    if (Status lengths = matching_lengths(); !lengths) return lengths;
    return overlaps();
  }

 private:
  Status invalid(const std::string& what) const {
    return Status(Code::invalid_argument, std::string(row_.name) + " " + what);
  }

  bool reads_input() const {
    return args_.op != Op::broadcast && (args_.op != Op::scatter || root_);
  }
  bool writes_output() const { return (args_.op != Op::reduce && args_.op != Op::gather) || root_; }

  Status message() const {
    const bool receives = args_.op == Op::recv;
    if (args_.inputs.size() != (receives ? 0 : 1) || args_.outputs.size() != (receives ? 1 : 0)) {
      return invalid(std::string("needs one slice, an ") + (receives ? "output" : "input") +
                     ", and got " + std::to_string(args_.inputs.size()) + " inputs and " +
                     std::to_string(args_.outputs.size()) + " outputs");
    }
    const bool any = receives && args_.root == transport::kAnyMember;
    if ((args_.root < 0 || args_.root >= size_) && !any) {
      return invalid("needs a peer from 0 to " + std::to_string(size_ - 1) +
                     ", a position in the group, and got " + std::to_string(args_.root));
    }
    if (args_.tag >= kFirstReservedTag)
      return invalid("needs a tag below 2^62 and got " + std::to_string(args_.tag));
    return elements();
  }

  Status slices() const {
    const auto expect = [&](const char* side, std::size_t came, bool lists) {
      const auto expected = static_cast<std::size_t>(lists ? size_ : 1);
      if (came == expected) return Status();
      return invalid("needs " + std::to_string(expected) + " " + side +
                     (expected == 1 ? "" : "s, one per member,") + " and got " +
                     std::to_string(came));
    };
    if (reads_input()) {
      if (Status input = expect("input", args_.inputs.size(), row_.lists_input); !input)
        return input;
    }
    return writes_output() ? expect("output", args_.outputs.size(), row_.lists_output) : Status();
  }

  Status elements() const {
    const std::size_t width = size_of(args_.dtype);
    const auto whole = [&](const char* side, std::size_t index, std::size_t bytes) {
      if (bytes % width == 0) return Status();
      return invalid(std::string("got ") + side + " " + std::to_string(index) + " of " +
                     std::to_string(bytes) + " bytes, which is not a whole number of " +
                     std::string(name_of(args_.dtype)) + " elements of " + std::to_string(width));
    };
    for (std::size_t i = 0; reads_input() && i < args_.inputs.size(); ++i) {
      if (Status input = whole("input", i, args_.inputs[i].size()); !input) return input;
    }
    for (std::size_t i = 0; writes_output() && i < args_.outputs.size(); ++i) {
      if (Status output = whole("output", i, args_.outputs[i].size()); !output) return output;
    }
    return {};
  }

  Status equal(std::string_view what, std::size_t output, std::size_t input) const {
    if (output == input) return {};
    return invalid("needs " + std::string(what) + " of the same length: the output has " +
                   std::to_string(output) + " bytes, the input " + std::to_string(input));
  }

  Status matching_lengths() const {
    const auto me = static_cast<std::size_t>(rank_);
    switch (args_.op) {
      case Op::all_reduce:
        return equal("input and output", args_.outputs[0].size(), args_.inputs[0].size());
      case Op::reduce:
        return root_ ? equal("input and output", args_.outputs[0].size(), args_.inputs[0].size())
                     : Status();
      case Op::all_gather:
        return equal("this member's own output and its input", args_.outputs[me].size(),
                     args_.inputs[0].size());
      case Op::reduce_scatter:
        return equal("this member's own input and its output", args_.outputs[0].size(),
                     args_.inputs[me].size());
      case Op::all_to_all:
        return equal("the output and the input that this member keeps", args_.outputs[me].size(),
                     args_.inputs[me].size());
      case Op::gather:
        for (std::size_t r = 0; root_ && r < args_.outputs.size(); ++r) {
          if (args_.outputs[r].size() != args_.inputs[0].size())
            return equal("output " + std::to_string(r) + " and the input", args_.outputs[r].size(),
                         args_.inputs[0].size());
        }
        return {};
      case Op::scatter:
        for (std::size_t r = 0; root_ && r < args_.inputs.size(); ++r) {
          if (args_.outputs[0].size() != args_.inputs[r].size())
            return equal("the output and input " + std::to_string(r), args_.outputs[0].size(),
                         args_.inputs[r].size());
        }
        return {};
      default: return {};
    }
  }

  struct MemoryPiece {
    const std::byte* begin;
    const std::byte* end;
    bool output;
    std::size_t index;
  };

  // This member's own input and output may be the same memory. No other output may overlap
  // anything.
  bool may_coincide(const MemoryPiece& input, const MemoryPiece& output) const {
    const auto me = static_cast<std::size_t>(rank_);
    if (row_.lists_input && input.index != me) return false;
    return !row_.lists_output || output.index == me;
  }

  Status overlap_of(const MemoryPiece& a, const MemoryPiece& b) const {
    if (!a.output && !b.output) return {};
    const MemoryPiece& output = a.output ? a : b;
    const MemoryPiece& other = a.output ? b : a;
    if (!other.output && other.begin == output.begin && other.end == output.end &&
        may_coincide(other, output))
      return {};
    return invalid("got output " + std::to_string(output.index) + " overlapping " +
                   (other.output ? "output " : "input ") + std::to_string(other.index) +
                   "; give every slice memory of its own");
  }

  Status overlaps() const {
    if (args_.inputs.size() + args_.outputs.size() == 2 &&
        args_.inputs.size() == 1) {  // the common case, without a list
      const ConstBytes in = args_.inputs[0];
      const ConstBytes out = args_.outputs[0];
      if (in.empty() || out.empty() || in.data() + in.size() <= out.data() ||
          out.data() + out.size() <= in.data())
        return {};
      if (!writes_output() || !reads_input()) return {};
      return overlap_of({in.data(), in.data() + in.size(), false, 0},
                        {out.data(), out.data() + out.size(), true, 0});
    }
    if (!writes_output()) return {};
    thread_local std::vector<MemoryPiece> pieces;  // reused: no allocation in steady state
    pieces.clear();
    pieces.reserve(args_.inputs.size() + args_.outputs.size());
    for (std::size_t i = 0; reads_input() && i < args_.inputs.size(); ++i) {
      const ConstBytes in = args_.inputs[i];
      if (!in.empty()) pieces.push_back({in.data(), in.data() + in.size(), false, i});
    }
    for (std::size_t i = 0; i < args_.outputs.size(); ++i) {
      const ConstBytes out = args_.outputs[i];
      if (!out.empty()) pieces.push_back({out.data(), out.data() + out.size(), true, i});
    }
    // Sorted by begin. Inputs may overlap each other, so each piece is compared with the furthest
    // end of either kind so far.
    std::sort(pieces.begin(), pieces.end(),
              [](const MemoryPiece& a, const MemoryPiece& b) { return a.begin < b.begin; });
    const MemoryPiece* furthest[2] = {nullptr, nullptr};
    for (const MemoryPiece& piece : pieces) {
      for (const MemoryPiece* before : furthest) {
        if (before == nullptr || before->end <= piece.begin) continue;
        if (Status fine = overlap_of(*before, piece); !fine) return fine;
      }
      const MemoryPiece*& mine = furthest[piece.output ? 1 : 0];
      if (mine == nullptr || mine->end < piece.end) mine = &piece;
    }
    return {};
  }

  const Args& args_;
  const OpInfo& row_;
  const int rank_;
  const int size_;
  const bool root_;
};

// Equal lists have equal digests on every machine; 0 means "nothing to compare".
template <class Slices>
std::uint64_t digest_of(const Slices& slices, DType dtype) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const auto& slice : slices) {
    hash = (hash ^ elements_in(slice.size(), dtype)) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return hash == 0 ? 1 : hash;
}

template <class Slices>
std::uint64_t all_elements(const Slices& slices, DType dtype) {
  std::uint64_t bytes = 0;
  for (const auto& slice : slices) bytes += slice.size();
  return elements_in(bytes, dtype);
}

}  // namespace

Status validate(const Args& args, int rank, int size) { return Check(args, rank, size).run(); }

transport::Fingerprint fingerprint_of(const Args& args, std::uint64_t sequence) {
  const OpInfo& row = info(args.op);
  transport::Fingerprint call = args.part_of;
  call.sequence = sequence;
  if (call.flags != 0) return call;
  call.op = static_cast<std::uint8_t>(args.op);
  if (row.size_rule == SizeRule::none) return call;
  call.dtype = static_cast<std::uint8_t>(args.dtype);
  if (row.reduces) call.reduce = static_cast<std::uint8_t>(args.reduce);
  if (row.rooted) call.root = args.root;
  switch (args.op) {
    case Op::broadcast:
    case Op::scatter: call.count = elements_in(args.outputs[0].size(), args.dtype); break;
    case Op::all_reduce:
    case Op::reduce:
    case Op::gather: call.count = elements_in(args.inputs[0].size(), args.dtype); break;
    case Op::all_gather:  // lengths differ between members, but every member knows them all
      call.count = all_elements(args.outputs, args.dtype);
      call.digest = digest_of(args.outputs, args.dtype);
      break;
    case Op::reduce_scatter:
      call.count = all_elements(args.inputs, args.dtype);
      call.digest = digest_of(args.inputs, args.dtype);
      break;
    default: break;
  }
  if (!is_message(args.op)) call.digest ^= args.tag * kLabelFactor;
  return call;
}

transport::Fingerprint refusal_of(Op op, std::uint64_t sequence) {
  transport::Fingerprint call;
  call.sequence = sequence;
  call.op = static_cast<std::uint8_t>(op);
  call.flags = kRefused;
  return call;
}

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

void CallRecord::log_start() noexcept {
  if (logs_calls() && !group.empty()) {
    try {
      std::string line = "group " + std::string(group) + ": " + std::string(name);
      if (traced.sequence != 0) line += " #" + std::to_string(traced.sequence);
      log(LogLevel::trace, line);
    } catch (const std::bad_alloc&) {  // skip the log line
    }
  }
  if (when_started != nullptr) (*when_started)();
}

void run_single_rank(const Args& args) {
  if (args.op == Op::barrier || args.op == Op::broadcast) return;
  const ConstBytes input = args.inputs[0];
  const MutableBytes out = args.outputs[0];
  if (!info(args.op).reduces) {
    if (!input.empty() && input.data() != out.data())
      std::memcpy(out.data(), input.data(), std::min(input.size(), out.size()));
    return;
  }
  const std::size_t count = elements_in(out.size(), args.dtype);
  if (args.reduce == Reduce::premul_sum)
    return scale(out.data(), input.data(), count, args.dtype, args.factor);
  const std::byte* inputs[] = {input.data()};
  reduce_complete(out.data(), inputs, count, args.dtype, args.reduce);
}

}  // namespace muster::collective

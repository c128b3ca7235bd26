// SPDX-License-Identifier: BSD-3-Clause
// Gather and scatter of small pieces along a binomial tree (`plan::TreePlan`). The root exchanges
// log2(n) messages with its children; each member forwards the pieces of the ranks below it as one
// message. A subtree is a run of ranks starting at its top, and its pieces are sent in that order.
//
// Memory: a member with children holds the pieces of its subtree, at most half of all pieces. The
// root holds the pieces of subtrees whose slices are not contiguous in the caller's memory: at most
// all pieces except its own. `most_bytes` limits both.
#include <optional>

#include "core/collective/links/link_group.h"
#include "core/collective/plan/plan.h"

namespace muster::collective {
namespace {

std::size_t as_size(int number) { return static_cast<std::size_t>(number); }

/// The slices of a subtree; all have the same length.
template <class Bytes>
class PieceRun {
 public:
  PieceRun(const SliceList<Bytes>& slices, const plan::TreePlan& top)
      : slices_(slices), top_(top) {}

  std::size_t count() const { return as_size(top_.subtree()); }
  std::size_t size() const { return count() * each(); }
  std::size_t each() const { return slices_[0].size(); }
  const Bytes& operator[](std::size_t index) const {
    return slices_[as_size(plan::wrap(top_.rank + static_cast<int>(index), top_.size))];
  }
  /// As one range, if they are contiguous.
  std::optional<Bytes> as_one() const {
    for (std::size_t i = 1; i < count(); ++i) {
      if ((*this)[i - 1].data() + each() != (*this)[i].data()) return std::nullopt;
    }
    return Bytes((*this)[0].data(), size());
  }

 private:
  const SliceList<Bytes>& slices_;
  const plan::TreePlan top_;
};

/// Bytes of the root's slices that must pass through scratch memory.
template <class Bytes>
std::size_t scattered_bytes(const SliceList<Bytes>& slices, const plan::TreePlan& root) {
  std::size_t bytes = 0;
  for (int child = 0; child < root.children(); ++child) {
    const PieceRun pieces(slices, root.below(child));
    if (!pieces.as_one()) bytes += pieces.size();
  }
  return bytes;
}

/// The range of a subtree's pieces that belongs to a child of its top.
plan::Slice part_of(const plan::TreePlan& tree, int child) {
  const plan::TreePlan below = tree.below(child);
  return {as_size(plan::wrap(below.rank - tree.rank, tree.size)), as_size(below.subtree())};
}

}  // namespace

Task<Status> LinkGroup::gather_along_tree(const Args& args) {
  return rank_ == args.root ? receive_pieces(args) : forward_up(args);
}

Task<Status> LinkGroup::receive_pieces(const Args& args) {
  const plan::TreePlan tree{rank_, size_, args.root};
  const auto slot = [](int child) { return child % OutstandingTransfers::kSlots; };
  const auto pieces_of = [&](int child) { return PieceRun(args.outputs, tree.below(child)); };
  const std::size_t scattered = scattered_bytes(args.outputs, tree);
  std::byte* next = scattered > 0 ? scratch(scattered) : nullptr;
  std::vector<std::byte*> staged(as_size(tree.children()), nullptr);
  for (int child = 0; child < tree.children(); ++child) {
    const auto pieces = pieces_of(child);
    auto place = pieces.as_one();
    if (!place) {
      place = MutableBytes(staged[as_size(child)] = next, pieces.size());
      next += pieces.size();
    }
    outstanding_.receive(slot(child), tree.child(child), 0, *place);
  }
  copy(args.outputs[as_size(rank_)], args.inputs[0]);
  // The last child has the smallest subtree, and its message arrives first.
  for (int child = tree.children() - 1; child >= 0 && scattered > 0 && outstanding_.ok(); --child) {
    if (staged[as_size(child)] == nullptr) continue;
    co_await until([&] { return outstanding_.done(slot(child)); });
    if (!outstanding_.ok()) break;
    const auto pieces = pieces_of(child);
    for (std::size_t i = 0; i < pieces.count(); ++i)
      copy(pieces[i], {staged[as_size(child)] + i * pieces.each(), pieces.each()});
  }
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

Task<Status> LinkGroup::forward_up(const Args& args) {
  const plan::TreePlan tree{rank_, size_, args.root};
  ConstBytes pieces = args.inputs[0];
  if (tree.children() > 0) {
    const std::size_t each = pieces.size();
    std::byte* memory = scratch(as_size(tree.subtree()) * each);
    for (int child = 0; child < tree.children(); ++child) {
      const auto [begin, count] = part_of(tree, child);
      outstanding_.receive(0, tree.child(child), 0, {memory + begin * each, count * each});
    }
    copy({memory, each}, pieces);
    co_await until([this] { return outstanding_.done(0); });
    pieces = {memory, as_size(tree.subtree()) * each};
  }
  if (outstanding_.ok()) outstanding_.send(1, tree.parent(), 0, pieces);
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

Task<Status> LinkGroup::scatter_along_tree(const Args& args) {
  return rank_ == args.root ? send_pieces(args) : forward_down(args);
}

Task<Status> LinkGroup::send_pieces(const Args& args) {
  const plan::TreePlan tree{rank_, size_, args.root};
  const auto pieces_of = [&](int child) { return PieceRun(args.inputs, tree.below(child)); };
  const std::size_t scattered = scattered_bytes(args.inputs, tree);
  std::byte* next = scattered > 0 ? scratch(scattered) : nullptr;
  for (int child = 0; child < tree.children(); ++child) {
    const auto pieces = pieces_of(child);
    auto place = pieces.as_one();
    if (!place) {
      place = ConstBytes(next, pieces.size());
      for (std::size_t i = 0; i < pieces.count(); ++i, next += pieces.each())
        copy({next, pieces.each()}, pieces[i]);
    }
    outstanding_.send(0, tree.child(child), 0, *place);
  }
  copy(args.outputs[0], args.inputs[as_size(rank_)]);
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

Task<Status> LinkGroup::forward_down(const Args& args) {
  const plan::TreePlan tree{rank_, size_, args.root};
  const std::size_t each = args.outputs[0].size();
  const bool last = tree.children() == 0;
  const MutableBytes pieces =
      last ? args.outputs[0]
           : MutableBytes(scratch(as_size(tree.subtree()) * each), as_size(tree.subtree()) * each);
  outstanding_.receive(0, tree.parent(), 0, pieces);
  co_await until([this] { return outstanding_.done(0); });
  for (int child = 0; child < tree.children() && outstanding_.ok(); ++child) {
    const auto [begin, count] = part_of(tree, child);
    outstanding_.send(1, tree.child(child), 0, pieces.subspan(begin * each, count * each));
  }
  if (outstanding_.ok()) copy(args.outputs[0], pieces.first(each));
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

}  // namespace muster::collective
